"""What the user asked to see of the inside of the models. `capture/inspections.py` calls it in rounds, and knows nothing of it."""
