"""What the user asked to see of the inside of the models. `capture/inspections.py` tells of rounds, and knows nothing of it."""
