"""Folding: which layers share a row where a model has more of them than may be shown.

First by the depth of modules: `blocks.0.mlp.up` and `blocks.0.mlp.down` become `blocks.0.mlp`, then `blocks.0`. Where that
leaves less than `ENOUGH` of the rows that there may be, as it does where a module has thousands of children, those children are
shown in ranges of their numbers: `blocks.0-9`. The labels follow from the names alone.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

ENOUGH = 0.25
"""The share of the rows allowed that folding by depth must leave, so that no ranges are made."""

WHOLE = "model"
"""The label of layers that share nothing but the model."""

_NUMBER = re.compile(r"([0-9]{1,18})")


def fold(names: Sequence[str], most: int) -> list[str]:
    """Return the label of each layer name, at most `most` different ones: the name itself, or that of a group."""
    if len(set(names)) <= most:
        return list(names)
    depth, labels = _by_depth(names, most)
    if len(set(labels)) >= ENOUGH * most:
        return labels
    return max(labels, _by_ranges(names, depth, most), key=lambda candidate: len(set(candidate)))


def _by_depth(names: Sequence[str], most: int) -> tuple[int, list[str]]:
    """Return the first parts of each name, at the largest depth with at most `most` labels, and that depth, 0 for none."""
    parts = [name.split(".") for name in names]
    for depth in range(max(map(len, parts)) - 1, 0, -1):
        labels = [".".join(part[:depth]) for part in parts]
        if len(set(labels)) <= most:
            return depth, labels
    return 0, [WHOLE] * len(names)


def _by_ranges(names: Sequence[str], depth: int, most: int) -> list[str]:
    """Labels with ranges of numbers below `depth`; none if none are few enough.

    Tried are all depths down to which names may be shown, each with as many rows for the children of one module as fit.
    """
    tree = _tree(names)
    best: tuple[int, _Shape] | None = None
    for deepest in range(max(name.count(".") for name in names) + 1, depth, -1):
        fitting, too_many = 0, most + 1
        while too_many - fitting > 1:
            width = (fitting + too_many) // 2
            if tree.rows(_Shape(depth, deepest, width), most) <= most:
                fitting = width
            else:
                too_many = width
        shape = _Shape(depth, deepest, fitting)
        if fitting and (best is None or tree.rows(shape, most) > best[0]):
            best = tree.rows(shape, most), shape
    return [] if best is None else [tree.row_of(name.split("."), best[1]) for name in names]


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a tree is shown: children of modules at `depth` or below in at most `width` rows each kind, none below `deepest`."""

    depth: int
    deepest: int
    width: int


class _Module:
    """A module, by the parts of its name, with those below it that own parameters."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.is_layer = False
        self.children: dict[str, _Module] = {}
        self._shown: dict[int, dict[str, str]] = {}
        self._in_ranges: dict[tuple[int, ...], dict[str, str]] = {}
        """By the sizes of its families' ranges, which are the same for many widths."""

    @functools.cached_property
    def _families(self) -> list[tuple[str, str, dict[str, int]]]:
        """The children whose names differ in one number, with what is around it: of several numbers the one that varies most."""
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
        module = f"{self.label}." if self.label else ""
        return [(module + before, after, numbers) for (before, after), numbers in members.items() if len(numbers) > 1]

    @functools.cached_property
    def _loners(self) -> dict[str, str]:
        """The children in no family, with the label of the row that they share where they are too many."""
        kin = {part for _, _, members in self._families for part in members}
        return {part: self.label or WHOLE for part in self.children if part not in kin}

    def shown(self, width: int) -> dict[str, str]:
        """By child that is shown with others in one row, with all that is below it, the label of that row."""
        if width not in self._shown:
            sizes = tuple(_size(members.values(), width) for _, _, members in self._families)
            if sizes not in self._in_ranges:
                self._in_ranges[sizes] = self._ranges(sizes)
            labels = self._in_ranges[sizes]
            self._shown[width] = labels | self._loners if len(self._loners) > width else labels
        return self._shown[width]

    def _ranges(self, sizes: Sequence[int]) -> dict[str, str]:
        """Return the labels of the children in families, in ranges of these sizes."""
        labels: dict[str, str] = {}
        for size, (before, after, members) in zip(sizes, self._families, strict=True):
            if size > 1:
                # The bounds of a range do not depend on its members: freezing one renames nothing.
                firsts = {number // size * size for number in members.values()}
                label = {first: f"{before}{first}-{first + size - 1}{after}" for first in firsts}
                labels |= {part: label[number // size * size] for part, number in members.items()}
        return labels

    def rows(self, shape: _Shape, most: int) -> int:
        """Return how many labels there are; stops counting above `most`."""
        labels: set[str] = set()
        for label in self._labels(shape, 0):
            labels.add(label)
            if len(labels) > most:
                break
        return len(labels)

    def _labels(self, shape: _Shape, level: int) -> Iterator[str]:
        if self.is_layer or level == shape.deepest:
            yield self.label
        if level < shape.deepest:
            shown = self.shown(shape.width) if level >= shape.depth else {}
            yield from set(shown.values())
            for part, child in self.children.items():
                if part not in shown:
                    yield from child._labels(shape, level + 1)

    def row_of(self, parts: Sequence[str], shape: _Shape) -> str:
        """Return the label of the layer with a name of these parts."""
        node = self
        for level, part in enumerate(parts[: shape.deepest]):
            label = node.shown(shape.width).get(part) if level >= shape.depth else None
            if label is not None:
                return label
            node = node.children[part]
        return node.label


def _tree(names: Sequence[str]) -> _Module:
    """Return the modules with these names, below one root."""
    root = _Module("")
    for name in names:
        node = root
        for part in name.split("."):
            if part not in node.children:
                node.children[part] = _Module(f"{node.label}.{part}" if node.label else part)
            node = node.children[part]
        node.is_layer = True
    return root


def _size(numbers: Collection[int], width: int) -> int:
    """Return the smallest size of ranges, of 1, 2, 5, 10, 20 and so on, of which there are at most `width`; 1 is no range."""
    if len(numbers) <= width:
        return 1
    distinct = {*numbers}
    sizes = (step * int(10**power) for power in itertools.count() for step in (1, 2, 5))
    # A range holds as many numbers as its size at most: where too few would fit, they need not be counted.
    return next(size for size in sizes if size * width >= len(distinct) and len({n // size for n in distinct}) <= width)
