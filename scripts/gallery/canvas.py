"""A picture in pixels, from the top left corner: text that fits, boxes, and axes for charts."""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import text_to_path
from PIL import Image

DPI = 100
INK, FAINT, LINE, GROUND, PAPER = "#24292e", "#6a737d", "#e1e4e8", "#f4f5f5", "#ffffff"


@functools.cache
def width(text: str, size: float, weight: str = "normal") -> float:
    """How many pixels wide a text is."""
    measured: float = text_to_path.get_text_width_height_descent(text, FontProperties(size=size, weight=weight), ismath=False)[0]
    return measured * DPI / 72


def fitted(text: str, room: float, size: float, weight: str = "normal") -> str:
    """The text, cut off with an ellipsis where it is wider than the room."""
    if width(text, size, weight) <= room:
        return text
    while text and width(f"{text}…", size, weight) > room:
        text = text[:-1]
    return f"{text.rstrip()}…"


def wrapped(text: str, room: float, size: float) -> str:
    """The text in lines that fit."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if width(longer, size) <= room or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Box:
    """A place in the picture."""

    x: float
    y: float
    w: float
    h: float

    def inset(self, left: float = 0, top: float = 0, right: float = 0, bottom: float = 0) -> Box:
        """What is left within these margins."""
        return Box(self.x + left, self.y + top, max(1.0, self.w - left - right), max(1.0, self.h - top - bottom))


class Canvas:
    """The picture."""

    def __init__(self, wide: int, high: int) -> None:
        self.wide, self.high = wide, high
        self.figure = Figure(figsize=(wide / DPI, high / DPI), dpi=DPI, facecolor=GROUND)
        self._agg = FigureCanvasAgg(self.figure)

    def text(
        self, x: float, y: float, text: str, *, size: float = 8, ink: str = INK, ha: str = "left", weight: str = "normal"
    ) -> None:
        """Writes a text whose middle is at this height."""
        self.figure.text(
            x / self.wide, 1 - y / self.high, text.replace("$", r"\$"), size=size, color=ink, ha=ha, va="center", weight=weight
        )

    def box(self, at: Box, fill: str, edge: str = "none") -> None:
        """Fills a rectangle."""
        corner = (at.x / self.wide, 1 - (at.y + at.h) / self.high)
        size = (at.w / self.wide, at.h / self.high)
        patch = Rectangle(corner, *size, transform=self.figure.transFigure, facecolor=fill, edgecolor=edge, linewidth=0.7)
        self.figure.add_artist(patch)

    def axes(self, at: Box) -> Axes:
        """Axes that fill a place; their labels stand outside of it."""
        axes = self.figure.add_axes(
            (at.x / self.wide, 1 - (at.y + at.h) / self.high, at.w / self.wide, at.h / self.high), facecolor="none"
        )
        axes.set_zorder(2)  # above boxes, below text
        axes.tick_params(length=0, labelsize=7, labelcolor=FAINT, pad=3)
        for side in axes.spines.values():
            side.set_visible(False)
        return axes

    def save(self, path: Path, colors: int = 256) -> int:
        """Writes the picture as a PNG with a palette of so many colours; returns its size in bytes."""
        self._agg.draw()  # type: ignore[no-untyped-call]
        image = Image.frombuffer("RGBA", (self.wide, self.high), bytes(self._agg.buffer_rgba())).convert("RGB")  # type: ignore[no-untyped-call]
        palette = Image.new("P", (1, 1))
        palette.putpalette(_palette(image, colors))
        held = io.BytesIO()
        image.quantize(palette=palette, dither=Image.Dither.NONE).save(held, "PNG", optimize=True)
        path.write_bytes(held.getvalue())
        return len(held.getvalue())


def _palette(image: Image.Image, colors: int) -> list[int]:
    """Half of it the most frequent colours as they are, so that grounds and text stay clean; the rest covers all others."""
    counted = sorted(image.getcolors(image.width * image.height) or [], reverse=True)
    frequent = [part for _, rgb in counted[: colors // 2] if isinstance(rgb, tuple) for part in rgb]
    others = image.quantize(colors - colors // 2, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).getpalette() or []
    return frequent + others[: 3 * (colors - colors // 2)]
