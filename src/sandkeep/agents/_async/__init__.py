"""The agent a user holds. Written once, here; `_sync` is generated from it by tools/unasync.py."""
