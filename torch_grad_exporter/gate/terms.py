"""By what a run is judged: which alerts fail, limits, a baseline and its tolerances."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch_grad_exporter.gate.baseline import TOLERANCES
from torch_grad_exporter.gate.limits import Limit
from torch_grad_exporter.gate.rows import GateError
from torch_grad_exporter.outputs.live.fetch import PlotError, loaded
from torch_grad_exporter.outputs.live.saved import Saved
from torch_grad_exporter.rules import RULES
from torch_grad_exporter.rules.catalogue import promql_only
from torch_grad_exporter.rules.declaration import SEVERITIES

FAIL_ON = ("critical", "warning")
"""What fails by default: what a person is needed for, now or soon. What is "info" is noted."""


@dataclass(frozen=True, slots=True)
class Terms:
    """`fail_on`: severities and alerts. `baseline`: another run; `tolerances`: by what is compared, instead of the usual ones."""

    fail_on: Collection[str] = FAIL_ON
    limits: Sequence[Limit] = ()
    baseline: Saved | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)


def read(source: str | os.PathLike[str], cacert: str | None = None) -> Saved:
    """A saved run, or that of a running exporter at this address. Raises `GateError`."""
    try:
        return loaded(os.fspath(source), cacert)
    except PlotError as error:
        raise GateError(str(error)) from None


def check_names(fail_on: Collection[str], more: Collection[str] = ()) -> None:
    """Raises `GateError` for what is neither a severity nor an alert. `more`: alerts that this process does not know.

    "none" alone stands for no alert at all; nothing is no choice, as of a variable of CI that is empty.
    """
    if not fail_on:
        raise GateError('fail-on: name alerts or severities, or "none" for a verdict by limits and baseline alone')
    if [*fail_on] == ["none"]:
        return
    known = {rule.name for rule in RULES}.union(more)
    for name in fail_on:
        if name not in known and name not in SEVERITIES:
            there = ", ".join((*SEVERITIES, *sorted(known)))
            if name in promql_only():
                limit = "limit a metric, as in --max torch_cuda_ooms_total=0"
                raise GateError(f"fail-on {name!r}: only Prometheus judges this alert; {limit}, or name one of {there}")
            raise GateError(f"fail-on {name!r}: there is no such alert and no such severity; there are {there}")


def check_tolerance(name: str, share: float) -> None:
    """Raises `GateError` where nothing of this name is compared, or the share is none."""
    if name not in TOLERANCES:
        raise GateError(f"tolerance {name!r}: nothing of this name is compared; there are {', '.join(TOLERANCES)}")
    if not 0 <= share < float("inf"):
        raise GateError(f"tolerance {name}: the share is a number of at least 0, such as {TOLERANCES[name]:g}")
