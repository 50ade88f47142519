"""Checkpoints: saving a sandbox's state in a store, and having it back. docs/design.md, section 8, is the specification."""
