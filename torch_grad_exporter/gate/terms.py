"""The terms by which a run is judged: which alerts fail, limits, a baseline and its tolerances."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch_grad_exporter.errors import UserError
from torch_grad_exporter.gate.baseline import TOLERANCES
from torch_grad_exporter.gate.limits import Limit
from torch_grad_exporter.outputs.live.saved import Saved
from torch_grad_exporter.rules import RULES
from torch_grad_exporter.rules.catalogue import promql_only
from torch_grad_exporter.rules.declaration import SEVERITIES

# Severities that fail by default: they need a person, now or soon.
FAIL_ON = ("critical", "warning")


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a verdict.

    Attributes:
        fail_on: Severities and alerts.
        limits: On single metrics.
        baseline: Another run.
        tolerances: By comparison, instead of the usual ones.
    """

    fail_on: Collection[str] = FAIL_ON
    limits: Sequence[Limit] = ()
    baseline: Saved | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)


def check_names(fail_on: Collection[str], more: Collection[str] = ()) -> None:
    """Check severities and alerts.

    Args:
        fail_on: Names; "none" alone stands for no alert at all. An empty list, like an empty variable of CI, is an error.
        more: Further alerts by which the run was judged.

    Raises:
        UserError: A name is neither a severity nor an alert that a process judges.
    """
    if not fail_on:
        raise UserError('fail-on: name alerts or severities, or "none" for a verdict by limits and baseline alone')
    if [*fail_on] == ["none"]:
        return
    known = {rule.name for rule in RULES}.union(more)
    for name in fail_on:
        if name not in known and name not in SEVERITIES:
            there = ", ".join((*SEVERITIES, *sorted(known)))
            if name in promql_only():
                limit = "limit a metric, as in --max torch_cuda_ooms_total=0"
                raise UserError(f"fail-on {name!r}: only Prometheus judges this alert; {limit}, or name one of {there}")
            raise UserError(f"fail-on {name!r}: unknown alert or severity; there are {there}")


def check_tolerance(name: str, share: float) -> None:
    """Raise `UserError` if nothing of this name is compared, or the share is not one."""
    if name not in TOLERANCES:
        raise UserError(f"tolerance {name!r}: nothing of this name is compared; there are {', '.join(TOLERANCES)}")
    if not 0 <= share < float("inf"):
        raise UserError(f"tolerance {name}: the share is a number of at least 0, such as {TOLERANCES[name]:g}")
