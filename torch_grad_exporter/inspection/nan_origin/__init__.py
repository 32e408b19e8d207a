"""NaN origin: where the first value that is not finite came from, in the forward, the backward or before them.

On the training thread `NanOrigin` (`origins.py`) and `Recording` (`recording.py`) note what belongs together and flag tensors. A
tape of that (`tape.py`) goes to the host, where `origin_search.py` finds the place, and `Origins` (`origins.py`) logs and shows it.
"""
