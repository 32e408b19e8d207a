"""What collectors may read: one object, from which each collector takes what it needs when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch_grad_exporter.aggregation.worker import Snapshot
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.schedule import SamplingSchedule
from torch_grad_exporter.distributed.identity import Identity
from torch_grad_exporter.distributed.store import JobStore
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.resources.devices import DeviceMemory
from torch_grad_exporter.transfer.outcomes import Mode


class Snapshots:
    """The values of the host's side. From any thread.

    `take`: gives those as of now. Raises `TimeoutError` where they do not come in time.
    """

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take
        self._latest = take()

    @property
    def latest(self) -> Snapshot:
        """As of the scrape that is under way: all its collectors show one and the same moment."""
        return self._latest

    def fresh(self) -> Snapshot:
        """As of now, for what does not run in a scrape. Raises as `take`."""
        return self._take()

    def renew(self) -> None:
        """Makes those as of now the latest; a scrape begins with it. Raises as `take`, and then the latest stay."""
        self._latest = self._take()


class ScrapeSize:
    """How many time series the scrape before had; `None` before the first one has ended."""

    def __init__(self) -> None:
        self._series: int | None = None

    @property
    def series(self) -> int | None:
        """The number."""
        return self._series

    def note(self, series: int) -> None:
        """Takes the number of a scrape that has ended."""
        self._series = series


class Capture(Protocol):
    """What is known of the capture of gradients."""

    @property
    def mode(self) -> Mode:
        """The rung of the ladder that it is on."""

    @property
    def samples(self) -> int:
        """Samples that it took."""

    @property
    def skipped(self) -> int:
        """Samples that were due and that it did not take."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What the user chose to see of gradients and weights."""

    dead_window: int
    moments: bool = False
    weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorContext:
    """The parts of a running exporter that collectors read from; they change none of them.

    `optimizers`: the optimizers' names by number; more may come. `rank`: the one on the series, which the user may have chosen.
    `info`: the labels of `torch_train_info`, `None` while they are not known. `ended`: "finished" or "failed" once the run is
    over, else `None`. `phases_timed`: whether the host's clock can time phases; on an accelerator it only times launches.
    """

    snapshots: Snapshots
    clock: StepClock
    optimizers: Sequence[str]
    capture: Capture
    schedule: SamplingSchedule
    memory: DeviceMemory
    errors: ErrorLog
    identity: Identity
    rank: int
    store: JobStore
    shown: Shown
    scrape_size: ScrapeSize
    info: Callable[[], Mapping[str, str] | None]
    ended: Callable[[], str | None]
    phases_timed: Callable[[], bool]
