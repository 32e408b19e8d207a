"""GradientProbes: a few parameters of each model, whose gradients show clearing, writing and stepping."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from torch_grad_exporter.capture.gradient_versions import GradientVersions, version_of_local
from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter, parameters_of
from torch_grad_exporter.torch_compat.tensors import local

PROBES = 4
"""Parameters per model whose gradient is checked for whether it was cleared."""

LOOKED_AT = 1 << 12
"""Elements of a gradient that are looked at to see whether it was set to zero."""


def _is_zero(gradient: torch.Tensor) -> bool | None:
    """Return whether the first elements are zero; `None` where that cannot be seen without waiting for a device."""
    values = local(gradient).detach()
    if values.device.type != "cpu" or values.is_sparse or not values.is_contiguous():
        return None
    return not bool(values.view(-1)[:LOOKED_AT].any())


def _versions_of(parameters: Sequence[torch.nn.Parameter | None]) -> list[int]:
    """Return how often the parameters were written to, -1 for one that is gone."""
    return [-1 if p is None else version_of_local(p) for p in parameters]


class GradientProbes:
    """A few parameters of each model, whose gradients show whether they were cleared or written to since the last backward."""

    def __init__(self) -> None:
        self._probes: dict[int, list[TrackedParameter]] = {}
        self._last: tuple[GradientVersions, list[int]] = GradientVersions.of(()), []
        """The gradients of the last backward, and how often their parameters had been written to.

        One value: what a signal's handler raises may end any method between two statements.
        """
        self._between_steps: GradientVersions | None = None

    def choose(self, model: int, probes: list[TrackedParameter]) -> None:
        """Take these parameters, which recently received a gradient, as the probes of a model."""
        self._probes[model] = probes

    def forget(self) -> None:
        """Drop all probes."""
        self._probes.clear()

    def all(self) -> list[TrackedParameter]:
        """Return the probes of all models."""
        return [*itertools.chain.from_iterable(self._probes.values())]

    def backward_over(self, models: Iterable[int]) -> None:
        """Remember the gradients at the end of a backward, one of each model that it ran through."""
        first: list[TrackedParameter] = []
        for model in models:
            first += itertools.islice(self._present(model), 1)
        self._last = GradientVersions.of(first), _versions_of(parameters_of(first))

    @property
    def _after_backward(self) -> GradientVersions:
        return self._last[0]

    def _present(self, model: int) -> Iterator[TrackedParameter]:
        """Return the probes of a model that are trained and have a gradient."""
        for probe in self._probes.get(model, ()):
            parameter = probe.parameter()
            if parameter is not None and parameter.requires_grad and parameter.grad is not None:
                yield probe

    def gone(self) -> bool:
        """Return whether a gradient of the last backward is gone."""
        return any(p is not None and p.grad is None for p in parameters_of(self._after_backward.tracked))

    def cleared(self) -> bool:
        """Return whether gradients of the last backward may have been thrown away."""
        return self.gone() or self.zeroed() is not False

    def zeroed(self) -> bool | None:
        """Return whether gradients of the last backward were set to zero, or replaced by zeros; `None` if they may have been.

        On a device nothing is read, so all that was written to may be zero.
        """
        after = self._after_backward
        moved = [after.tracked[position] for position in after.moved()]
        seen = [_is_zero(gradient) for probe in moved for gradient in self._gradients_beside(probe)]
        if False in seen or not seen:
            return False
        return None if None in seen else True

    def _gradients_beside(self, own: TrackedParameter) -> Iterator[torch.Tensor]:
        """Return the gradients of a probe and of the others of its model: one alone may be zero by itself."""
        for probe in (own, *self._present(own.model)):
            gradient = probe.gradient()
            if gradient is not None:
                yield gradient

    def updated(self) -> bool:
        """Return whether parameters were written to since the last backward."""
        after, values = self._last
        return any(now not in (-1, before) for now, before in zip(_versions_of(parameters_of(after.tracked)), values, strict=True))

    def untouched(self) -> bool:
        """Return whether the gradients are those of the last backward, as far as the probes show."""
        return bool(self._after_backward.tracked) and self._after_backward.unchanged()

    def written_between_steps(self, table: ParameterTable) -> bool:
        """Return whether gradients were written since this was last asked, at a step; the first answer is that they were."""
        before, self._between_steps = self._between_steps, GradientVersions.of(table.tracked[:PROBES])
        return before is None or bool(before.moved()) or None in parameters_of(before.tracked)
