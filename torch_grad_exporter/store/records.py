"""What the training thread hands to the host side: small frozen records in one queue, never the other way.

The queue is a bounded deque, whose append costs no lock and never waits. Records are in the order in which
things happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from torch_grad_exporter.metrics.families import BoolArray, FloatArray, IntArray
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.statistics.layout import Packing
from torch_grad_exporter.transfer.outcomes import Outcome as Outcome  # noqa: PLC0414 - exported
from torch_grad_exporter.transfer.tracing import TraceIds
from torch_grad_exporter.transfer.transfer import Ticket


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One device's share of a measurement, on its way to the host; the fields are those of `Measurement`."""

    positions: IntArray
    elements: IntArray
    units: IntArray
    ticket: Ticket
    packing: Packing


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """Gradients were read at the end of a backward. A later one of the same round replaces it.

    `missing`: positions of the parameters that require a gradient and got none in this round. `owners`: as in
    `Closed`, as far as known at the capture. `at`: Unix time. `likely_last`: rounds usually have no more backwards
    than this. `usual`: the optimizers that usually step after such a backward, as far as known. `scale_known`: whether it
    is known if there is a gradient scaler, as it is from the first step on. `scale`: its loss scale at that moment.
    `again`: the gradients of the capture before, in the same round, were thrown away. `divisor`: by what the loop divides these
    gradients between the capture and the clipping. `at_step`: they are what an optimizer was about to use, divided and clipped.
    """

    round: int
    table: ParameterTable
    parts: tuple[Part, ...]
    missing: IntArray
    owners: IntArray
    at: float
    likely_last: bool
    usual: frozenset[int]
    scale_known: bool = True
    scale: Ticket | None = None
    again: bool = False
    divisor: float = 1.0
    at_step: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """Norms of one device, on their way to the host. `positions`: shape (n,), of parameters; one may have several, of its parts.

    A negative one, -1 - p, is of the gradient that parameter p had before the round's first backward, and that should be zero.
    """

    positions: IntArray
    ticket: Ticket


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """This rank's own gradient in the backward of the `Captured` before, as it was before it was reduced over ranks.

    `reduced`: shape (parameters,), which of the table's are. `samples`: training examples of its forwards, `None` if unknown;
    `ranks`: over how many the mean was taken, 0 if unknown.
    """

    round: int
    reduced: BoolArray
    parts: tuple[LocalPart, ...]
    samples: int | None
    ranks: int


@dataclass(frozen=True, slots=True, eq=False)
class AfterClip:
    """Norms of the gradients as an optimizer saw them.

    `loss_scale`: the scale that the backward was multiplied by, if it is known only now. `own_scale`: the one that these
    norms still contain, because the optimizer divides by it itself. `found_inf`: not zero if the optimizer itself leaves
    this step out. `ours`: after the clipping that `clip=` asked for; what the loop itself has left was told before.
    """

    round: int
    optimizer: int
    parts: tuple[Part, ...]
    loss_scale: Ticket | None = None
    own_scale: Ticket | None = None
    found_inf: Ticket | None = None
    ours: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Norms of a few layers' parameters around one optimizer step.

    `vector`: shape (3 * positions + WIDTH * rows + told,). For each parameter its norm before, its norm after, and the norm of the
    difference; then rows of `statistics.magnitudes`, of the parameters at the positions `spread`, shape (rows,); if `told`, a last
    value that is not zero if the optimizer was told to leave the step out.
    """

    table: ParameterTable
    positions: IntArray
    vector: Ticket
    spread: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    told: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Closed:
    """The sampled round is over; or, if not `final`, it may be: an optimizer has stepped, and others may still do so.

    `guessed`: there was no step, and which optimizers would have stepped is not known: `stepped` are all that might have.

    `owners`: for each parameter of the table the number of the optimizer that owns it, -1 for none.
    `stepped`: the optimizers that stepped in the round; `steps`: their step counts, by optimizer.
    """

    round: int
    outcome: Outcome
    owners: IntArray
    stepped: frozenset[int]
    steps: dict[int, int]
    final: bool = True
    guessed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Divided:
    """By what the loop divides the gradients of a round between its backwards and the clipping, as by the number of tokens."""

    round: int
    divisor: Ticket | float


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """What was captured in a round is not what its step uses, and is not to be shown."""

    round: int


@dataclass(frozen=True, slots=True)
class OutcomeResolved:
    """What became of a round that was not sampled, but whose global norm was observed."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Stepped:
    """A round's first optimizer step: `seconds` since that of the round before, and what the exporter took.

    `at`: Unix time. `trace`: the one that was active, if it was read. `step`: its number, of the optimizer that took the most.
    """

    seconds: float | None
    own_seconds: float
    at: float = 0.0
    trace: TraceIds | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """Rounds that were only counted: the seconds from step to step, and what the exporter took in all of them.

    `stretch`: the number of the rounds in a row that these are; later ones have larger numbers.
    """

    seconds: tuple[float, ...]
    own_seconds: float
    stretch: int = 0


@dataclass(frozen=True, slots=True)
class Counting:
    """The same of a stretch that is not over, as far as it has come; a `Counted` of the same number, or none, is to follow."""

    seconds: tuple[float, ...]
    stretch: int


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """A value that the user, the model's own output or an optimizer gave.

    `labels`: optimizer and parameter group of a learning rate, else empty. `step`: the number of the step that the value is of, of
    the optimizer that took the most, if that is known.
    """

    name: str
    value: Ticket | float
    labels: tuple[str, str] | tuple[()] = ()
    step: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Inspected:
    """What an inspection has measured. `take`: is given the values, in the order of the tickets, once all have arrived."""

    take: Callable[[tuple[FloatArray, ...]], object]
    tickets: tuple[Ticket, ...]


OfRounds = Captured | Local | AfterClip | Weights | Closed | Divided | Withdrawn | OutcomeResolved | Inspected
Event = OfRounds | Stepped | Counted | Observed

PLACED = 600
"""Of so many rounds, observed losses and observed norms the step is told: to find it costs as much as the rest of such a record."""

ROOM = 1 << 13
"""Records in the mailbox, at most."""


class Mailbox(deque[Event]):
    """The queue; bounded, so that a dead worker cannot fill the memory. What comes when it is full is left out and counted."""

    __slots__ = ("_backlog", "_on_backlog", "left_out", "pressing")

    def __init__(self) -> None:
        super().__init__()
        self.left_out = 0
        """Records for which there was no room. Belongs to the training thread; it only grows."""
        self.pressing = False
        """Whether a sender of vectors has asked for a drain; cleared by who drains and waits for none."""
        self._backlog = ROOM
        self._on_backlog: Callable[[], object] = lambda: None

    def on_backlog(self, records: int, tell: Callable[[], object]) -> None:
        """Calls `tell` on the thread that appends, whenever so many records have come to wait."""
        self._backlog, self._on_backlog = records, tell

    def press(self) -> None:
        """Asks for a drain at once: places for vectors run short. Tells once, until `pressing` is cleared."""
        if not self.pressing:
            self.pressing = True
            self._on_backlog()

    def append(self, event: Event) -> None:
        """Takes a record, if there is room."""
        waiting = len(self)
        if waiting < ROOM:
            super().append(event)
            if waiting == self._backlog:
                self._on_backlog()
        else:
            self.left_out += 1
