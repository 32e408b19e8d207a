"""Which tensor a parameter's gradient is, and how often it was written to: this shows clearing, writing and stepping.

Hardly anything here reads a gradient's data. A gradient is identified by a number that is set on it as an attribute: what is
remembered must not keep a gradient's memory, a weak reference would forbid `torch.utils.swap_tensors` on it, and its `id` may
have been reused by another tensor.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_grad_exporter.model.parameters import AT_ONCE, ParameterTable, TrackedParameter, parameters_of
from torch_grad_exporter.torch_compat.autograd import version_of
from torch_grad_exporter.torch_compat.tensors import PLAIN, local

ELEMENTS = 8
"""Gradients of which an element is compared between the backward and the step."""

PROBES = 4
"""Parameters per model whose gradient is checked for whether it was cleared."""

LOOKED_AT = 1 << 12
"""Elements of a gradient that are looked at to see whether it was set to zero."""

_STRIDE = 7919
"""A prime: over the samples the compared elements are spread over the gradients."""

_ATTRIBUTE = "_torch_grad_exporter_number"
_NUMBERS = itertools.count()
_NONE = torch.empty(0, device="cpu")
"""Stands where there is no gradient."""


def version_of_local(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to; what is written to a DTensor shows in its local tensor only."""
    return version_of(tensor if type(tensor) in PLAIN else local(tensor))


_gradient_of: Callable[[torch.nn.Parameter | None], torch.Tensor | None] = operator.attrgetter("grad")

Marks = tuple[list[int], list[int], list[int]]
"""Identity, memory and version of each gradient; all three, since an `id` may be used again."""


@dataclass(frozen=True, slots=True, eq=False)
class PresentGradients:
    """Parameters and their gradients at one moment, in columns; `None` for what is not in its place. To be dropped at once.

    `marks`: by which those of another moment are compared, if asked for, where each parameter is in its place.
    """

    tracked: Sequence[TrackedParameter]
    parameters: Sequence[torch.nn.Parameter | None]
    gradients: list[torch.Tensor | None]
    marks: Marks | None = None
    in_place: bool = True
    """Whether each parameter is in its place."""

    @classmethod
    def of(cls, tracked: Sequence[TrackedParameter], *, marked: bool = False) -> PresentGradients:
        """Look the gradients up, without a line of Python for each."""
        parameters = parameters_of(tracked)
        if types.NoneType in map(type, parameters):
            return cls(tracked, parameters, [None if p is None else p.grad for p in parameters], in_place=False)
        gradients: list[torch.Tensor | None] = []
        marks: Marks = [], [], []
        for start in range(0, len(parameters), AT_ONCE):
            several = [*map(_gradient_of, parameters[start : start + AT_ONCE])]
            gradients += several
            if marked:
                there: Any = several if types.NoneType not in map(type, several) else [_NONE if g is None else g for g in several]
                try:
                    for column, mark in zip(marks, (id, torch.Tensor.data_ptr, version_of), strict=True):
                        column.extend(map(mark, there))
                except (RuntimeError, NotImplementedError):  # a kind of tensor that does not tell
                    marked = False
        return cls(tracked, parameters, gradients, marks if marked else None)

    def at(self, positions: Collection[int]) -> dict[int, torch.Tensor]:
        """Return the gradients that are there at these positions, by position in rising order."""
        gradients = self.gradients
        if len(positions) == len(gradients) and types.NoneType not in map(type, gradients):
            return dict(enumerate(gradients))  # type: ignore[arg-type]
        return {i: gradient for i in sorted(positions) if (gradient := gradients[i]) is not None}


@dataclass(frozen=True, slots=True)
class GradientVersions:
    """The versions of the gradients of many parameters at one moment, in columns."""

    tracked: Sequence[TrackedParameter]
    numbers: list[int | None]
    versions: list[int]

    @classmethod
    def of(cls, tracked: Sequence[TrackedParameter]) -> GradientVersions:
        """Return the versions of the parameters' gradients as they are now; each gradient gets a number if it has none yet."""
        numbers: list[int | None] = []
        versions: list[int] = []
        for parameter in parameters_of(tracked):
            gradient = None if parameter is None else parameter.grad
            number = getattr(gradient, _ATTRIBUTE, None)
            if gradient is not None and number is None:
                number = next(_NUMBERS)
                setattr(gradient, _ATTRIBUTE, number)
            numbers.append(number)
            versions.append(-1 if gradient is None else version_of_local(gradient))
        return cls(tracked, numbers, versions)

    def moved(self, now: PresentGradients | None = None) -> set[int]:
        """Return the positions of those that have a gradient now that is another tensor than then, or was written to.

        `now`: what there is of the same parameters, where that was looked up already.
        """
        if now is None or now.tracked is not self.tracked:
            now = PresentGradients.of(self.tracked)
        rows = zip(now.gradients, self.numbers, self.versions, strict=True)
        return {
            position
            for position, (gradient, number, version) in enumerate(rows)
            if gradient is not None
            and (number is None or getattr(gradient, _ATTRIBUTE, None) != number or version_of_local(gradient) != version)
        }

    def unchanged(self) -> bool:
        """Return whether each parameter has that gradient, and nothing has written to it."""
        now = PresentGradients.of(self.tracked)
        rows = zip(now.gradients, self.numbers, strict=True)
        return not self.moved(now) and all((gradient is None) == (number is None) for gradient, number in rows)


