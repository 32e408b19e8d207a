"""The times of layers: those of a round until they are known, and the totals over rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_grad_exporter.capture.device_events import Stretch, Timeline
from torch_grad_exporter.inspection.modules import LayerRows
from torch_grad_exporter.store.records import Inspected

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True, eq=False)
class TimedCall:
    """A call of a layer, on the timeline of its device; the nodes that it makes are numbered from `first` on."""

    module: int
    layer: str
    line: Timeline[Pass]
    first: int


# A pass of one call, `FORWARD` or `BACKWARD`: the key of a timeline's marks.
Pass = tuple[TimedCall, str]


@dataclass(slots=True, eq=False)
class RoundTimes:
    """A sampled round, until its times are known. `lost`: some of them are missing."""

    number: int = -1
    lost: bool = False
    stretches: deque[Stretch[Pass]] = field(default_factory=deque)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)

    def read(self) -> bool:
        """Add up what devices have passed by now; return whether that is all."""
        while self.stretches and (seconds := self.stretches[0].read()) is not None:
            self.lost |= self.stretches.popleft().failed
            for (call, name), added in seconds.items():
                self.seconds[call.layer, name] = self.seconds.get((call.layer, name), 0.0) + added
        return not self.stretches

    def release(self) -> None:
        """Forget all of it."""
        for stretch in self.stretches:
            stretch.release()
        self.stretches.clear()
        self.seconds = {}


@dataclass(frozen=True, slots=True)
class PassTime:
    """The seconds of one pass of a layer, over `rounds` sampled rounds."""

    seconds: float = 0.0
    rounds: int = 0

    def plus(self, other: PassTime) -> PassTime:
        """Return the time of both."""
        return PassTime(self.seconds + other.seconds, self.rounds + other.rounds)


@dataclass(frozen=True, slots=True)
class LayerTime:
    """The times of a layer's passes that were timed."""

    passes: Mapping[str, PassTime] = field(default_factory=dict)

    def with_totals_of(self, other: LayerTime) -> LayerTime:
        """Return the times of both."""
        names = dict.fromkeys((*self.passes, *other.passes))
        return LayerTime({name: self.passes.get(name, PassTime()).plus(other.passes.get(name, PassTime())) for name in names})


class LayerTimes:
    """The times of layers over sampled rounds. Belongs to the worker; `by_layer` and `untimed` may be read from any thread.

    Attributes:
        untimed: Sampled rounds that are in none of the times, see `torch_grad_exporter_untimed_steps_total`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._table = LayerRows(LayerTime())
        self.untimed = 0

    @property
    def by_layer(self) -> Mapping[str, LayerTime]:
        """The times by layer, at most as many as `most`, and those of other layers in a remainder."""
        return self._table.rows

    def take(self, record: Inspected, values: object) -> None:  # noqa: ARG002 - like any `Taker`; times need no vectors
        """Count a round; the data are its seconds by layer and pass."""
        assert isinstance(record.data, dict)  # noqa: S101 - only `LayerTimer` sends records of this name
        new: dict[str, LayerTime] = {}
        for (layer, name), seconds in record.data.items():
            timed = LayerTime({name: PassTime(seconds, 1)})
            new[layer] = new.get(layer, self._table.get(layer)).with_totals_of(timed)
        self._table.enter(new, most=self._most)
