"""Records, and the mailbox in which the training thread hands them to the worker, in the order in which things happened.

There are five kinds of records. They are plain data without callables; what is measured on a device travels as a `Ticket`,
which is ready once its vector is on the host.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch_grad_exporter.metrics.families import FloatArray, IntArray
    from torch_grad_exporter.model.parameters import ParameterTable
    from torch_grad_exporter.statistics.layout import Packing
    from torch_grad_exporter.store.host_transfer import Ticket

UNOWNED = -1  # the owner of a parameter that no known optimizer has
PLACED = 600  # rounds, observed losses and norms of which the step is reported: it costs as much as the rest of such a record

TraceIds = tuple[bytes, bytes]  # a trace and a span in it: 16 and 8 bytes, as in W3C's trace context


class Outcome(enum.Enum):
    """What became of the step of a round."""

    STEPPED = "stepped"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, eq=False)
class SamplePart:
    """One device's share of a measurement; the fields are those of `Measurement`, its vector is under way."""

    positions: IntArray
    elements: IntArray
    units: IntArray
    ticket: Ticket
    packing: Packing

    def rows(self) -> FloatArray:
        """Return the rows, shape (positions, columns); the vector has arrived."""
        return self.packing.rows(values_of(self.ticket), len(self.positions))  # a loss scale may follow


@dataclass(frozen=True, slots=True, eq=False)
class SampleRead:
    """The gradients of a round were read. A later record of the same round replaces it."""

    round: int
    table: ParameterTable
    parts: tuple[SamplePart, ...]
    missing: IntArray  # positions of parameters that require a gradient and got none in this round
    owners: IntArray  # shape (parameters,): the number of the owning optimizer, UNOWNED for none
    at: float  # Unix time
    likely_last: bool  # rounds usually have no more backwards than this
    usual: frozenset[int]  # optimizers that usually step after such a backward
    scale_known: bool = True  # whether it is known if there is a gradient scaler
    scale: Ticket | None = None  # its loss scale, shape (1,)
    again: bool = False  # the gradients read before, in the same round, were thrown away
    divisor: float = 1.0  # by what a pipeline schedule divides the gradients after the backward
    at_step: bool = False  # read where an optimizer was about to use them, so divided and clipped


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerView:
    """Norms of the gradients as an optimizer saw them, part of a `RoundEnded`."""

    optimizer: int
    parts: tuple[SamplePart, ...]
    unchanged: bool = False  # nothing has written to the gradients since the sample: its norms are these
    loss_scale: Ticket | None = None  # by which the backward was multiplied, if that is known only now
    own_scale: Ticket | None = None  # which these norms still contain, as the optimizer divides by it itself
    found_inf: Ticket | None = None  # not zero if the optimizer itself leaves this step out
    ours: bool = False  # after the clipping of `clip=`


@dataclass(frozen=True, slots=True, eq=False)
class RoundEnded:
    """What became of a round. A later record of the same round repeats its views and replaces it."""

    round: int
    outcome: Outcome
    owners: IntArray | None  # as in `SampleRead`; None where the round was not sampled
    stepped: frozenset[int]
    steps: dict[int, int]  # number of the last step by optimizer
    views: tuple[OptimizerView, ...] = ()
    divisor: Ticket | float | None = None  # observe(grad_divisor=) for this round
    final: bool = True  # False: an optimizer has stepped, and others may still do so
    guessed: bool = False  # no step, and `stepped` are all optimizers that might have stepped
    withdrawn: bool = False  # what was read of the round must not be shown


@dataclass(slots=True, eq=False)
class StepsTaken:
    """Rounds whose first steps are over: one that was followed, or several that are only counted.

    While rounds are counted the training thread goes on appending to `moments`, and sets `own_seconds` after the last of
    them; it changes nothing else, and the worker only reads. Each record stands by itself, so one that is lost spoils no other.
    """

    since: float | None  # end of the step before them, in seconds of the clock; None before the first one ever
    moments: Sequence[float]  # the end of each step
    offset: float  # what Unix time was ahead of the clock
    own_seconds: float | None = None  # of the exporter in all of these rounds; None while they are not over
    trace: TraceIds | None = None
    step: int | None = None  # number of the step before them, of the optimizer that took the most
    lent: bool = False  # of the first samples


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """A value that the user, the model's own output or an optimizer gave."""

    name: str
    value: Ticket | float
    labels: tuple[str, str] | tuple[()] = ()  # optimizer and parameter group of a learning rate
    step: int | None = None  # that it belongs to, of the optimizer that took the most


@dataclass(frozen=True, slots=True, eq=False)
class Inspected:
    """What an inspection has measured. The worker gives it to the taker that is registered under the name."""

    inspection: str
    round: int
    tickets: tuple[Ticket, ...]
    data: object = None  # plain data that only the inspection knows


class Taker(Protocol):
    """An inspection's own table, registered under the name of the inspection. Called on the thread that drains."""

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take a record whose vectors have all arrived, in the order of its tickets."""


Record = SampleRead | RoundEnded | StepsTaken | Observed | Inspected


def values_of(ticket: Ticket) -> FloatArray:
    """Return the vector of a ticket that is ready. Raises `RuntimeError` otherwise."""
    values = ticket.ready()
    if values is None:
        raise RuntimeError("a record was applied before its vector had arrived")
    return values


def number_of(value: Ticket | float) -> float:
    """Return the one number of a ticket that is ready, or the number itself."""
    return value if isinstance(value, float) else float(values_of(value)[0])


def tickets_of(record: Record | OptimizerView) -> list[Ticket]:
    """Return everything that a record waits for."""
    tickets: list[Ticket | float | None] = []
    match record:
        case SampleRead():
            tickets = [*(part.ticket for part in record.parts), record.scale]
        case OptimizerView():
            tickets = [*(part.ticket for part in record.parts), record.loss_scale, record.own_scale, record.found_inf]
        case RoundEnded():
            tickets = [record.divisor, *(ticket for view in record.views for ticket in tickets_of(view))]
        case Inspected():
            return [*record.tickets]
        case Observed():
            tickets = [record.value]
    return [ticket for ticket in tickets if ticket is not None and not isinstance(ticket, float)]


ROOM = 1 << 13  # records in the mailbox, at most
BACKLOG = ROOM // 16  # at which it is drained at once: a scrape that comes meanwhile waits for it


class Mailbox(deque[Record]):
    """A bounded deque, so that a dead worker cannot fill the memory; `append` takes no lock and never waits."""

    __slots__ = ("left_out", "pressing", "wake")

    def __init__(self) -> None:
        super().__init__()
        self.left_out = 0  # records for which there was no room; only grows, the training thread writes it
        self.pressing = False  # a sender of vectors has asked for a drain; the worker clears it when nothing is left
        self.wake: Callable[[], object] = lambda: None  # the worker's

    def press(self) -> None:
        """Ask for a drain at once, since buffers for vectors run short. Wakes once until `pressing` is cleared."""
        if not self.pressing:
            self.pressing = True
            self.wake()

    def append(self, record: Record) -> None:
        """Take a record if there is room, else count it as left out."""
        waiting = len(self)
        if waiting < ROOM:
            super().append(record)
            if waiting == BACKLOG:
                self.wake()
        else:
            self.left_out += 1
