"""Sandboxes that never lose their state."""
