"""Which tensor a parameter's gradient is, and how often it was written to: this shows clearing, writing and stepping.

Nothing here reads a gradient's data. A gradient is identified by a number that is set on it as an attribute: what is
remembered must not keep a gradient's memory, a weak reference would forbid `torch.utils.swap_tensors` on it, and its `id` may
have been reused by another tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter, parameters_of
from torch_grad_exporter.torch_compat import local, version_of

PROBES = 4
"""Parameters per model whose gradient is checked for whether it was cleared."""

_ATTRIBUTE = "_torch_grad_exporter_number"
_NUMBERS = itertools.count()


def _number_of(gradient: torch.Tensor) -> int | None:
    return getattr(gradient, _ATTRIBUTE, None)


def _numbered(gradient: torch.Tensor) -> int:
    """The gradient's number; it gets one if it has none yet."""
    number = _number_of(gradient)
    if number is None:
        number = next(_NUMBERS)
        setattr(gradient, _ATTRIBUTE, number)
    return number


def _version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; what is written to a DTensor shows in its local tensor only."""
    return version_of(local(tensor))


@dataclass(frozen=True, slots=True)
class GradientVersion:
    """Which tensor a parameter's gradient was at one moment, and how often it and the parameter had been written to."""

    tracked: TrackedParameter
    gradient: int | None
    version: int
    value_version: int

    @classmethod
    def of(cls, tracked: TrackedParameter) -> GradientVersion:
        """The version of a parameter's gradient as it is now."""
        parameter = tracked.parameter()
        value_version = -1 if parameter is None else _version_of(parameter)
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            return cls(tracked, None, -1, value_version)
        return cls(tracked, _numbered(gradient), _version_of(gradient), value_version)

    def replaced(self) -> bool:
        """Whether the parameter no longer has that gradient."""
        parameter = self.tracked.parameter()
        return parameter is not None and (parameter.grad is None or _number_of(parameter.grad) != self.gradient)

    def updated(self) -> bool:
        """Whether the parameter's value was written to."""
        parameter = self.tracked.parameter()
        return parameter is not None and _version_of(parameter) != self.value_version

    def moved(self) -> bool:
        """Whether there is a gradient now that is another tensor than then, or was written to."""
        now = self.tracked.gradient()
        return now is not None and (_number_of(now) != self.gradient or _version_of(now) != self.version)


@dataclass(frozen=True, slots=True)
class GradientVersions:
    """The versions of the gradients of many parameters at one moment, in columns."""

    tracked: Sequence[TrackedParameter]
    numbers: list[int | None]
    versions: list[int]

    @classmethod
    def of(cls, tracked: Sequence[TrackedParameter]) -> GradientVersions:
        """The versions of the parameters' gradients as they are now."""
        gradients = [None if p is None else p.grad for p in parameters_of(tracked)]
        numbers = [None if g is None else _numbered(g) for g in gradients]
        return cls(tracked, numbers, [-1 if g is None else _version_of(g) for g in gradients])

    def moved(self) -> set[int]:
        """The positions of those that have a gradient now that is another tensor than then, or was written to."""
        rows = zip(parameters_of(self.tracked), self.numbers, self.versions, strict=True)
        return {
            position
            for position, (parameter, number, version) in enumerate(rows)
            if parameter is not None
            and (gradient := parameter.grad) is not None
            and (number is None or _number_of(gradient) != number or _version_of(gradient) != version)
        }


class GradientProbes:
    """A few parameters of each model, whose gradients show whether they were cleared or written to since the last backward."""

    def __init__(self) -> None:
        self._probes: dict[int, list[TrackedParameter]] = {}
        self._after_backward: list[GradientVersion] = []
        self._between_steps: list[GradientVersion] = []

    def choose(self, model: int, probes: list[TrackedParameter]) -> None:
        """Takes these parameters, which got a gradient lately, for a model's probes."""
        self._probes[model] = probes

    def prefer(self, model: int, probe: TrackedParameter) -> None:
        """Takes this parameter for a model's first probe."""
        self._probes.setdefault(model, []).insert(0, probe)

    def forget(self) -> None:
        """Drops all probes."""
        self._probes.clear()

    def all(self) -> list[TrackedParameter]:
        """The probes of all models."""
        return [*itertools.chain.from_iterable(self._probes.values())]

    def backward_over(self, models: Iterable[int]) -> None:
        """Remembers the gradients at the end of a backward, one of each model that it ran through."""
        self._after_backward = []
        for model in models:
            found = (GradientVersion.of(probe) for probe in self._probes.get(model, ()))
            self._after_backward += itertools.islice((one for one in found if one.gradient is not None), 1)

    def gone(self) -> bool:
        """Whether a gradient of the last backward is gone, or is another tensor."""
        return any(one.replaced() for one in self._after_backward)

    def written(self) -> bool:
        """Whether a gradient of the last backward was written to, or is another tensor."""
        return any(one.moved() for one in self._after_backward)

    def updated(self) -> bool:
        """Whether parameters were written to since the last backward."""
        return any(one.updated() for one in self._after_backward)

    def untouched(self) -> bool:
        """Whether the gradients are those of the last backward, as far as the probes show."""
        return bool(self._after_backward) and not self.gone() and not self.written()

    def written_between_steps(self, table: ParameterTable) -> bool:
        """Whether gradients were written since this was last asked, at a step; the first answer is that they were."""
        before = self._between_steps
        self._between_steps = [GradientVersion.of(tracked) for tracked in table.tracked[:PROBES]]
        return not before or any(one.moved() or one.tracked.parameter() is None for one in before)
