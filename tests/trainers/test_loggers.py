"""The examples of docs/frameworks.md: what a logger is given is what the exporter shows, in a real TensorBoard file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.pages import blocks
from tests.support.tools import REPOSITORY
from torch_grad_exporter import start_exporter

EXAMPLES = blocks(REPOSITORY / "docs" / "frameworks.md", "python", section="Other loggers")


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's loop: norms by layer arrive as scalars, each at its step, and are those of float64."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_EVERY", "1")
    norms: list[float] = []

    def record(model: torch.nn.Sequential) -> None:
        norms.append(float(sum(p.grad.double().square().sum() for p in model[0].parameters() if p.grad is not None)) ** 0.5)

    text = EXAMPLES[0]
    changes = {"step % 50": "step % 2", "(200, ": "(6, ", "    optimizer.step()": "    record(model)\n    optimizer.step()"}
    for of_the_page, here in changes.items():
        assert of_the_page in text
        text = text.replace(of_the_page, here)
    exec(text + "\nwriter.close()\nexporter.close()\n", {"record": record})  # noqa: S102 - what a user copies
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"torch_grad_global_norm", "torch_grad_norm/0", "torch_grad_norm/2", "torch_train_steps_total/AdamW"} <= tags
    assert not any(tag.startswith("torch_host") for tag in tags)
    logged = [(one.step, one.value) for one in events.Scalars("torch_grad_norm/0")]
    assert [step for step, _ in logged] == [0, 2, 4]
    assert [value for _, value in logged] == pytest.approx(norms[::2], rel=1e-5)


def test_the_other_loggers_get_the_same() -> None:
    """W&B's and MLflow's examples hand over a mapping of names to floats, with names that MLflow allows."""
    given: list[tuple[dict[str, float], int]] = []

    class Log:
        def log(self, values: dict[str, float], step: int) -> None:
            given.append((values, step))

        log_metrics = log

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with start_exporter(model, port=None, every=1) as exporter:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        for text in EXAMPLES[1:]:
            exec(text, {"wandb": Log(), "mlflow": Log(), "exporter": exporter, "step": 7})  # noqa: S102 - what a user copies
    assert len(given) == 2
    for values, step in given:
        assert step == 7
        assert values["torch_grad_global_norm"] > 0
        assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.: /") for name in values)
