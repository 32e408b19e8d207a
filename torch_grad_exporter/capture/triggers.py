"""The ladder of rungs: ways to detect that a backward began and which gradients it wrote, one `Trigger` for each rung.

- `output`: a hook on the root module's output says that a backward began; the gradients are read after it.
- `parameter`: backwards that do not run through a root's output (submodules called directly, a compiled root)
  are seen by hooks on the parameters' AccumulateGrad nodes, on sampled rounds only; on the others by a few detector parameters.
  A few sampled rounds under `output` are checked by the same nodes, and a backward that only the nodes saw demotes it.
- `optimizer`: where neither sees a backward, gradients are read when the optimizer steps, after clipping.

`BackwardWatch` gives the hooks; a trigger places them and says what can be read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from torch_grad_exporter.capture.accumulate_grad import AccumulateGradNodes
from torch_grad_exporter.capture.gradient_versions import PROBES, GradientProbes
from torch_grad_exporter.capture.module_outputs import differentiable
from torch_grad_exporter.capture.torch_hooks import GuardedHook, Handle
from torch_grad_exporter.errors import say
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.parameters import ParameterTable
from torch_grad_exporter.torch_compat import on_gradient
from torch_grad_exporter.transfer.outcomes import Mode

logger = logging.getLogger("torch_grad_exporter")

CHECK_EVERY = 64
"""Every so many samples, and at the first two, the rung `output` is checked against the parameters' own nodes."""

MISSES = 2
"""Rounds in a row in which a rung saw no backward, after which the next one is taken."""

DETECTORS = 8
"""Parameters at most that report backwards on the rung `parameter` while nothing is sampled."""


class Trigger(Protocol):
    """One rung. `sees_backwards`: it tells when one begins. `announces`: it does so by the outputs, before any node fires."""

    mode: Mode
    sees_backwards: bool
    announces: bool

    def wants_nodes(self, samples: int) -> bool:
        """Whether the nodes are to be hooked for the next sampled round, after so many samples."""

    def keeps_nodes(self) -> bool:
        """Whether nodes that are hooked stay so from one sampled round to the next."""

    def follow(self, table: ParameterTable, fired: set[int], hooks: Sequence[GuardedHook]) -> None:
        """After a sample in which `fired` got gradients: chooses the probes until the next one. `hooks`: by model."""

    def release(self) -> None:
        """Releases everything that keeps a parameter alive; idempotent, from any thread."""


def hook_output(output: object, hook: GuardedHook) -> None:
    """Lets `hook` be called when a backward reaches what a root's forward has given; the hooks go with the graph."""
    for tensor in differentiable(output):
        on_gradient(tensor, hook)


def _by_model(table: ParameterTable, fired: set[int]) -> dict[int, list[int]]:
    positions: dict[int, list[int]] = {}
    for i in sorted(fired):
        positions.setdefault(table.tracked[i].model, []).append(i)
    return positions


