"""Folding: which layers share a row where a model has more of them than may be shown.

First by the depth of modules: `blocks.0.mlp.up` and `blocks.0.mlp.down` become `blocks.0.mlp`, then `blocks.0`. Where that
leaves less than `ENOUGH` of the rows that there may be, as it does where a module has thousands of children, those children are
shown in ranges of their numbers: `blocks.0-9`. The labels follow from the names alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_grad_exporter.model.name_tree import WHOLE, NameTree, Shape

ENOUGH = 0.25
"""The share of the rows allowed that folding by depth must leave, so that no ranges are made."""


def fold(names: Sequence[str], most: int) -> list[str]:
    """The label of each layer name, at most `most` different ones: the name itself, or that of a group."""
    if len(set(names)) <= most:
        return list(names)
    depth, labels = _by_depth(names, most)
    if len(set(labels)) >= ENOUGH * most:
        return labels
    in_ranges = _by_ranges(names, depth, most)
    finer = in_ranges is not None and len(set(in_ranges)) > len(set(labels))
    return in_ranges if in_ranges is not None and finer else labels


def _by_depth(names: Sequence[str], most: int) -> tuple[int, list[str]]:
    """The first parts of each name, at the largest depth at which at most `most` labels remain; that depth, 0 if there is none."""
    parts = [name.split(".") for name in names]
    for depth in range(max(map(len, parts)) - 1, 0, -1):
        labels = [".".join(part[:depth]) for part in parts]
        if len(set(labels)) <= most:
            return depth, labels
    return 0, [WHOLE] * len(names)


def _by_ranges(names: Sequence[str], depth: int, most: int) -> list[str] | None:
    """Labels with ranges of numbers below `depth`; `None` if none are few enough.

    Tried are all depths down to which names may be shown, each with as many rows for the children of one module as fit.
    """
    tree = NameTree.of(names)
    best: tuple[int, Shape] | None = None
    for deepest in range(max(name.count(".") for name in names) + 1, depth, -1):
        widest = _widest(tree, depth, deepest, most)
        if widest is None:
            continue
        rows = tree.rows(widest, most)
        if best is None or rows > best[0]:
            best = rows, widest
    return None if best is None else [tree.row_of(name.split("."), best[1]) for name in names]


def _widest(tree: NameTree, depth: int, deepest: int, most: int) -> Shape | None:
    """The shape with the most rows to the children of a module that has at most `most` rows in all."""
    fitting, too_many = 0, most + 1
    while too_many - fitting > 1:
        width = (fitting + too_many) // 2
        if tree.rows(Shape(depth, deepest, width), most) <= most:
            fitting = width
        else:
            too_many = width
    return Shape(depth, deepest, fitting) if fitting else None
