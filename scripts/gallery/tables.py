"""Tables: the answers to several queries joined, columns chosen, named and ordered, rows sorted."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.gallery.asking import Json, Series

Row = Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class Table:
    """Titles of columns, and rows by them. `refs`: the letter of the query that a column's values are from, where it is one's."""

    titles: Sequence[str]
    rows: Sequence[Row]
    refs: Mapping[str, str]


def table(panel: Json, answers: Sequence[Series]) -> Table:
    """As the panel's transformations and its order make it."""
    rows = merged(answers, [target["refId"] for target in panel["targets"]])
    options = {one["id"]: one["options"] for one in panel["transformations"]}
    names: list[str] = options["filterFieldsByName"]["include"]["names"]
    order, titles = options["organize"]["indexByName"], options["organize"]["renameByName"]
    names = sorted(names, key=lambda name: order.get(name, len(order)))
    chosen: list[Row] = [{titles.get(name, name): row[name] for name in names if name in row} for row in rows]
    for by in reversed(panel["options"].get("sortBy") or []):
        chosen = sorted(chosen, key=functools.partial(_by, by["displayName"]), reverse=bool(by["desc"]))
    refs = {titles.get(name, name): name.removeprefix("Value #") for name in names if name.startswith("Value #")}
    return Table([titles.get(name, name) for name in names], chosen, refs)


def merged(answers: Sequence[Series], refs: Sequence[str]) -> list[dict[str, float | str]]:
    """Rows of labels and values. Answers to several queries come into one row where the labels that all queries have agree.

    A value that the row has already, or a label that differs, makes another row.
    """
    if len(refs) == 1:
        return [{**series.labels, "Value": series.values[-1]} for series in answers]
    labels = [{label for series in answers if series.ref == ref for label in series.labels} for ref in refs]
    shared = set.intersection(*(found for found in labels if found)) if any(labels) else set()
    rows: list[dict[str, float | str]] = []
    for series in answers:
        new: dict[str, float | str] = {**series.labels, f"Value #{series.ref}": series.values[-1]}
        fitting = (row for row in rows if all(row.get(key, None if key in shared else new[key]) == new[key] for key in new))
        found = next(fitting, None)
        if found is None:
            rows.append(new)
        else:
            found.update(new)
    return rows


def _by(title: str, row: Row) -> tuple[tuple[float, str], ...]:
    return natural(row.get(title))


def natural(value: float | str | None) -> tuple[tuple[float, str], ...]:
    """A key for sorting: numbers by size, texts by their words and the numbers in them, and what is absent first."""
    if value is None:
        return ()
    if isinstance(value, float):
        return ((-math.inf if math.isnan(value) else value, ""),)
    return tuple((float(part), "") if part.isdigit() else (-1.0, part) for part in re.split(r"(\d+)", value))


def widths(given: Sequence[int | None], total: float, least: float = 150.0) -> list[float]:
    """The width of each column: its own, or an equal share of what is left, but not less than `least`."""
    free = total - sum(width for width in given if width is not None)
    share = max(least, free / max(1, sum(width is None for width in given)))
    return [share if width is None else float(width) for width in given]
