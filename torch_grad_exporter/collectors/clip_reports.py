"""Reports of `clip=` for the collector `gradients`: thresholds and counts, on their way from the device."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.store.host_transfer import Ticket

UNDER_WAY = 4  # reports of one optimizer, at most


@dataclass(frozen=True, slots=True, eq=False)
class ClipReport:
    """The policies of one optimizer after a step.

    Attributes:
        optimizer: The optimizer's name.
        thresholds: Policy and layer of each threshold; the layer is empty if the policy has one for all.
        candidates: The policies of `dry_run=`.
        ticket: The thresholds, then by candidate the steps that it would have clipped; shape (thresholds + candidates,).
    """

    optimizer: str
    thresholds: tuple[tuple[str, str], ...]
    candidates: tuple[str, ...]
    ticket: Ticket


class ClipReports:
    """The latest report of each optimizer. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reports: dict[str, deque[ClipReport]] = {}

    def put(self, report: ClipReport) -> None:
        """Add a report, which replaces the earlier ones as soon as it has arrived."""
        with self._lock:
            self._reports.setdefault(report.optimizer, deque(maxlen=UNDER_WAY)).append(report)

    def latest(self) -> list[tuple[ClipReport, FloatArray]]:
        """Return the last report of each optimizer that has arrived, with its values."""
        with self._lock:
            return [latest for reports in self._reports.values() if (latest := _latest(reports)) is not None]

    def after_fork_in_child(self) -> None:
        """Replace the lock: the threads that may hold it are not in the child."""
        self._lock = threading.RLock()


def _latest(reports: deque[ClipReport]) -> tuple[ClipReport, FloatArray] | None:
    for place in reversed(range(len(reports))):
        values = reports[place].ticket.ready()
        if values is not None:
            for _ in range(place):
                reports.popleft()
            return reports[0], values
    return None
