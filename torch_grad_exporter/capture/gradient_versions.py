"""Which tensor a parameter's gradient is, and how often it was written to: this shows clearing, writing and stepping.

Nothing here reads a gradient's data. A gradient is identified by a number that is set on it as an attribute: what is
remembered must not keep a gradient's memory, a weak reference would forbid `torch.utils.swap_tensors` on it, and its `id` may
have been reused by another tensor.
"""

from __future__ import annotations

import itertools
import math
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_grad_exporter.model.parameters import ParameterTable, TrackedParameter, parameters_of
from torch_grad_exporter.torch_compat.autograd import version_of
from torch_grad_exporter.torch_compat.tensors import local

PROBES = 4
"""Parameters per model whose gradient is checked for whether it was cleared."""

LOOKED_AT = 1 << 12
"""Elements of a gradient that are looked at to see whether it was set to zero."""

ELEMENTS = 8
"""Gradients of which an element is compared between the backward and the step."""

_STRIDE = 7919
"""A prime: over the samples the compared elements are spread over the gradients."""

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


def _is_zero(gradient: torch.Tensor) -> bool | None:
    """Whether the first elements are zero; `None` where that cannot be seen without waiting for a device."""
    found = local(gradient).detach()
    if found.device.type != "cpu" or found.is_sparse or not found.is_contiguous():
        return None
    return not bool(found.view(-1)[:LOOKED_AT].any())


_gradient_of: Callable[[torch.nn.Parameter | None], torch.Tensor | None] = operator.attrgetter("grad")


@dataclass(frozen=True, slots=True, eq=False)
class PresentGradients:
    """Parameters and their gradients at one moment, in columns; `None` for what is not in its place. To be dropped at once."""

    tracked: Sequence[TrackedParameter]
    parameters: list[torch.nn.Parameter | None]
    gradients: list[torch.Tensor | None]

    @classmethod
    def of(cls, tracked: Sequence[TrackedParameter], parameters: list[torch.nn.Parameter | None] | None = None) -> PresentGradients:
        """What there is now: no line of Python runs for each of them. `parameters`: where they were looked up already."""
        parameters = parameters_of(tracked) if parameters is None else parameters
        if types.NoneType in map(type, parameters):
            return cls(tracked, parameters, [None if p is None else p.grad for p in parameters])
        return cls(tracked, parameters, [*map(_gradient_of, parameters)])

    @property
    def in_place(self) -> bool:
        """Whether each parameter is in its place."""
        return types.NoneType not in map(type, self.parameters)

    def at(self, positions: Collection[int]) -> dict[int, torch.Tensor]:
        """The gradients that are there at these positions, by position in rising order."""
        found = self.gradients
        if len(positions) == len(found) and types.NoneType not in map(type, found):
            return dict(enumerate(found))  # type: ignore[arg-type]
        return {i: gradient for i in sorted(positions) if (gradient := found[i]) is not None}


@dataclass(frozen=True, slots=True)
class GradientVersions:
    """The versions of the gradients of many parameters at one moment, in columns."""

    tracked: Sequence[TrackedParameter]
    numbers: list[int | None]
    versions: list[int]

    @classmethod
    def of(cls, tracked: Sequence[TrackedParameter], parameters: list[torch.nn.Parameter | None] | None = None) -> GradientVersions:
        """The versions of the parameters' gradients as they are now. `parameters`: where they were looked up already."""
        return cls.of_present(PresentGradients.of(tracked, parameters))

    @classmethod
    def of_present(cls, present: PresentGradients) -> GradientVersions:
        """The versions of gradients that were looked up."""
        gradients = present.gradients
        numbers = [None if g is None else _numbered(g) for g in gradients]
        return cls(present.tracked, numbers, [-1 if g is None else _version_of(g) for g in gradients])

    def moved(self, now: PresentGradients | None = None) -> set[int]:
        """The positions of those that have a gradient now that is another tensor than then, or was written to.

        `now`: what there is of the same parameters, where that was looked up already.
        """
        if now is None or now.tracked is not self.tracked:
            now = PresentGradients.of(self.tracked)
        return {
            position
            for position, (gradient, number, version) in enumerate(zip(now.gradients, self.numbers, self.versions, strict=True))
            if gradient is not None and (number is None or _number_of(gradient) != number or _version_of(gradient) != version)
        }

    def unchanged(self) -> bool:
        """Whether each parameter has that gradient, and nothing has written to it."""
        now = PresentGradients.of(self.tracked)
        rows = zip(now.gradients, self.numbers, strict=True)
        return not self.moved(now) and all((gradient is None) == (number is None) for gradient, number in rows)


