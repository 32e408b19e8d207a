"""Freeze: layers that learn nothing stop being trained, and may be tried again."""