class GradientsAsRead:
    """Gradients as a sample has read them, to see at the step whether anything has written to them since.

    An edit shows by the tensor or its version. One that bypasses versions, as by `.data` or NumPy, shows in a few elements, other
    ones in each sample.

    Args:
        gradients: What was read, by position in the table: plain tensors on the host, where no device is to be waited for.
        marks: Those of all gradients of the table.
        sample: The number of the sample, by which other elements are chosen in each.
    """

    def __init__(self, gradients: Mapping[int, torch.Tensor], marks: Marks, sample: int) -> None:
        self._marks = marks
        self._elements: list[tuple[int, int, float]] = []  # position in the table, index in the gradient, value
        positions = [*gradients]
        for number in range(min(ELEMENTS, len(positions))):
            position = positions[(sample * ELEMENTS + number) % len(positions)]
            gradient = gradients[position]
            if gradient.is_contiguous() and (size := gradient.numel()):
                index = sample * _STRIDE % size
                value = gradient.numpy(force=True).item(index)
                if value == value:  # noqa: PLR0124 - no NaN
                    self._elements.append((position, index, value))

    def unchanged(self, positions: Sequence[int], now: PresentGradients) -> bool:
        """Return whether the gradients of the parameters at `positions`, which were all read, are the same `now`."""
        marks: Sequence[list[int]] = self._marks
        place: Mapping[int, int] | range = range(len(marks[0]))
        if len(positions) < len(place):
            marks = [[*map(column.__getitem__, positions)] for column in marks]
            place = dict(zip(positions, itertools.count()))
        if now.marks is None or not all(map(operator.eq, marks, now.marks)):
            return False
        for position, index, value in self._elements:
            if position in place:
                gradient = now.gradients[place[position]]
                if gradient is None or gradient.numpy(force=True).item(index) != value:
                    return False
        return True


class GradientProbes:
    """A few parameters of each model, whose gradients show whether they were cleared or written to since the last backward."""

    def __init__(self) -> None:
        self._probes: dict[int, list[TrackedParameter]] = {}
        self._last: tuple[GradientVersions, list[int], set[int]] = GradientVersions.of(()), [], set()
        """The gradients of the last backward, how often their parameters had been written to, and the models where all were zero.

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
        firsts: list[TrackedParameter] = []
        zero: set[int] = set()
        for model in models:
            present = [*self.present(model)]
            if present:
                firsts.append(present[0][0])
                if _are_zero(gradient for _, gradient in present):
                    zero.add(model)
        values = [-1 if p is None else version_of_local(p) for p in parameters_of(firsts)]
        self._last = GradientVersions.of(firsts), values, zero

    def present(self, model: int | None = None) -> Iterator[tuple[TrackedParameter, torch.Tensor]]:
        """Return the probes, of one model only, that are trained and have a gradient; and that."""
        probes = self.all() if model is None else self._probes.get(model, [])
        for probe, parameter in zip(probes, parameters_of(probes), strict=True):
            if parameter is not None and parameter.requires_grad and parameter.grad is not None:
                yield probe, parameter.grad

    def gone(self) -> bool:
        """Return whether a gradient of the last backward is gone."""
        return any(p is not None and p.grad is None for p in parameters_of(self._last[0].tracked))

    def cleared(self) -> bool:
        """Return whether gradients of the last backward may have been thrown away."""
        return self.gone() or self.zeroed() is not False

    def zeroed(self) -> bool | None:
        """Return whether gradients of the last backward were set to zero, or replaced by zeros; `None` if they may have been.

        On a device nothing is read, so all that was written to may be zero. Zeros that the backward itself has left show nothing.
        """
        after, _, zero = self._last
        moved = [probe for position in after.moved() if (probe := after.tracked[position]).model not in zero]
        others = (gradient for probe in moved for _, gradient in self.present(probe.model))
        return _are_zero([*(probe.gradient() for probe in moved), *others])

    def updated(self) -> bool:
        """Return whether parameters were written to since the last backward."""
        after, values, _ = self._last
        pairs = zip(parameters_of(after.tracked), values, strict=True)
        return any(p is not None and version_of_local(p) != before for p, before in pairs)

    def untouched(self) -> bool:
        """Return whether the gradients are those of the last backward, as far as the probes show."""
        return bool(self._last[0].tracked) and self._last[0].unchanged()

    def written_between_steps(self, table: ParameterTable) -> bool:
        """Return whether gradients were written since this was last asked, at a step; the first answer is that they were."""
        before, self._between_steps = self._between_steps, GradientVersions.of(table.tracked[:PROBES])
        return before is None or bool(before.moved()) or None in parameters_of(before.tracked)


def _are_zero(gradients: Iterable[torch.Tensor | None]) -> bool | None:
    """Return whether all gradients are zero, since one alone may be by itself; False without any, `None` if unknown."""
    seen: set[bool | None] = set()
    for gradient in gradients:
        if gradient is None:
            continue
        values = gradient if type(gradient) in PLAIN else local(gradient)
        if values.device.type != "cpu" or values.is_sparse or not values.is_contiguous():
            seen.add(None)  # cannot be seen without waiting for a device
            continue
        try:  # by NumPy, which a mode that forbids reads does not see
            first = values.numpy(force=True).reshape(-1)[:LOOKED_AT]
        except TypeError:  # NumPy has no bfloat16
            first = (values.detach().view(-1)[:LOOKED_AT] != 0).numpy()
        if first.any():
            return False
        seen.add(True)
    return None if None in seen else bool(seen)
