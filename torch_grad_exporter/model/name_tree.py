"""NameTree: the modules of a model by the parts of their names, and how many rows they make in which shape."""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

WHOLE = "model"
"""The label of layers that share nothing but the model."""

_NUMBER = re.compile(r"([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Shape:
    """How a tree is shown: children of modules at `depth` or below in at most `width` rows each kind, none below `deepest`."""

    depth: int
    deepest: int
    width: int


class Family:
    """Children of one module whose names differ in one number; `before` and `after` stand around it."""

    def __init__(self, module: str, before: str, after: str, members: Mapping[str, int]) -> None:
        self._before = f"{module}.{before}" if module else before
        self._after = after
        self.members = members
        self._ranges: dict[int, list[str]] = {}

    def size(self, width: int) -> int:
        """The smallest size of ranges, of 1, 2, 5, 10, 20 and so on, of which there are at most `width`; 1 is no range."""
        if len(self.members) <= width:
            return 1
        sizes = (step * int(10**power) for power in itertools.count() for step in (1, 2, 5))
        return next(size for size in sizes if len(self.ranges(size)) <= width)

    def ranges(self, size: int) -> list[str]:
        """The labels of all ranges of a size."""
        if size not in self._ranges:
            firsts = dict.fromkeys(number // size for number in self.members.values())
            self._ranges[size] = [self._label(first, size) for first in firsts]
        return self._ranges[size]

    def range_of(self, member: str, size: int) -> str:
        """The label of the range in which a member is."""
        return self._label(self.members[member] // size, size)

    def _label(self, place: int, size: int) -> str:
        # The bounds of a range do not depend on its members: freezing one renames nothing.
        return f"{self._before}{place * size}-{(place + 1) * size - 1}{self._after}"


class NameTree:
    """A module, by the parts of its name, with those below it that own parameters."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.is_layer = False
        self.children: dict[str, NameTree] = {}

    @classmethod
    def of(cls, names: Iterable[str]) -> NameTree:
        """The tree of these names."""
        root = cls("")
        for name in names:
            node = root
            for part in name.split("."):
                child = node.children.get(part)
                if child is None:
                    child = node.children[part] = cls(f"{node.label}.{part}" if node.label else part)
                node = child
            node.is_layer = True
        return root

    @functools.cached_property
    def families(self) -> list[Family]:
        """The children whose names differ in one number: where there are several, in the one that varies most."""
        alike: dict[str, list[list[str]]] = defaultdict(list)
        for part in self.children:
            pieces = _NUMBER.split(part)
            if len(pieces) > 1:
                alike["0".join(pieces[::2])].append(pieces)
        members: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        for several in alike.values():
            place = max(range(len(several[0]) - 2, 0, -2), key=lambda place: len({pieces[place] for pieces in several}))
            for pieces in several:
                members["".join(pieces[:place]), "".join(pieces[place + 1 :])]["".join(pieces)] = int(pieces[place])
        return [Family(self.label, *around, found) for around, found in members.items() if len(found) > 1]

    @functools.cached_property
    def family_of(self) -> dict[str, Family]:
        """The family of each child that has one."""
        return {member: family for family in self.families for member in family.members}

    @functools.cached_property
    def loners(self) -> list[str]:
        """The children without a family."""
        return [part for part in self.children if part not in self.family_of]

    def rows(self, shape: Shape, most: int) -> int:
        """How many labels there are; stops counting above `most`."""
        found: set[str] = set()
        for label in self._labels(shape, 0):
            found.add(label)
            if len(found) > most:
                break
        return len(found)

    def _labels(self, shape: Shape, level: int) -> Iterator[str]:
        if self.is_layer or level == shape.deepest:
            yield self.label
        if level == shape.deepest:
            return
        if level < shape.depth:
            for child in self.children.values():
                yield from child._labels(shape, level + 1)
            return
        for family in self.families:
            yield from self._labels_of(family, shape, level)
        if len(self.loners) > shape.width:
            yield self.label or WHOLE
            return
        for part in self.loners:
            yield from self.children[part]._labels(shape, level + 1)

    def _labels_of(self, family: Family, shape: Shape, level: int) -> Iterator[str]:
        size = family.size(shape.width)
        if size > 1:
            yield from family.ranges(size)
            return
        for part in family.members:
            yield from self.children[part]._labels(shape, level + 1)

    def row_of(self, parts: Sequence[str], shape: Shape) -> str:
        """The label of the layer with a name of these parts."""
        node = self
        for level, part in enumerate(parts[: shape.deepest]):
            shown = node._shown(part, shape) if level >= shape.depth else None
            if shown is not None:
                return shown
            node = node.children[part]
        return node.label

    def _shown(self, part: str, shape: Shape) -> str | None:
        """The label of a child with all that is below it, `None` if those have labels of their own."""
        family = self.family_of.get(part)
        if family is None:
            return (self.label or WHOLE) if len(self.loners) > shape.width else None
        size = family.size(shape.width)
        return None if size == 1 else family.range_of(part, size)
