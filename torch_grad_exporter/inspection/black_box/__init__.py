"""Black box: the last batches that the models were given, until it is known whether something went wrong with them.

The training thread keeps batches (`keeper.py`, `kept.py`, `random_states.py`); the worker says which of them are needed
(`suspects.py`). `actions/black_box` writes them.
"""
