"""NaN origin: where the first value that is not finite came from, in the forward, the backward or before them.

The training thread flags tensors and notes what belongs together (`inspection.py`, `recording.py`, `flags.py`); a tape of that
(`tape.py`) goes to the host, where `verdict.py` finds the place, and `origins.py` logs and shows it.
"""
