"""Panels of now: numbers on coloured ground, bars side by side, and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.gallery.asking import Json, Series
from scripts.gallery.canvas import FAINT, INK, LINE, Box, Canvas, fitted, width
from scripts.gallery.fields import COLORS, Shown, color, config, nothing, shown
from scripts.gallery.tables import Row, Table, table, widths

LINE_HIGH = 32
GAUGE = "#e9ecef"


def numbers(canvas: Canvas, at: Box, panel: Json, answers: Sequence[Series]) -> None:
    """A tile for each series, side by side or, where they are many, in a grid."""
    columns = min(len(answers), max(1, int(at.w // 72))) if len(answers) > 3 else len(answers)
    columns = min(columns, 2) if len(answers) > 8 else columns
    rows = math.ceil(len(answers) / columns)
    wide, high = at.w / columns, at.h / rows
    for place, series in enumerate(answers):
        box = Box(at.x + wide * (place % columns), at.y + high * (place // columns), wide, high).inset(2, 2, 2, 2)
        own = config(panel, series.ref, series.name)
        cell = shown(series.last, own)
        fixed = own.get("color", {})
        if fixed.get("mode") == "fixed":
            cell = Shown(cell.text, color(fixed["fixedColor"]))
        colored = panel["options"]["colorMode"] != "none" and cell.color and not cell.color.endswith("00")
        if colored and cell.color:
            canvas.box(box, cell.color)
        _number(canvas, box, own.get("displayName", series.name), cell.text, "#ffffff" if colored else INK)


def _number(canvas: Canvas, at: Box, name: str, text: str, ink: str) -> None:
    middle = at.x + at.w / 2
    if at.h < 30:  # no room for two lines
        size = _size(f"{name}: {text}", at.w - 4, 7.5, 5.0)
        canvas.text(middle, at.y + at.h / 2, fitted(f"{name}: {text}", at.w - 4, size), size=size, ink=ink, ha="center")
        return
    large = _size(text, at.w - 8, 17.0 if at.h > 60 else 12.0, 7.0)
    small = _size(name, at.w - 4, 7.5, 5.5)
    canvas.text(middle, at.y + at.h * 0.62, fitted(text, at.w - 4, large), size=large, ink=ink, ha="center", weight="bold")
    canvas.text(middle, at.y + at.h * 0.2, fitted(name, at.w - 4, small), size=small, ink=ink, ha="center")


def _size(text: str, room: float, largest: float, least: float) -> float:
    """The largest size at which a text fits."""
    size = largest
    while width(text, size, "bold") > room and size > least:
        size -= 0.5
    return size


def bars(canvas: Canvas, at: Box, panel: Json, answers: Sequence[Series]) -> None:
    """A bar for each series between the panel's least and greatest value, in the colour of its threshold."""
    high = min(34.0, at.h / max(1, len(answers)))
    left = min(at.w * 0.45, max(width(series.name, 7.5) for series in answers) + 12)
    for place, series in enumerate(answers):
        own = config(panel, series.ref, series.name)
        cell, y = shown(series.last, own), at.y + high * place
        room = Box(at.x + left, y + 5, at.w - left - 62, high - 10)
        canvas.text(at.x + left - 8, y + high / 2, fitted(series.name, left - 8, 7.5), size=7.5, ha="right")
        canvas.box(room, GAUGE)
        canvas.box(Box(room.x, room.y, max(1.5, room.w * share(series.last, own)), room.h), cell.color or COLORS["blue"])
        canvas.text(at.x + at.w - 4, y + high / 2, cell.text, size=8.5, ha="right", ink=cell.color or INK, weight="bold")


def share(value: float, own: Mapping[str, Any]) -> float:
    """How much of a bar from `min` to `max` is filled."""
    low, high = own.get("min", 0.0), own.get("max", 100.0)
    return 0.0 if math.isnan(value) else min(1.0, max(0.0, (value - low) / (high - low)))


def rows(canvas: Canvas, at: Box, panel: Json, answers: Sequence[Series]) -> None:
    """A table, as many of its rows as there is room for."""
    content = table(panel, answers)
    configs = {title: config(panel, content.refs.get(title, ""), title) for title in content.titles}
    given = [configs[title].get("custom.width") for title in content.titles]
    wide = dict(zip(content.titles, widths(given, at.w), strict=True))
    x = at.x
    for title in content.titles:
        room = min(wide[title], at.x + at.w - x)
        if room > 20:
            _column(canvas, Box(x, at.y, room, at.h), title, content, configs[title])
        x += wide[title]
    fits = int((at.h - LINE_HIGH) // LINE_HIGH)
    for place in range(1, 1 + min(fits, len(content.rows))):
        canvas.box(Box(at.x, round(at.y + LINE_HIGH * place), at.w, 1), LINE)
    if len(content.rows) > fits:
        canvas.text(
            at.x + at.w - 4,
            at.y - 14,
            f"{fits} of {len(content.rows)} rows; the others by scrolling",
            size=7,
            ink=FAINT,
            ha="right",
        )


def _column(canvas: Canvas, at: Box, title: str, content: Table, own: Mapping[str, Any]) -> None:
    number = any(isinstance(row.get(title), float) for row in content.rows)
    gauge = own.get("custom.cellOptions", {}).get("type") == "gauge"
    right = number and not gauge and not own.get("mappings")
    x = at.x + (at.w - 8 if right else 8)
    canvas.text(
        x, at.y + LINE_HIGH / 2, fitted(title, at.w - 12, 7.5, "bold"), size=7.5, ha="right" if right else "left", weight="bold"
    )
    for place, row in enumerate(content.rows[: int((at.h - LINE_HIGH) // LINE_HIGH)], start=1):
        cell = Box(at.x, at.y + LINE_HIGH * place, at.w, LINE_HIGH)
        if gauge and title in row:
            _gauge(canvas, cell, float(row[title]), own)
        else:
            text, ink = _cell(row, title, own)
            canvas.text(x, cell.y + cell.h / 2, fitted(text, at.w - 12, 8), size=8, ink=ink, ha="right" if right else "left")


def _cell(row: Row, title: str, own: Mapping[str, Any]) -> tuple[str, str]:
    if row.get(title, "") == "":
        return str(own.get("noValue", "")), FAINT
    cell = shown(row[title], own)
    colored = own.get("custom.cellOptions", {}).get("type") == "color-text"
    return cell.text, (cell.color or INK) if colored else COLORS["blue"] if own.get("links") else INK


def _gauge(canvas: Canvas, at: Box, value: float, own: Mapping[str, Any]) -> None:
    cell, room = shown(value, own), at.inset(8, 9, 52, 9)
    canvas.box(room, GAUGE)
    canvas.box(Box(room.x, room.y, max(1.0, room.w * share(value, own)), room.h), cell.color or COLORS["blue"])
    canvas.text(at.x + at.w - 4, at.y + at.h / 2, fitted(cell.text, 46, 7.5), size=7.5, ha="right")


def empty(canvas: Canvas, at: Box, panel: Json, lines: str) -> None:
    """The sentence of a panel that has nothing to show."""
    canvas.text(at.x + at.w / 2, at.y + at.h / 2, lines or nothing(panel), size=9, ink=FAINT, ha="center")
