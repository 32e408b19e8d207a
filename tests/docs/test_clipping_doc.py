"""Each example of "Acting on gradients" runs unchanged and does what the page says."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_grad_exporter
from tests.docs.test_actions_doc import NORM, SAMPLE
from tests.docs.test_site import slug
from tests.support.acting import World
from tests.support.notified import receiver
from tests.support.pages import blocks
from tests.support.scrape import errors, values
from tests.support.tools import PATIENCE, REPOSITORY, eventually
from torch_grad_exporter import Exporter

PAGE = REPOSITORY / "docs" / "clipping.md"
EXAMPLES = blocks(PAGE, "python")
CLIPS = [text for text in EXAMPLES if "clip=" in text or "Clipper(" in text]

OTHERS = {
    "stop-on-a-broken-loss",
    "stop-when-norms-stay-high",
    "a-smaller-learning-rate",
    "some-layers-only",
    "a-line-in-the-log",
    "a-message-to-a-webhook",
}
"""The sections whose examples do not clip; each has a test below."""


class Net(torch.nn.Module):
    """A model that has the layers which the page names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x).relu())


def example(anchor: str) -> str:
    """Return the example of a section that is not about clipping."""
    parts = re.split(r"^(?=##+ )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (section,) = (part for part in parts if slug(part.partition("\n")[0].lstrip("# ")) == anchor)
    (text,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return str(text)


def run(text: str, **names: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever an example names
    """Run an example and return its names."""
    exec(text, names)  # noqa: S102 - what a user copies
    return names


def training(path: Path) -> dict[str, Any]:
    """Return what the examples take for granted: a model, an optimizer and data."""
    torch.manual_seed(0)
    model, generator, discriminator = Net(), Net(), Net()
    return {
        "torch": torch, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "epochs": 2,
        "batches": [(torch.randn(5, 6), torch.randn(5, 3)) for _ in range(3)], "loss_function": torch.nn.MSELoss(), "path": path,
        "generator": generator, "g_optimizer": torch.optim.SGD(generator.parameters(), lr=0.1),
        "discriminator": discriminator, "d_optimizer": torch.optim.SGD(discriminator.parameters(), lr=0.1),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No port, each step sampled, and no hardware."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_EVERY", "1")
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_COLLECTORS", "process=off,host=off,container=off,gpu=off,cuda_memory=off")


# The page as a whole


def test_every_example_is_run() -> None:
    """Each example is run by a test below."""
    assert {*EXAMPLES} == {*CLIPS} | {example(anchor) for anchor in (*OTHERS, "layers-that-learn-nothing")}


# What clips


@pytest.mark.slow
@pytest.mark.parametrize("text", CLIPS, ids=range(len(CLIPS)))
def test_an_example_clips(text: str, tmp_path: Path) -> None:
    """An example of clipping runs; after three steps the weights are finite and have moved, without an error."""
    names = run(text, **training(tmp_path / "state"))
    clipper, exporter, optimizer = names.get("clipper"), names.get("exporter"), names["optimizer"]
    trained = [(names["generator"], names["g_optimizer"])] if "networks" in names else [(names["model"], optimizer)]
    trained += [(names["discriminator"], names["d_optimizer"])] if "networks" in names else []
    before = [[parameter.clone() for parameter in model.parameters()] for model, _ in trained]
    for inputs, targets in names["batches"]:
        for model, one in trained:
            one.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            assert clipper is None or float(clipper()) > 0
            one.step()
    for (model, _), old in zip(trained, before, strict=True):
        assert all(bool(p.isfinite().all()) and not torch.equal(p, o) for p, o in zip(model.parameters(), old, strict=True))
    assert (clipper is None) is isinstance(exporter, Exporter)
    if isinstance(exporter, Exporter):
        exporter.close()
        assert errors(exporter) == {}
        layers = [dict(labels)["layer"] for name, labels in values(exporter) if name == "torch_grad_layer_clip_coefficient"]
        assert len(layers) == 2 * len(trained)


def test_a_saved_run_goes_on(tmp_path: Path) -> None:
    """The second run of the example of saving starts with the norms of the first."""
    (text,) = (one for one in CLIPS if "load_state_dict" in one)
    for norms in (3, 6):
        names = run(text, **training(tmp_path / "state"))
        assert int(names["exporter"].state_dict()["clip"]["SGD"]["memory"]["count"]) == norms
        names["exporter"].close()


def test_the_balance_of_two_networks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A discriminator whose norm stays far below that of the generator is reported, and no other."""
    (text,) = (one for one in CLIPS if "networks" in one)
    for low in (0.5, 0.001):
        world = World()
        monkeypatch.setattr(torch_grad_exporter, "start_exporter", lambda *_, world=world, **__: world)
        run(text, **training(tmp_path))
        for at in range(20):
            world.evaluate(float(at), **{NORM: {("generator",): 1.0, ("discriminator",): low}, SAMPLE: {("g",): at, ("d",): at}})
        world.act.close()
        assert ("the discriminator learns nothing any more" in capsys.readouterr().out) is (low < 0.01)


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    """The README's example of clipping trains and tries two other policies without an error."""
    (text,) = (one for one in blocks(REPOSITORY / "README.md", "python") if "clip=" in one)
    trained = list[Exporter]()

    def train(model: torch.nn.Module, exporter: Exporter) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(5, 6)).square().mean().backward()
        optimizer.step()
        trained.append(exporter)

    run(text, **training(tmp_path) | {"train": train})
    (exporter,) = trained
    assert errors(exporter) == {}
    tried = {dict(labels)["policy"] for name, labels in values(exporter) if name == "torch_grad_clip_candidates_total"}
    assert tried == {"MaxNorm(1.0)", "AutoClip(percentile=90)"}
    assert not exporter.should_stop


# What acts


def watched(model: torch.nn.Module) -> Exporter:
    """Start an exporter for an example that is given one."""
    return torch_grad_exporter.start_exporter(model)


@pytest.mark.slow
def test_a_broken_loss_stops_the_run() -> None:
    """The loop of the page ends some time after the loss is NaN, and not before."""
    names, drawn, until = training(Path()), list[int](), time.monotonic() + PATIENCE
    with watched(names["model"]) as exporter:

        def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for number in itertools.count():
                assert time.monotonic() < until
                drawn.append(number)
                yield torch.ones(5, 6), torch.full((5, 3), float("nan") if number >= 10 else 1.0)

        run(example("stop-on-a-broken-loss"), **names | {"batches": batches(), "exporter": exporter})
        assert exporter.should_stop
    assert drawn[-1] > 10


@pytest.mark.parametrize("norm", [400.0, 600.0])
def test_high_norms_stop_the_run(norm: float) -> None:
    """A mean of ten samples above 500 stops the run, one below does not."""
    world = World()
    run(example("stop-when-norms-stay-high"), exporter=world)
    for at in range(12):
        world.evaluate(float(at), **{NORM: norm, SAMPLE: float(at)})
        world.step_over()
    assert world.stopped is (norm > 500)
    world.act.close()


@pytest.mark.parametrize("norm", [2.0, 20.0])
def test_restless_norms_halve_the_learning_rate(norm: float) -> None:
    """Ten norms 20 times the usual one halve the learning rate once, twice the usual one do not."""
    world = World()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    world.optimizers = [optimizer]
    run(example("a-smaller-learning-rate"), exporter=world)
    for at in range(530):
        world.evaluate(float(at), **{NORM: norm if at > 510 else 1.0, SAMPLE: float(at)})
        world.step_over()
    assert optimizer.param_groups[0]["lr"] == (0.05 if norm > 5 else 0.1)
    world.act.close()


@pytest.mark.slow
def test_the_stem_is_frozen_at_a_low_loss() -> None:
    """At a loss above 0.5 all layers are trained; below it the stem is frozen, and the head is trained on."""
    names = training(Path())
    model, optimizer = names["model"], names["optimizer"]
    with watched(model) as exporter:
        run(example("some-layers-only"), exporter=exporter)

        def frozen(loss: float) -> bool:
            exporter.observe(loss=loss)
            optimizer.zero_grad()
            model(torch.ones(5, 6)).square().mean().backward()
            optimizer.step()
            return not model.stem.weight.requires_grad

        assert not any(frozen(0.9) for _ in range(50))
        assert eventually(lambda: frozen(0.1))
        assert model.head.weight.requires_grad


# Notifications


@pytest.mark.slow
def test_a_line_and_a_message(caplog: pytest.LogCaptureFixture) -> None:
    """A NaN loss is in the log and at the webhook, with its severity."""
    with receiver() as there:
        for anchor in ("a-line-in-the-log", "a-message-to-a-webhook"):
            names = training(Path())
            text = re.sub(r'"https?://[^"]+"', repr(there.url), example(anchor))
            with run(text, **names)["exporter"] as exporter:
                for _ in range(3):
                    names["optimizer"].zero_grad()
                    names["model"](torch.ones(5, 6)).sum().backward()
                    names["optimizer"].step()
                    exporter.observe(loss=float("nan"))
                if anchor == "a-line-in-the-log":
                    assert eventually(lambda: "TrainingNonFiniteLoss (critical)" in caplog.text)
                else:
                    assert there.got(1)
        told = {(one.json["alert"], one.json["severity"]) for one in there.asked if one.json["status"] == "firing"}
        assert ("TrainingNonFiniteLoss", "critical") in told
