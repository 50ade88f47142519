"""Async is the source; `_sync` is generated, but for io.py."""
