"""RoundLoss: the loss of a whole round, from what the model returns for its micro-batches.

A model that is given the number of items in the whole round divides each micro-batch's loss by it, like those of Transformers, and
the round's loss is their sum; otherwise each is a mean, and so is the round's. Where that does not follow there is no loss: where
ranks share the items, where a part of the round was not read, where several models have returned a loss.

A loss counts if a backward passes through it, so an evaluation does not. Nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.compiler import is_compiling

from torch_grad_exporter.capture.detection import BackwardDetection
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.observations import READ_SECONDS, Observations
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.rounds import RoundTracker
from torch_grad_exporter.distributed.identity import group_size
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.torch_compat.autograd import capturing_graph, within_transform
from torch_grad_exporter.torch_compat.compiler import is_tracing, never_compile

# The keyword argument by which Transformers gives a model the number of items in the whole round.
ITEMS = "num_items_in_batch"

# Losses through which no backward has passed yet, at most.
MOST = 4096

LossValue = float | torch.Tensor


@dataclass(slots=True, eq=False)
class ReturnedLoss:
    """A loss that a model has returned; as a hook of that tensor it notes that a backward passes through.

    Attributes:
        whole: Whether it was divided by the items of the whole round.
        number: Of the round at that moment.
        first: Whether no backward of that round came before.
        closure: In a closure, such as that of LBFGS, which throws gradients away at each evaluation: knows whether it did.
        passes: Backward passes before it, if it has no hook.
        used: Whether a backward has passed through it.
        cleared: Whether the gradients before it were thrown away.
        old: Whether a step came since.
    """

    value: LossValue
    model: int
    whole: bool
    number: int
    first: bool
    closure: RoundLoss | None = None
    passes: int | None = None
    used: bool = False
    cleared: bool = False
    old: bool = False

    def __call__(self, _gradient: object) -> None:
        """Note a backward. Raises nothing."""
        if not (is_compiling() or is_tracing()):
            self.used = True
            self.cleared = self.closure is not None and self.closure.cleared()


never_compile(ReturnedLoss.__call__)


@dataclass(slots=True, eq=False)
class _UsedLosses:
    """The losses of a round that were used. `complete`: it began with the first of them. `kinds`: models, and whether divided."""

    number: int
    complete: bool
    kinds: set[tuple[int, bool]] = field(default_factory=set)
    total: LossValue = 0.0
    count: int = 0

    def add(self, loss: ReturnedLoss) -> None:
        """Add a loss."""
        self.kinds.add((loss.model, loss.whole))
        if len(self.kinds) == 1:  # those of several models have no sum, and may be on several devices
            self.total = self.total + loss.value
        self.count += 1

    def loss(self) -> LossValue | None:
        """Return the loss of the round, None if it is unknown."""
        if not self.complete or len(self.kinds) != 1:
            return None
        ((_, whole),) = self.kinds
        if not whole:
            return self.total / self.count
        # Of the items of other ranks this one's losses say nothing.
        return None if group_size() > 1 else self.total


class RoundLoss(Inspection):
    """The inspection of losses that are due. Each is posted when its round is over. Belongs to the training thread.

    Where the user gives the loss, those of the model are shown neither in that round nor in the next one.
    """

    def __init__(
        self,
        *,
        rounds: RoundTracker,
        detection: BackwardDetection,
        clock: StepClock,
        index: LayerIndex,
        observations: Observations,
        errors: ErrorLog,
    ) -> None:
        self._rounds, self._detection, self._clock = rounds, detection, clock
        self._observations = observations
        self._index, self._guard = index, errors.boundary("backward_hook", limit=None)
        self._reading = False
        self._read_at = float("-inf")
        self._pending: list[ReturnedLoss] = []  # those that no backward has passed through yet
        self._round: _UsedLosses | None = None
        self._trained = False  # whether there was a forward since the last step
        self._given = 0  # rounds of which the losses of the model are not shown

    def forward_ended(self, model: int, output: object, kwargs: Mapping[str, object]) -> None:
        """Keep the loss in the output, if it is due."""
        # Where no backward is seen, which round this is shows only at its step.
        if self._detection.sees_backwards:
            self._take_used()
        first_forward, self._trained = not self._trained, True
        due = self._reading or self._rounds.next_is_sampled or self._clock.clock() - self._read_at > READ_SECONDS
        if not due:
            return
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or not _readable(loss):
            return
        if not self._reading:
            self._reading, self._read_at = True, self._clock.clock()
        if len(self._pending) == MOST:  # too many forwards that no backward has passed through
            self._pending.clear()
            if self._round is not None:
                self._round.complete = False
        self._pending.append(self._returned(loss, model, whole=kwargs.get(ITEMS) is not None, first_forward=first_forward))

    def round_stepped(self) -> None:
        """Post the loss of the round."""
        if self._pending or self._round is not None or self._observations.loss_given:
            self._take_used()
            self._end_round()
        self._reading = self._trained = False
        self._given = max(0, self._given - 1)
        # A backward through a pending one may still come, but not after another step.
        self._pending = [loss for loss in self._pending if not loss.old]
        for loss in self._pending:
            loss.old = True

    def training_over(self) -> None:
        """Post the loss of a round without a step, if it is on the host."""
        self._take_used(on_host=True)
        self._end_round(on_host=True)

    def cleared(self) -> bool:
        """Return whether the gradients of the last backward were thrown away; raises nothing.

        It is unknown for those that FSDP2 keeps elsewhere.
        """
        probes = self._detection.probes
        return bool(self._guard.result(lambda: not self._index.fully_sharded and probes.cleared()))

    def _returned(self, loss: torch.Tensor, model: int, *, whole: bool, first_forward: bool) -> ReturnedLoss:
        current, seen = self._rounds.current, self._detection.sees_backwards
        first = bool(current.stepped) or not current.backwards if seen else first_forward
        closure = self if self._clock.phases.stepping else None
        returned = ReturnedLoss(_copy(loss), model, whole, current.number, first, closure)
        if seen and loss.grad_fn is not None:
            loss.register_hook(returned)  # type: ignore[no-untyped-call]
        else:
            returned.passes = self._clock.backward_passes
        return returned

    def _take_used(self, *, on_host: bool = False) -> None:
        """Take the losses that backwards have passed through since the last call; end a round that is over by that."""
        if not self._pending and self._round is None:
            return
        number = self._rounds.current.number
        # A round may end without a step, or with one that no hook saw.
        if self._round is not None and self._round.number != number:
            self._end_round(on_host=on_host)
        pending, self._pending = self._pending, []
        for loss in pending:
            if loss.passes is not None:
                loss.used = not self._detection.sees_backwards or self._clock.backward_passes > loss.passes
            if loss.used:
                if self._round is None or loss.cleared:
                    self._round = _UsedLosses(number, complete=loss.first or loss.cleared or loss.number != number)
                self._round.add(loss)
            elif loss.passes is None:
                self._pending.append(loss)

    def _end_round(self, *, on_host: bool = False) -> None:
        """End the round; post its loss, if there is one, and with `on_host` only if it need not be copied from a device."""
        if self._observations.loss_given:
            self._observations.loss_given, self._given = False, 2
        over, self._round = self._round, None
        loss = None if over is None or self._given else over.loss()
        if loss is not None and not (on_host and isinstance(loss, torch.Tensor)):
            self._observations.post("loss", loss, step=self._clock.number)


def _readable(loss: torch.Tensor) -> bool:
    """Return whether it is a whole number that can be copied, while nothing is traced."""
    whole = loss.numel() == 1 and not loss.is_complex() and not loss.is_meta and not hasattr(loss, "placements")
    return whole and not within_transform() and not capturing_graph()


def _copy(loss: torch.Tensor) -> LossValue:
    """Return the loss as it is now, which the loop may change in place; on a device without waiting for it."""
    if loss.device.type == "cpu" and type(loss) is torch.Tensor:
        return float(loss.item())
    dtype = torch.float64 if loss.dtype is torch.float64 else torch.float32
    return loss.detach().reshape(()).to(dtype, copy=True)
