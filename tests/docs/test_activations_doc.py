"""The examples of docs/activations.md run as they stand, and show what the page says."""

from __future__ import annotations

import re

import pytest
import torch

import torch_grad_exporter
from tests.docs.test_commands import blocks
from tests.support.models import Perceptron, sgd
from tests.support.scrape import values
from tests.support.tools import REPOSITORY
from torch_grad_exporter import Exporter
from torch_grad_exporter.collectors.activations import ACTIVATIONS
from torch_grad_exporter.collectors.watched import WATCHED

PAGE = REPOSITORY / "docs" / "activations.md"
EXAMPLES = blocks(PAGE, "python")


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trains, and the metrics that it is about are there."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_EVERY", "1")
    started: list[Exporter] = []
    start = torch_grad_exporter.start_exporter

    def kept(*arguments: object, **options: object) -> Exporter:
        started.append(start(*arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(torch_grad_exporter, "start_exporter", kept)
    model = Perceptron()
    batches = [(torch.randn(5, 6), torch.randn(5, 3)) for _ in range(4)]
    names = {"model": model, "optimizer": sgd(model), "batches": batches, "loss_function": torch.nn.functional.mse_loss}
    exec(EXAMPLES[number], names)  # noqa: S102 - what a user copies
    (exporter,) = started
    there = {name for name, _ in values(exporter)}
    expected = ("torch_activation_rms",) if number == 0 else ("torch_watch_grad_norm",)
    assert there.issuperset(expected)
    assert ("torch_watch_clipped_total" in there) == (number == 2)


def test_the_page_names_metrics_that_there_are() -> None:
    """All that it writes out are declared, and it leaves none of them out."""
    said = set(re.findall(r"torch_(?:activation|watch)_[a-z_]+", PAGE.read_text(encoding="utf-8")))
    declared = {spec.name for section in (ACTIVATIONS, WATCHED) for spec in section.specs}
    assert said <= declared
    assert declared - said <= {"torch_activation_captures_total"}
