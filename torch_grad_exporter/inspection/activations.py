"""Activations: what `start_exporter(activations=)` asks for, the outputs of inner modules and their gradients in sampled rounds.

A forward hook measures an output at once, since the next module may modify it in place, and hooks the node that made it for the
gradient: never a full backward hook, which such a module would make raise. What forwards gave is pending until a backward of
their round has ended, so that a forward without a backward counts for nothing.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torch_grad_exporter.capture.armed_round import ArmedRound
from torch_grad_exporter.capture.cost import SampleCost
from torch_grad_exporter.capture.inspections import Inspection
from torch_grad_exporter.capture.loss_scale import LossScale
from torch_grad_exporter.capture.torch_hooks import Hooks
from torch_grad_exporter.errors import say
from torch_grad_exporter.inspection.activation_totals import ActivationTotals
from torch_grad_exporter.inspection.modules import Chosen, InnerModules
from torch_grad_exporter.inspection.round_hooks import Hooked, Moments, RoundHooks
from torch_grad_exporter.inspection.round_tallies import Key, RoundTallies, Tallies
from torch_grad_exporter.inspection.tallies import Tally, measuring
from torch_grad_exporter.inspection.tensors import UnitDims, dense, first_of
from torch_grad_exporter.statistics.device import capturing_graph
from torch_grad_exporter.store.mailbox import Mailbox
from torch_grad_exporter.torch_compat.autograd import BACKWARDS_ARE_SEEN, graph_task, on_node_of, within_transform
from torch_grad_exporter.torch_compat.compiler import called_from_compiled, compiles_backwards, something_is_compiled

logger = logging.getLogger("torch_grad_exporter")

SOURCE = "activations"

FORWARDS = 64
"""Forwards at most of which something is kept before it is known whether they are of the round."""

COMPILED = "activations of %d modules are not shown, since they are compiled; a hook in compiled code would compile it anew"


@dataclass(slots=True, eq=False)
class _Forward:
    """What a forward of a model has shown. `hooked`: a backward through it shows; `old`: a step came since."""

    tallies: Tallies = field(default_factory=dict)
    hooked: bool = False
    old: bool = False


class Activations(Inspection):
    """An `Inspection`. Belongs to the training thread, and to that of the backward."""

    def __init__(
        self,
        *,
        modules: InnerModules,
        hooks: Hooks,
        loss_scale: LossScale,
        cost: SampleCost,
        mailbox: Mailbox,
        totals: ActivationTotals,
    ) -> None:
        self._cost, self._totals = cost, totals
        self._tallies = RoundTallies(SOURCE, loss_scale, cost, mailbox)
        self._hooks = RoundHooks(modules, hooks, SOURCE, Moments(ended=self._forward_ended))
        self._on_gradient = hooks.guarded(SOURCE, self._gradient_came)
        self._hooks_gradients = True
        self._units = UnitDims()
        self._forward = 0
        """The number of the last forward of a model."""
        self._pending: dict[int, _Forward] = {}
        """By number, those of which no backward is known."""
        self._odd: set[int] = set()
        """Modules, by `id`, whose last output could not be measured."""
        self._roots: set[int] = set()
        self._new_roots: set[int] = set()
        """By `id`, models that had a forward before this round, and those that had their first one in it."""
        self._chosen = Chosen()
        self._told = 0

    # The moments of a round

    def forward_began(self, root: torch.nn.Module, _args: object, _kwargs: object, *, sampled: bool) -> None:
        """Hooks the model's modules for a sampled round, if this forward is not part of compiled code."""
        if not sampled or not BACKWARDS_ARE_SEEN or within_transform():
            self._hooks.disarm()
            self._pending = {}
            return
        if not self._known(id(root)):
            return
        self._forward += 1
        self._pending[self._forward] = _Forward()
        if len(self._pending) > FORWARDS:
            del self._pending[min(self._pending)]
        self._hooks_gradients = not compiles_backwards()
        self._chosen = self._hooks.arm(root, compiled=called_from_compiled(sys._getframe(1)))
        self._tell()

    def backward_ended(self, current: ArmedRound, at: float) -> None:  # noqa: ARG002
        """Confirms the forwards that the backward has passed through, and those of which that cannot show."""
        if not current.sampled:
            self._tallies.forget_backwards()
            self._pending = {}
            return
        backward = self._tallies.backward_ended(current.number)
        confirmed = [one for one, forward in self._pending.items() if one in backward.forwards or not forward.hooked]
        for one in confirmed:
            self._tallies.confirm(self._pending.pop(one).tallies)

    def round_over(self, number: int, *, kept: bool) -> None:
        """Sends what the round has shown to the host."""
        self._roots |= self._new_roots
        self._tell()
        self._tallies.round_over(number, kept=kept)

    def step_over(self, *, sampled: bool) -> None:
        """Takes all hooks off; the next forward sets those that it needs."""
        self._roots |= self._new_roots
        self._hooks.disarm()
        self._tallies.forget_backwards()
        # One that came before the step may get its backward after it, as that of a generator; but not after two steps.
        self._pending = {number: one for number, one in self._pending.items() if sampled and not one.old}
        for one in self._pending.values():
            one.old = True

    def release(self) -> None:
        """Takes all hooks off and forgets what is not sent; idempotent, from any thread."""
        self._hooks.disarm()
        self._pending = {}
        self._tallies.forget()

    def _known(self, root: int) -> bool:
        """Whether a model had a forward before this round; true of all where nothing is compiled.

        In the first one functions are compiled that it calls: with the hooks that they then see, and anew without them.
        """
        if root in self._roots or not something_is_compiled():
            return True
        self._new_roots.add(root)
        return False

    # Hooks

    def _forward_ended(self, inner: Hooked, output: object) -> None:
        """An inner module has returned; outside of any backward, so it is no second forward of a checkpoint."""
        if within_transform() or capturing_graph():
            return
        start = self._cost.now()
        found = first_of(output)
        values = None if found is None else dense(found)
        if found is None or values is None:
            self._odd.add(id(inner.module))
            return
        self._odd.discard(id(inner.module))
        key = Key(id(inner.module), inner.label, values.device)
        forward = self._pending.setdefault(self._forward, _Forward())
        with measuring(values.device.type):
            unit_dim = self._units.of(inner.module, values)
            self._tallies.measure(key, lambda: Tally.of_output(values, unit_dim), forward.tallies)
        if found.requires_grad and self._hooks_gradients:
            hook = functools.partial(self._on_gradient, key, self._forward, found.output_nr)
            forward.hooked |= on_node_of(found, hook)
        self._cost.spent(start, sampled=True)

    def _gradient_came(self, key: Key, forward: int, place: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """The gradient of an output of a forward is known: that at `place` of those of its node."""
        gradient, task = gradients[place], graph_task()
        if gradient is None or task == -1 or capturing_graph():
            return
        start = self._cost.now()
        values = dense(gradient)
        if values is not None:
            backward = self._tallies.backward(task)
            backward.forwards.add(forward)
            with measuring(values.device.type):
                self._tallies.measure(key, lambda: Tally.of_gradient(values), backward.tallies)
        self._cost.spent(start, sampled=True)

    def _tell(self) -> None:
        """Keeps the totals informed of what is left out, and says once that modules are compiled."""
        chosen = self._chosen
        self._totals.modules(chosen.folded, {"compiled": chosen.compiled, "output": len(self._odd)})
        if chosen.compiled > self._told:
            say(logger, logging.WARNING, COMPILED, chosen.compiled)
        self._told = max(self._told, chosen.compiled)
