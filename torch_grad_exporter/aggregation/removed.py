"""RemovedLayers: one remainder of all that was counted for layers whose modules have been removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.aggregation.exponential import Counts
from torch_grad_exporter.aggregation.tables import LAYER_TOTALS, Records, new_layers

_HISTOGRAM = frozenset({"buckets", "bucket_sum"})


@dataclass(slots=True)
class RemovedLayers:
    """Adds up the totals of removed layers, so that sums over layers never fall."""

    there: bool = False
    """Whether there was any that was shown."""
    _totals: Records = field(default_factory=lambda: new_layers(1))
    _exponential: Counter[int] = field(default_factory=Counter)

    def add(self, layers: Records, exponential: Iterable[Counts] = ()) -> None:
        """Takes the records of removed layers, and their norms by exponential bucket if they are counted.

        A layer that this rank does not show is left out, and so is the histogram of a sharded one, which is not shown.
        """
        shown = layers["shown"]
        whole = shown & ~layers["sharded"]
        for name in LAYER_TOTALS:
            with np.errstate(over="ignore"):
                total = self._totals[name][0] + layers[name][whole if name in _HISTOGRAM else shown].sum(axis=0)
            self._totals[name] = np.minimum(total, np.finfo(np.float64).max)
        self._totals["shown"], self._totals["summed"] = True, True
        for counts, chosen in zip(exponential, whole.tolist(), strict=False):
            if chosen:
                self._exponential.update(counts)
        self.there |= bool(shown.any())

    def record(self) -> Records:
        """A copy of the remainder, one record."""
        return self._totals.copy()

    def counts(self) -> Counts:
        """A copy of its norms by exponential bucket."""
        return dict(self._exponential)
