"""What the machine tells."""
