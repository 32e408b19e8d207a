"""ObservedNorm: the global norm that the user computed before clipping and gave to `observe(grad_norm=)`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.aggregation.baseline import Baselines
from torch_grad_exporter.aggregation.cursor import Cursor
from torch_grad_exporter.aggregation.exponential import Counts, ExponentialCounts
from torch_grad_exporter.aggregation.peaks import Peaks
from torch_grad_exporter.aggregation.tables import OPTIMIZER, Records, enter_global_norm
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.transfer.events import Outcome

_OF_NORMS = ("norm", "sized", "buckets", "bucket_sum", "spikes")
"""What an observed norm is the source of."""

_ROW = np.zeros(1, dtype=np.int64)


@dataclass(slots=True)
class ObservedNorm:
    """The totals of observed norms. `exponential`: counts them by exponential bucket, too, if it is given."""

    exponential: ExponentialCounts | None = None
    _totals: Records | None = None
    _baseline: Baselines = field(default_factory=Baselines)
    _peaks: Peaks = field(default_factory=Peaks)
    _untold: bool = False
    """Whether the last norm was not finite, and the outcome of its step is not known yet."""

    @property
    def there(self) -> bool:
        """Whether a norm was ever observed."""
        return self._totals is not None

    def observe(self, norm: float) -> None:
        """Takes a norm."""
        if self._totals is None:
            self._totals = np.zeros(1, dtype=OPTIMIZER)
            self._baseline.grow(1)
            self._peaks.grow(1)
        norm = norm if norm >= 0 else np.nan  # DeepSpeed says -1 where the norm is NaN or Inf
        self._untold = not np.isfinite(norm)
        self._totals["norm"], self._totals["sized"] = norm, True
        self._peaks.enter(_ROW, np.array([norm]), np.array([np.nan]))
        entered = enter_global_norm(self._totals, self._baseline, 0, np.array([norm]))
        if self.exponential is not None:
            self.exponential.observe(_ROW[: len(entered)], entered)

    def sampled(self) -> None:
        """A sample of the step itself shows whether its gradients were finite."""
        self._untold = False

    def resolve(self, outcome: Outcome) -> None:
        """Says what became of the step whose norm was observed last."""
        if self._untold and self._totals is not None:
            self._totals[f"nonfinite_{outcome.value}"] += 1
            self._untold = False

    def replace_norms(self, totals: Records) -> None:
        """Replaces the captured norms by the observed ones, in a table of one row."""
        if self._totals is not None:
            for name in _OF_NORMS:
                totals[name] = self._totals[name]
            for outcome in Outcome:
                totals[f"nonfinite_{outcome.value}"] += self._totals[f"nonfinite_{outcome.value}"]

    def counts(self) -> tuple[Counts, ...]:
        """The norms by exponential bucket."""
        return () if self.exponential is None else self.exponential.snapshot([0])

    def follow(self, cursor: Cursor) -> None:
        """Begins with a consumer of peaks."""
        self._peaks.follow(cursor)

    def take_peak(self, cursor: Cursor) -> FloatArray:
        """The largest norm that is new to a consumer, shape (2,); the second one, after clipping, is never known."""
        self._peaks.grow(1)
        return self._peaks.take(cursor, _ROW)[:, 0]
