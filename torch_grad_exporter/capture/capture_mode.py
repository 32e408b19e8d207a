"""CaptureMode: whether gradients are read after the backward or at the step, and which parameters report backwards."""

from __future__ import annotations

import logging

import numpy as np

from torch_grad_exporter.capture.gradient_versions import PROBES, GradientProbes
from torch_grad_exporter.capture.outcomes import Mode
from torch_grad_exporter.errors import say
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter

logger = logging.getLogger("torch_grad_exporter")

MISSES = 2
"""Rounds in a row in which all nodes were hooked and no backward was seen, after which gradients are read at the step."""

DETECTORS = 16
"""Parameters at most that report backwards in rounds that are not sampled."""


class CaptureMode:
    """The way of reading that this training needs. `current`: at first the better one; it changes once at most."""

    def __init__(self, probes: GradientProbes, optimizers: Optimizers, mode: Mode = Mode.BACKWARD) -> None:
        self._probes = probes
        self._optimizers = optimizers
        self._misses = 0
        self._followed: tuple[ParameterTable, set[int]] | None = None
        self._detectors: dict[tuple[int, int, int], TrackedParameter] = {}
        """By model, optimizer and place."""
        self.current = mode
        self.trusts_backwards = False
        """Whether a loop that reduces gradients by itself has done so by the end of a backward."""
        self.unsure = False
        """Whether a step came without a backward that was seen, so that all parameters are to report the next ones."""
        self.around_roots = False
        """Whether the last backward ran through the output of a root."""

    @property
    def sees_backwards(self) -> bool:
        """Whether gradients are read after the backward."""
        return self.current is Mode.BACKWARD

    @property
    def detectors(self) -> dict[TrackedParameter, None]:
        """The parameters that report backwards where not all do; none before the first sample."""
        return dict.fromkeys(self._detectors.values())

    def follow(self, table: ParameterTable, fired: set[int]) -> None:
        """After a sample in which `fired` got gradients: chooses what shows backwards, and clearing, until the next one.

        The first and the last of each optimizer and model show backwards; probes are spread over what got a gradient.
        """
        self.unsure = False
        if (table, fired) == self._followed:
            return
        self._followed = table, set(fired)
        owners = self._optimizers.owners(table)
        by_model: dict[int, list[int]] = {}
        for i in sorted(fired):
            by_model.setdefault(table.tracked[i].model, []).append(i)
        for model, positions in by_model.items():
            spread = dict.fromkeys(round(place) for place in np.linspace(0, len(positions) - 1, PROBES))  # weights and biases
            self._probes.choose(model, [table.tracked[positions[place]] for place in spread])
            for owner in np.unique(owners[positions]).tolist():
                owned = [i for i in positions if owners[i] == owner]
                for place, i in enumerate(dict.fromkeys((owned[0], owned[-1]))):
                    key = model, owner, place
                    if key in self._detectors or len(self._detectors) < DETECTORS:
                        self._detectors[key] = table.tracked[i]

    def seen(self) -> None:
        """A backward was seen."""
        self._misses = 0

    def missed(self, *, compiled: bool) -> None:
        """A step was taken without a backward that was seen. `compiled`: backwards are compiled, so that they call no hook."""
        self._misses += 1
        if compiled:
            self.read_at_steps("backwards are compiled; norms are those after clipping")
        elif self._misses >= MISSES:
            self.read_at_steps("steps were seen, but no backward; norms are those after clipping")

    def read_at_steps(self, why: str) -> None:
        """Reads gradients at the step from now on."""
        say(logger, logging.INFO, "gradients are read at the step from now on: %s", why)
        self.current, self._misses = Mode.OPTIMIZER, 0
        self._followed = None
        self._detectors = {}
        self._probes.forget()
