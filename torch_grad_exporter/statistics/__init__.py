"""Numbers from gradients, computed on the gradient's own device. Knows no metric.

`eager.py` is the interface. It has the gradients prepared and batched (`batches.py`), measures
those on the CPU in `host.py`, which may branch on the data, and all others in `device.py`, which
never does, so that the host never waits. `layout.py` has the row of a gradient: the columns below,
and those of statistics that are declared apart (`declared.py`).
"""

from __future__ import annotations

import enum


class Column(enum.IntEnum):
    """Places of the package's own columns, which come first in each row.

    `ZEROS`, `MIN` and `MAX` are measured in some samples only. In the others `ZEROS` is NaN, and
    the extremes have no meaning. `SUM` is 0 unless moments are enabled.
    """

    NORM = 0
    ZEROS = 1
    NANS = 2
    INFS = 3
    MIN = 4
    MAX = 5
    ZERO_UNITS = 6
    DEAD_UNITS = 7
    SUM = 8
