"""The examples of the pages on trainers, run as they stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.pages import blocks
from tests.support.scrape import values
from tests.support.tools import REPOSITORY
from torch_grad_exporter import Exporter


def run(page: str, number: int, section: str = "", **names: object) -> dict[str, Any]:
    """Run one of the blocks of Python of a page, or of a section of it."""
    exec(blocks(REPOSITORY / "docs" / page, "python", section=section)[number], names)  # noqa: S102 - what a user copies
    return names


def steps(scrape: Mapping[Any, float]) -> float:
    """Of all optimizers."""
    return sum(value for one, value in scrape.items() if one[0] == "torch_train_steps_total")


def last_values(monkeypatch: pytest.MonkeyPatch) -> list[dict[Any, float]]:
    """The last values of each exporter that ends from now on; those that start are on no port."""
    kept: list[dict[Any, float]] = []
    end = Exporter.end

    def ends(exporter: Exporter, error: BaseException | None) -> None:
        end(exporter, error)
        kept.append(values(exporter))

    monkeypatch.setattr(Exporter, "end", ends)
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    return kept
