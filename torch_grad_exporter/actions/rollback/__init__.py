"""Rollback: copies of the training on the host, and the way back to them."""
