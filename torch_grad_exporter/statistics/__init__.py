"""Statistics of gradients, computed on the gradient's own device. Torch and numpy only, no metric names.

`eager.py` is the door: it has the gradients prepared (sparse, complex, sharded) and the small ones put together
(`batches.py`, `grouping.py`) and sends each device's share to `host.py` (CPU: may look at the data, and reads it once,
in `blocks.py`) or `device.py` (any other device: never looks at the data, so that nobody waits). `reference.py` says the same
in float64 loops, for the tests and for readers.
"""

from __future__ import annotations

import enum


class Column(enum.IntEnum):
    """The columns of a measurement: one row per parameter, float64."""

    NORM = 0
    """L2 norm."""
    ZEROS = 1
    """Elements that are exactly zero, of either sign."""
    NANS = 2
    """Elements that are NaN."""
    INFS = 3
    """Elements that are infinite."""
    MIN = 4
    """Smallest element; NaN if there is a NaN."""
    MAX = 5
    """Largest element; NaN if there is a NaN."""
    ZERO_UNITS = 6
    """Output units whose gradient is exactly zero."""
    DEAD_UNITS = 7
    """Output units whose gradient was exactly zero in each of the last `dead_window` samples."""
    SUM = 8
    """Sum of the elements; 0 unless moments are asked for."""


COLUMNS = len(Column)
