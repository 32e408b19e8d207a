"""The ladder of rungs: ways to detect that a backward began and which gradients it wrote.

- `output`: a hook on the root module's output says that a backward began; the gradients are read after it.
- `parameter`: backwards that do not run through a root's output (submodules called directly, a compiled root)
  are seen by hooks on the parameters' AccumulateGrad nodes, on sampled rounds only; on the others by a few detector parameters.
- `optimizer`: where neither sees a backward, gradients are read when the optimizer steps, after clipping.

In every sampled round of the first two the nodes are hooked, so that no accumulation into a gradient goes unseen; a backward that
only the nodes saw demotes `output`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torch_grad_exporter.capture.accumulate_grad import AccumulateGradNodes
from torch_grad_exporter.capture.gradient_versions import PROBES, GradientProbes
from torch_grad_exporter.capture.outcomes import Mode
from torch_grad_exporter.capture.torch_hooks import GuardedHook, Handle
from torch_grad_exporter.errors import say
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter

logger = logging.getLogger("torch_grad_exporter")

MISSES = 2
"""Rounds in a row in which a rung saw no backward, after which the next one is taken."""

DETECTORS = 8
"""Parameters at most that report backwards on the rung `parameter` while nothing is sampled."""


@dataclass(frozen=True, slots=True)
class _Detector:
    """A parameter that reports backwards."""

    called: TrackedParameter
    handle: Handle

    def is_trained(self) -> bool:
        """Whether it can still do so."""
        parameter = self.called.parameter()
        return parameter is not None and parameter.requires_grad


class Ladder:
    """The rung in use, the highest that sees this training's backwards. `mode`: at first the first one to be tried."""

    def __init__(
        self, nodes: AccumulateGradNodes, probes: GradientProbes, optimizers: Optimizers, mode: Mode = Mode.OUTPUT
    ) -> None:
        self._nodes = nodes
        self._probes = probes
        self._optimizers = optimizers
        self._misses = 0
        self._followed: tuple[ParameterTable, set[int]] | None = None
        self._detectors: dict[tuple[int, int], _Detector] = {}
        """By optimizer and place."""
        self.mode = mode

    @property
    def sees_backwards(self) -> bool:
        """Whether the rung tells when a backward begins."""
        return self.mode is not Mode.OPTIMIZER

    @property
    def announces(self) -> bool:
        """Whether it does so by the outputs of roots, before any node fires."""
        return self.mode is Mode.OUTPUT

    def follow(self, table: ParameterTable, fired: set[int], hooks: Sequence[GuardedHook]) -> None:
        """After a sample in which `fired` got gradients: chooses what shows backwards, and clearing, until the next one.

        `hooks`: by model, for the detectors on the rung `parameter`. Probes are spread over what got a gradient.
        """
        if (table, fired) != self._followed:
            self._followed = table, set(fired)
            by_model: dict[int, list[int]] = {}
            for i in sorted(fired):
                by_model.setdefault(table.tracked[i].model, []).append(i)
            for model, positions in by_model.items():
                spread = dict.fromkeys(round(place) for place in np.linspace(0, len(positions) - 1, PROBES))  # weights and biases
                self._probes.choose(model, [table.tracked[positions[place]] for place in spread])
                if self.mode is Mode.PARAMETER:
                    self._detect(table, model, positions, hooks[model])

    def _detect(self, table: ParameterTable, model: int, positions: list[int], hook: GuardedHook) -> None:
        """Lets the first and the last parameter of each optimizer report backwards on the rounds that are not sampled."""
        owners = self._optimizers.owners(table)
        for owner in np.unique(owners[positions]).tolist():
            owned = [i for i in positions if owners[i] == owner]
            for place, i in enumerate(dict.fromkeys((owned[0], owned[-1]))):
                tracked, parameter = table.tracked[i], table.tracked[i].parameter()
                before = self._detectors.get((owner, place))
                if parameter is None or (before is not None and (before.called is tracked or before.is_trained())):
                    continue
                if before is None and len(self._detectors) >= DETECTORS:
                    continue
                if before is not None:
                    before.handle.remove()
                # A hook on the parameter itself runs before the gradient is written: clearing can still be seen.
                self._detectors[owner, place] = _Detector(tracked, parameter.register_hook(hook))  # type: ignore[no-untyped-call]
                self._probes.prefer(model, tracked)

    def seen(self) -> None:
        """A backward that wrote gradients was seen."""
        self._misses = 0

    def missed(self, *, compiled: bool, lower: bool) -> None:
        """A step was taken without a backward that was seen.

        `compiled`: backwards are compiled, so that they call no hook. `lower`: `parameter` could see what `output` did not.
        """
        self._misses += 1
        if compiled:
            self.fall_to(Mode.OPTIMIZER, "backwards are compiled; norms are those after clipping")
        elif self._misses >= MISSES:
            if self.mode is Mode.OUTPUT and lower:
                self.fall_to(Mode.PARAMETER, "steps were seen, but no backward through the model's output")
            else:
                self.fall_to(Mode.OPTIMIZER, "steps were seen, but no backward; norms are those after clipping")

    def fall_to(self, mode: Mode, why: str) -> None:
        """Takes a lower rung permanently."""
        say(logger, logging.INFO, "gradients are captured by rung %r from now on: %s", mode.value, why)
        self.mode, self._misses = mode, 0
        self._followed = None
        self._probes.forget()
        if mode is Mode.OPTIMIZER:
            self.release()

    def release(self) -> None:
        """Releases everything that keeps a parameter alive; idempotent, from any thread."""
        self._nodes.release()
        detectors, self._detectors = self._detectors, {}
        for detector in detectors.values():
            detector.handle.remove()
