"""Each example of docs/clipping.md clips, and does what the page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pages import blocks
from tests.support.scrape import errors, values
from tests.support.tools import REPOSITORY
from torch_grad_exporter import Exporter

TRAINING, *EXAMPLES = blocks(REPOSITORY / "docs" / "clipping.md", "python")
CLIPS = [text for text in EXAMPLES if "clip=" in text or "Clipper(" in text]


def run(text: str, **names: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever an example names
    """Run an example after the training that the page begins with, and return its names."""
    torch.manual_seed(0)
    exec(TRAINING, names)  # noqa: S102 - what a user copies
    exec(text, names)  # noqa: S102 - likewise
    return names


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No port, each step sampled, no hardware, and a folder for what is saved."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_EVERY", "1")
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_COLLECTORS", "process=off,host=off,container=off,gpu=off,cuda_memory=off")
    monkeypatch.chdir(tmp_path)


def check_training(names: dict[str, Any], *trained: tuple[torch.nn.Module, torch.optim.Optimizer]) -> None:
    """Train three steps: the weights are finite and have moved, each has two layers that are clipped, and there is no error."""
    clipper, exporter = names.get("clipper"), names.get("exporter")
    before = [[parameter.clone() for parameter in model.parameters()] for model, _ in trained]
    for inputs, _ in names["batches"][:3]:
        for model, optimizer in trained:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            assert clipper is None or float(clipper()) > 0
            optimizer.step()
    for (model, _), old in zip(trained, before, strict=True):
        assert all(bool(p.isfinite().all()) and not torch.equal(p, o) for p, o in zip(model.parameters(), old, strict=True))
    assert (clipper is None) is isinstance(exporter, Exporter)
    if isinstance(exporter, Exporter):
        exporter.close()
        assert errors(exporter) == {}
        assert [name for name, _ in values(exporter)].count("torch_grad_layer_clip_coefficient") == 2 * len(trained)


@pytest.mark.slow
@pytest.mark.parametrize("text", CLIPS, ids=range(len(CLIPS)))
def test_an_example_clips(text: str) -> None:
    """An example of clipping runs, and the training goes on with it."""
    names = run(text)
    if "networks" in names:
        check_training(names, (names["generator"], names["g_optimizer"]), (names["discriminator"], names["d_optimizer"]))
    else:
        check_training(names, (names["model"], names["optimizer"]))


def test_a_saved_run_goes_on() -> None:
    """The second run of the example of saving starts with the norms of the first."""
    (text,) = (one for one in CLIPS if "load_state_dict" in one)
    for norms in (20, 40):
        names = run(text)
        assert int(names["exporter"].state_dict()["clip"]["AdamW"]["memory"]["count"]) == norms
        names["exporter"].close()


def test_the_example_of_the_readme() -> None:
    """The README's example of clipping trains and tries two other policies without an error."""
    (text,) = (one for one in blocks(REPOSITORY / "README.md", "python") if "clip=" in one)
    trained = list[Exporter]()

    def train(model: torch.nn.Module, exporter: Exporter) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(5, 6)).square().mean().backward()
        optimizer.step()
        trained.append(exporter)

    run(text, train=train)
    (exporter,) = trained
    assert errors(exporter) == {}
    tried = {dict(labels)["policy"] for name, labels in values(exporter) if name == "torch_grad_clip_candidates_total"}
    assert tried == {"MaxNorm(1.0)", "AutoClip(percentile=90)"}
    assert not exporter.should_stop
