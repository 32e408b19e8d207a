"""What a user may set, and what is checked of it."""