def _choose_probes(probes: GradientProbes, table: ParameterTable, fired: set[int]) -> None:
    """Chooses some parameters of each model, spread over those that got a gradient."""
    for model, positions in _by_model(table, fired).items():
        step = max(1, len(positions) // PROBES)
        probes.choose(model, [table.tracked[i] for i in positions[::step][:PROBES]])


class OutputTrigger:
    """Hooks on the outputs of roots."""

    mode = Mode.OUTPUT
    sees_backwards = announces = True

    def __init__(self, probes: GradientProbes) -> None:
        self._probes = probes
        self._followed: tuple[ParameterTable, set[int]] | None = None

    def wants_nodes(self, samples: int) -> bool:
        """For a check."""
        return samples < 2 or samples % CHECK_EVERY == 0

    def keeps_nodes(self) -> bool:
        """A check is over after one round."""
        return False

    def follow(self, table: ParameterTable, fired: set[int], hooks: Sequence[GuardedHook]) -> None:  # noqa: ARG002 - as `Trigger`
        """Chooses probes, unless the sample was like the one before."""
        if (table, fired) != self._followed:
            self._followed = table, set(fired)
            _choose_probes(self._probes, table, fired)

    def release(self) -> None:
        """Holds no parameter."""


class ParameterTrigger:
    """Hooks on the AccumulateGrad nodes on sampled rounds, on one detector parameter of each optimizer on the others."""

    mode = Mode.PARAMETER
    sees_backwards, announces = True, False

    def __init__(self, probes: GradientProbes, optimizers: Optimizers) -> None:
        self._probes = probes
        self._optimizers = optimizers
        self._detectors: dict[int, Handle] = {}

    def wants_nodes(self, samples: int) -> bool:  # noqa: ARG002 - as `Trigger`
        """On each sampled round."""
        return True

    def keeps_nodes(self) -> bool:
        """They are those of the same parameters."""
        return True

    def follow(self, table: ParameterTable, fired: set[int], hooks: Sequence[GuardedHook]) -> None:
        """Lets one parameter per optimizer report backwards on the rounds that are not sampled."""
        owners, _ = self._optimizers.owners(table)
        for model, positions in _by_model(table, fired).items():
            for i, owner in zip(positions, owners[positions].tolist(), strict=True):
                if owner in self._detectors or len(self._detectors) >= DETECTORS:
                    continue
                parameter = table.tracked[i].parameter()
                if parameter is not None:
                    # A hook on the parameter itself runs before the gradient is written: clearing can still be seen.
                    self._detectors[owner] = parameter.register_hook(hooks[model])  # type: ignore[no-untyped-call]
                    self._probes.prefer(model, table.tracked[i])

    def release(self) -> None:
        """Removes the detectors' hooks."""
        detectors, self._detectors = self._detectors, {}
        for handle in detectors.values():
            handle.remove()


class OptimizerTrigger:
    """No backward is seen: gradients are read as the optimizer steps."""

    mode = Mode.OPTIMIZER
    sees_backwards = announces = False

    def __init__(self, probes: GradientProbes) -> None:
        self._probes = probes

    def wants_nodes(self, samples: int) -> bool:  # noqa: ARG002 - as `Trigger`
        """Nodes tell nothing here."""
        return False

    def keeps_nodes(self) -> bool:
        """There are none."""
        return True

    def follow(self, table: ParameterTable, fired: set[int], hooks: Sequence[GuardedHook]) -> None:  # noqa: ARG002 - as `Trigger`
        """Chooses probes."""
        _choose_probes(self._probes, table, fired)

    def release(self) -> None:
        """Holds no parameter."""


class Ladder:
    """The rung in use, the highest that sees this training's backwards. `start`: the first one to be tried."""

    def __init__(
        self, nodes: AccumulateGradNodes, probes: GradientProbes, optimizers: Optimizers, start: Mode = Mode.OUTPUT
    ) -> None:
        rungs: tuple[Trigger, ...] = OutputTrigger(probes), ParameterTrigger(probes, optimizers), OptimizerTrigger(probes)
        self._rungs = {rung.mode: rung for rung in rungs}
        self._nodes = nodes
        self._probes = probes
        self._misses = 0
        self.current = self._rungs[start]

    @property
    def mode(self) -> Mode:
        """The rung in use."""
        return self.current.mode

    def seen(self) -> None:
        """A backward that wrote gradients was seen."""
        self._misses = 0

    def missed(self, *, compiled: bool, fully_sharded: bool) -> None:
        """A step was taken without a backward that was seen. `compiled`: backwards are compiled, so that they call no hook."""
        self._misses += 1
        if compiled:
            self.fall_to(Mode.OPTIMIZER, "backwards are compiled; norms are those after clipping")
        elif self._misses >= MISSES:
            if self.mode is Mode.OUTPUT and not fully_sharded:
                self.fall_to(Mode.PARAMETER, "steps were seen, but no backward through the model's output")
            else:
                self.fall_to(Mode.OPTIMIZER, "steps were seen, but no backward; norms are those after clipping")

    def fall_to(self, mode: Mode, why: str) -> None:
        """Takes a lower rung permanently."""
        say(logger, logging.INFO, "gradients are captured by rung %r from now on: %s", mode.value, why)
        self.current, self._misses = self._rungs[mode], 0
        self._probes.forget()
        if mode is Mode.OPTIMIZER:
            self.release()

    def release(self) -> None:
        """Releases everything that keeps a parameter alive; idempotent, from any thread."""
        self._nodes.disarm()
        for rung in self._rungs.values():
            rung.release()