class GradientsAsRead:
    """Gradients as a sample has read them, to see at the step whether anything has written to them since.

    An edit shows by the tensor or its version. One that bypasses versions, as by `.data` or NumPy, shows in a few elements, other
    ones in each sample. Only plain tensors on the host are compared, where no device is to be waited for: all others always count
    as written to.

    Args:
        gradients: What was read, by position in the table.
        sample: The number of the sample, by which other elements are chosen in each.
    """

    def __init__(self, gradients: Mapping[int, torch.Tensor], sample: int) -> None:
        self._positions = [*gradients]
        values = [*gradients.values()]
        self._columns = _columns(values)  # identity, memory and version of each; all three, since an `id` may be used again
        self._elements: list[tuple[int, int, float]] = []  # place among them, index of an element, and its value
        for number in range(min(ELEMENTS, len(values)) if self._columns is not None else 0):
            place = (sample * ELEMENTS + number) % len(values)
            if values[place].is_contiguous() and values[place].numel():
                index = sample * _STRIDE % values[place].numel()
                self._elements.append((place, index, _element(values[place], index)))

    def unchanged(self, positions: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> bool:
        """Return whether these gradients, those of the parameters at `positions`, are as they were read."""
        if self._columns is None:
            return False
        columns, elements = self._columns, self._elements
        if positions != self._positions:
            wanted = dict(zip(positions, range(len(positions)), strict=True))
            kept = [(place, wanted[position]) for place, position in enumerate(self._positions) if position in wanted]
            if len(kept) < len(positions):
                return False
            columns = tuple([column[place] for place, _ in kept] for column in columns)  # type: ignore[assignment]
            moved = dict(kept)
            elements = [(moved[place], index, value) for place, index, value in elements if place in moved]
        identities, places, versions = columns
        if [*map(id, gradients)] != identities:
            return False
        same: Sequence[torch.Tensor] = gradients  # type: ignore[assignment]  # by their identities, those of the sample
        if [*map(torch.Tensor.data_ptr, same)] != places or [*map(version_of, same)] != versions:
            return False
        return all(_element(same[place], index) == value for place, index, value in elements if not math.isnan(value))


def _columns(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int], list[int]] | None:
    """Identities, memory and versions, without a line of Python for each; `None` where not all are plain tensors on the host."""
    if {*map(type, tensors)} - {torch.Tensor, torch.nn.Parameter}:
        return None
    if {*map(_kind_of, tensors)} - COMPARED or not all(map(_is_on_host, tensors)):
        return None
    return [*map(id, tensors)], [*map(torch.Tensor.data_ptr, tensors)], [*map(version_of, tensors)]


COMPARED = {(torch.strided, dtype) for dtype in (torch.float16, torch.float32, torch.float64)}
"""Gradients of which NumPy can read an element."""

_kind_of: Callable[[torch.Tensor], tuple[torch.layout, torch.dtype]] = operator.attrgetter("layout", "dtype")
_is_on_host: Callable[[torch.Tensor], bool] = operator.attrgetter("is_cpu")


def _element(gradient: torch.Tensor, index: int) -> float:
    return float(gradient.detach().numpy().reshape(-1)[index])


def _values_of(versions: GradientVersions) -> list[int]:
    """How often the parameters were written to, -1 for one that is gone."""
    return [-1 if p is None else _version_of(p) for p in parameters_of(versions.tracked)]


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
        found = (self._present(model) for model in models)
        after = GradientVersions.of([probe for probes in found for probe in itertools.islice(probes, 1)])
        self._last = after, _values_of(after)

    @property
    def _after_backward(self) -> GradientVersions:
        return self._last[0]

    def _present(self, model: int) -> Iterator[TrackedParameter]:
        """The probes of a model that are trained and have a gradient."""
        for probe in self._probes.get(model, ()):
            parameter = probe.parameter()
            if parameter is not None and parameter.requires_grad and parameter.grad is not None:
                yield probe

    def gone(self) -> bool:
        """Whether a gradient of the last backward is gone."""
        return any(p is not None and p.grad is None for p in parameters_of(self._after_backward.tracked))

    def cleared(self) -> bool:
        """Whether gradients of the last backward may have been thrown away."""
        return self.gone() or self.zeroed() is not False

    def zeroed(self) -> bool | None:
        """Whether gradients of the last backward were set to zero, or replaced by zeros; `None` if they may have been.

        On a device nothing is read, so all that was written to may be zero.
        """
        after = self._after_backward
        moved = [after.tracked[position] for position in after.moved()]
        seen = [_is_zero(gradient) for one in moved for gradient in self._gradients_beside(one)]
        if False in seen or not seen:
            return False
        return None if None in seen else True

    def _gradients_beside(self, one: TrackedParameter) -> Iterator[torch.Tensor]:
        """The gradients of a probe and of the others of its model: one alone may be zero by itself."""
        for probe in (one, *self._present(one.model)):
            gradient = probe.gradient()
            if gradient is not None:
                yield gradient

    def updated(self) -> bool:
        """Whether parameters were written to since the last backward."""
        after, values = self._last
        return any(now not in (-1, before) for now, before in zip(_values_of(after), values, strict=True))

    def untouched(self) -> bool:
        """Whether the gradients are those of the last backward, as far as the probes show."""
        return bool(self._after_backward.tracked) and self._after_backward.unchanged()

    def written_between_steps(self, table: ParameterTable) -> bool:
        """Whether gradients were written since this was last asked, at a step; the first answer is that they were."""
        before, self._between_steps = self._between_steps, GradientVersions.of(table.tracked[:PROBES])
        return before is None or bool(before.moved()) or None in parameters_of(before.tracked)
