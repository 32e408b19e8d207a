"""Collector `logged`: the values that `exporter.log` was given."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows, scalar
from torch_grad_exporter.store.logged_values import LoggedValues

LOGGED = Section("Logged values")

TRAIN_VALUE = LOGGED.gauge(
    "torch_train_value",
    "Last value of a name that exporter.log() was given; absent an hour after it, or twice as long after it as it came after the one before, if that is longer.",
    "name",
    opt_in="log",
)
TRAIN_VALUE_NONFINITE = LOGGED.counter(
    "torch_train_value_nonfinite_total", "Logged values of the name that were NaN or Inf.", "name", opt_in="log"
)
TRAIN_VALUE_NAMES_DROPPED = LOGGED.gauge(
    "torch_train_value_names_dropped",
    "Names that exporter.log() was given and that are not shown, since there were 200 others.",
    opt_in="log",
)


class LoggedCollector:
    """Families of the logged values, none before the first one."""

    def __init__(self, logged: LoggedValues) -> None:
        self._logged = logged
        self._rows = LabelledRows()

    def collect(self) -> Iterator[Family]:
        """Yield the families of now."""
        if not self._logged.calls:
            return
        values, dropped = self._logged.snapshot()
        yield self._rows.family(TRAIN_VALUE, {(name,): value for name, (value, _) in values.items()})
        yield self._rows.family(TRAIN_VALUE_NONFINITE, {(name,): float(count) for name, (_, count) in values.items()})
        yield scalar(TRAIN_VALUE_NAMES_DROPPED, float(dropped))


COLLECTOR = Declaration("logged", (LOGGED,), lambda context: LoggedCollector(context.logged), place=22)
