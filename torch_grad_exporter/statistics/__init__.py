"""Statistics of gradients, computed on the gradient's own device. Torch and numpy only, no metric names.

`eager.py` is the door: it has the gradients prepared (sparse, complex, sharded) and the small ones put together
(`batches.py`, `grouping.py`) and sends each device's share to `host.py` (CPU: may branch on the data, and reads it once,
in `blocks.py`) or `device.py` (any other device: never branches on the data, so that the host never waits). `declared.py` defines
what a statistic is; `together.py` declares those that are always measured, in one pass, `moments.py` and files like it one more
each. From the declarations follows the row of a gradient (`layout.py`).
"""

from __future__ import annotations

import enum


class Column(enum.IntEnum):
    """The places of the package's own columns, which come first in each row. Declared in `together.py` and `moments.py`."""

    NORM = 0
    ZEROS = 1
    NANS = 2
    INFS = 3
    MIN = 4
    MAX = 5
    ZERO_UNITS = 6
    DEAD_UNITS = 7
    SUM = 8
    """Sum of the elements; 0 unless moments are asked for."""
