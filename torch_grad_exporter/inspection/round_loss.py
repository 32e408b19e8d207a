"""RoundLoss: the loss of a whole round, from what the model returns for its micro-batches.

A model that is told the number of items in the whole round divides each micro-batch's loss by it, as those of Transformers do, and
the round's loss is their sum; else each is a mean, and so is the round's. Where that does not follow there is no loss: where
ranks share the items, where a part of the round was not read, where several models have returned a loss.

A loss counts if a backward passes through it, so a forward that is only looked at does not. Nothing here waits for a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.compiler import is_compiling

from torch_grad_exporter.capture.detection import BackwardDetection
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.observations import READ_SECONDS, Observations
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.capture.rounds import RoundTracker
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.statistics.device import capturing_graph
from torch_grad_exporter.torch_compat.autograd import on_gradient, within_transform
from torch_grad_exporter.torch_compat.compiler import is_tracing, never_compile

ITEMS = "num_items_in_batch"
"""The keyword argument by which Transformers tells a model the number of items in the whole round."""

MOST = 4096
"""Losses that are kept apart; beyond, those of a round are added up."""

Value = float | torch.Tensor


@dataclass(slots=True, eq=False)
class _Loss:
    """A loss that a model has returned; as a hook of that tensor it notes that a backward passes through.

    `whole`: it was divided by the items of the whole round. `number`: of the round at that moment; `first`: no backward of that
    one came before. `asks`: in a closure, says whether the gradients so far were thrown away, as by LBFGS for each evaluation.
    `passes`: backward passes before it, where it has no hook.
    """

    value: Value
    model: int
    whole: bool
    number: int
    first: bool
    asks: Callable[[], object] | None = None
    passes: int | None = None
    used: bool = False
    cleared: bool = False
    old: bool = False
    """A step came since."""

    def __call__(self, _gradient: object) -> None:
        """A backward passes through it. Raises nothing."""
        if not (is_compiling() or is_tracing()):
            self.used = True
            self.cleared = self.asks is not None and bool(self.asks())


never_compile(_Loss.__call__)


@dataclass(slots=True, eq=False)
class _RoundLosses:
    """The losses of a round that were used. `complete`: it began with the first of them. `kinds`: models, and whether divided."""

    number: int
    complete: bool
    kinds: set[tuple[int, bool]] = field(default_factory=set)
    values: list[Value] = field(default_factory=list)
    count: int = 0

    def add(self, loss: _Loss) -> None:
        """Takes in one more."""
        if len(self.values) == MOST:
            self.values = [_sum(self.values)]
        self.values.append(loss.value)
        self.kinds.add((loss.model, loss.whole))
        self.count += 1

    def loss(self) -> Value | None:
        """That of the round, `None` where it is not known."""
        if not self.complete or len(self.kinds) != 1:
            return None
        ((_, whole),) = self.kinds
        if whole:
            return None if _shared() else _sum(self.values)
        return _sum(self.values) / self.count


class RoundLoss(Inspection):
    """Reads the losses of rounds that are due, and posts each when its round is over. Belongs to the training thread.

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
        self._index, self._observations = index, observations
        self._reading = False
        self._read_at = float("-inf")
        self._waiting: list[_Loss] = []
        """Those that no backward has passed through yet."""
        self._round: _RoundLosses | None = None
        self._trained = False
        """Whether there was a forward since the last step."""
        self._given = 0
        """Rounds of which the losses of the model are not shown."""
        self._asks = functools.partial(errors.boundary("backward_hook", limit=None).result, self._cleared)

    def forward_ended(self, model: int, output: object, kwargs: Mapping[str, object]) -> None:
        """Keep the loss in the output, if it is due."""
        # Where no backward is seen, which round this is shows at its step only.
        if self._detection.sees_backwards:
            self._post(self._sorted())
        first_forward, self._trained = not self._trained, True
        due = self._reading or self._rounds.next_is_sampled or self._clock.clock() - self._read_at > READ_SECONDS
        if not due:
            return
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or not _readable(loss):
            return
        if not self._reading:
            self._reading, self._read_at = True, self._clock.clock()
        if len(self._waiting) == MOST:
            self._forget()
        self._waiting.append(self._seen(loss, model, whole=kwargs.get(ITEMS) is not None, first_forward=first_forward))

    def round_stepped(self) -> None:
        """Post the loss of the round."""
        self._post([*self._sorted(), *self._taken()])
        self._reading = self._trained = False
        self._given = max(0, self._given - 1)
        if self._waiting:  # a backward through them may still come, but not after another step
            self._waiting = [loss for loss in self._waiting if not loss.old]
            for loss in self._waiting:
                loss.old = True

    def training_over(self) -> None:
        """Post the loss of a round without a step, if it is on the host."""
        self._post([loss for loss in (*self._sorted(), *self._taken()) if isinstance(loss, float)])

    def _post(self, losses: list[Value]) -> None:
        for loss in losses:
            self._observations.post("loss", loss, step=self._clock.number)

    def _seen(self, loss: torch.Tensor, model: int, *, whole: bool, first_forward: bool) -> _Loss:
        current, seen = self._rounds.current, self._detection.sees_backwards
        first = bool(current.stepped) or not current.backwards if seen else first_forward
        found = _Loss(_copy(loss), model, whole, current.number, first, self._asks if self._clock.stepping else None)
        if seen and loss.grad_fn is not None:
            on_gradient(loss, found)
        else:
            found.passes = self._clock.backward_passes
        return found

    def _cleared(self) -> bool:
        """Whether the gradients of the last backward were thrown away; not known of those that FSDP2 keeps elsewhere."""
        return not self._index.fully_sharded and self._detection.probes.cleared()

    def _forget(self) -> None:
        """There were too many forwards that no backward has passed through."""
        self._waiting.clear()
        if self._round is not None:
            self._round.complete = False

    def _sorted(self) -> list[Value]:
        """Takes in the losses that backwards have passed through since the last call; returns what is over by that."""
        if not self._waiting and self._round is None:
            return []
        current = self._rounds.current
        # It ended without a step, or with one that no hook saw.
        over = self._taken() if self._round is not None and self._round.number != current.number else []
        waiting, self._waiting = self._waiting, []
        for loss in waiting:
            if loss.passes is not None:
                loss.used = not self._detection.sees_backwards or self._clock.backward_passes > loss.passes
            if loss.used:
                self._take_in(loss, current.number)
            elif loss.passes is None:
                self._waiting.append(loss)
        return over

    def _take_in(self, loss: _Loss, number: int) -> None:
        """A backward of the round of this number has passed through a loss."""
        if self._round is None or loss.cleared:
            self._round = _RoundLosses(number, complete=loss.first or loss.cleared or loss.number != number)
        self._round.add(loss)

    def _taken(self) -> list[Value]:
        """Ends the round; its loss, if there is one."""
        if self._observations.loss_given:
            self._observations.loss_given, self._given = False, 2
        found, self._round = self._round, None
        loss = None if found is None or self._given else found.loss()
        return [] if loss is None else [loss]


def _readable(loss: torch.Tensor) -> bool:
    """Whether it is a number that can be copied, which is all there: it is no part of one, and nothing is being traced."""
    whole = loss.numel() == 1 and not loss.is_complex() and not loss.is_meta and not hasattr(loss, "placements")
    return whole and not within_transform() and not capturing_graph()


def _copy(loss: torch.Tensor) -> Value:
    """The loss as it is now, which the loop may change in place; on a device without waiting for it."""
    if loss.device.type == "cpu" and type(loss) is torch.Tensor:
        return float(loss.item())
    dtype = torch.float64 if loss.dtype is torch.float64 else torch.float32
    return loss.detach().reshape(()).to(dtype, copy=True)


def _sum(values: list[Value]) -> Value:
    """All of them together."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    on_host = sum(value for value in values if not isinstance(value, torch.Tensor))
    return on_host if not tensors else torch.stack(tensors).sum() + on_host


def _shared() -> bool:
    """Whether there are other ranks, of whose items this one's losses are only a share."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
