"""NaN origin: where the first value that is not finite came from, in the forward, the backward or before them.

The training thread flags tensors and notes what belongs together (`NanOrigin` in `origins.py`, `recording.py`); a tape of that, with
its flags (`tape.py`), goes to the host, where `verdict.py` finds the place, and `Origins` in `origins.py` logs and shows it.
"""
