"""What the user asked to see of the inside of the models. `capture/inspections.py` tells it of rounds, and does not know it."""
