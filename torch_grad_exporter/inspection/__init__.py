"""What the user asked to see of the inside of the models."""
