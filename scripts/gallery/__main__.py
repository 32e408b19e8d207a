"""`python -m scripts.gallery [FOLDER]`: draws the dashboards of nine kinds of runs into docs/dashboards/."""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dashboards.generate.reading import dashboards
from scripts.gallery.asking import ask, now, values
from scripts.gallery.page import draw, repeated
from tests.support.nine_runs import Scene, running

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100.0
"""How long the runs go on after things have gone wrong: what a picture shows before and after."""
SCRAPE = 2
"""Seconds from one scrape to the next."""
LARGEST = 250_000
"""Bytes of a picture, at most."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A dashboard and what is chosen on it. `high`: pixels, where not all of it is drawn."""

    dashboard: str
    chosen: Mapping[str, str] = field(default_factory=dict)
    high: int | None = None


PICTURES = {
    "first-screen": Picture("training", {"run": "explodes"}, high=900),
    "training": Picture("training"),
    "layers": Picture("layers", {"run": "dead-layer|deep|explodes|nan"}),
    "resources": Picture("resources", {"run": "gpu|healthy|two-ranks"}),
    "ranks": Picture("ranks", {"run": "four-ranks|healthy|two-ranks"}),
    "rl": Picture("rl", {"run": "gpu"}, high=900),
    "exporter": Picture("exporter", {"run": "deep|four-ranks|gpu|healthy|killed"}),
}


def pictures(scene: Scene, folder: Path) -> None:
    """Draws all of them, at the same moment."""
    span = now(scene.seconds(), scene.scrape)
    boards: dict[str, Any] = dashboards()
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        asked = functools.partial(_asked, scene, span, picture.chosen)
        board = boards[f"{picture.dashboard}.json"]
        variables = (variable for variable in board["templating"]["list"] if variable["type"] == "query")
        offered = {variable["name"]: values(scene.prometheus, variable, span, picture.chosen) for variable in variables}
        canvas = draw(repeated(board, offered), asked, span, picture.chosen, picture.high)
        for colors in (256, 192, 128, 64):
            if (size := canvas.save(folder / f"{name}.png", colors)) <= LARGEST:
                break
        print(f"{name}.png: {canvas.wide} x {canvas.high}, {size / 1000:.0f} kB, {colors} colours")


def _asked(scene: Scene, span: Any, chosen: Mapping[str, str], panel: Any, points: int) -> Any:  # noqa: ANN401 - handed on
    return ask(scene.prometheus, panel, span, chosen, points)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gallery", description="Draw the dashboards.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "dashboards")
    folder = parser.parse_args().folder
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory, running(Path(directory), SCRAPE) as scene:
        time.sleep(SECONDS)
        pictures(scene, folder)


if __name__ == "__main__":
    main()
