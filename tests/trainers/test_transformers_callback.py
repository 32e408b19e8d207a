"""The callback for Transformers: start, reported values and end, in trainings of the real `Trainer`."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from tests.support.programs import Starter
from tests.support.ranks import run_ranks
from tests.support.scrape import key, value, values
from tests.trainers.test_transformers import Sentences, gpt2, llama, settings
from tests.trainers.training import QUICK, spent
from torch_grad_exporter import start_exporter
from torch_grad_exporter.integrations.transformers import GradExporterCallback


class Looks(TrainerCallback):
    """Calls a function when a step is logged, behind the callbacks that were added before."""

    def __init__(self, look: Callable[[Any], object]) -> None:
        self._look = look

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_more: Any) -> None:
        if "loss" in logs:
            self._look(state)


def trainer_of(model: torch.nn.Module, where: Path, callbacks: list[Any], *, count: int = 16, **arguments: Any) -> Trainer:
    """Return a trainer with these callbacks."""
    evaluation = {"eval_dataset": Sentences(6)} if "eval_strategy" in arguments else {}
    return Trainer(
        model=model, args=settings(where, **arguments), train_dataset=Sentences(count), callbacks=callbacks, **evaluation
    )  # fmt: skip


@pytest.mark.parametrize(("log", "datasets"), [(False, 1), (True, 1), (False, 3)])
def test_time_of_evaluations_and_checkpoints(tmp_path: Path, log: bool, datasets: int) -> None:
    """An evaluation, of one dataset or several, and a checkpoint have the time that they take."""

    class Slow(Trainer):
        def prediction_step(self, *arguments: Any, **named: Any) -> Any:
            time.sleep(0.2)
            return super().prediction_step(*arguments, **named)

        def save_model(self, *arguments: Any, **named: Any) -> None:
            time.sleep(0.3)
            super().save_model(*arguments, **named)

    def look(state: Any) -> None:
        assert callback.exporter is not None
        seen.append((spent(callback.exporter, "evaluation"), spent(callback.exporter, "checkpoint")))

    seen: list[tuple[float, float]] = []
    callback = GradExporterCallback(log=log, **QUICK)
    arguments = settings(tmp_path, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3, logging_steps=1)
    evaluated = {str(number): Sentences(24) for number in range(datasets)} if datasets > 1 else Sentences(6)
    trainer = Slow(
        model=gpt2(), args=arguments, train_dataset=Sentences(20), eval_dataset=evaluated, callbacks=[callback, Looks(look)]
    )
    trainer.train()
    batches = datasets * len(trainer.get_eval_dataloader(Sentences(24) if datasets > 1 else None))
    assert seen[1] == (0, 0)
    # The trainer reports the first batch of a further dataset when it is over.
    assert 0.2 * (batches - datasets + 1) <= seen[3][0] <= 0.2 * batches + 0.15
    assert seen[3][1] >= 0.3  # with all else that is written


def test_tokens(tmp_path: Path) -> None:
    """Tokens are those of the trainer."""
    shown: list[float | None] = []
    callback = GradExporterCallback(**QUICK)

    def look(state: Any) -> None:
        shown.append(value(callback.exporter, "torch_train_tokens_total"))
        assert shown[-1] == state.num_input_tokens_seen

    more = {"include_num_input_tokens_seen": "all", "gradient_accumulation_steps": 2}
    trainer_of(llama(), tmp_path, [callback, Looks(look)], **more).train()
    assert shown == [8 * 4 * step for step in range(1, 5)]


def test_a_loss_of_the_trainer(tmp_path: Path) -> None:
    """The logged loss is shown if the model returns none, else the model's own."""
    shown: list[tuple[float | None, float]] = []

    class Logged(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_more: Any) -> None:
            if callback.exporter is not None and "loss" in logs:
                shown.append((value(callback.exporter, "torch_train_loss"), logs["loss"]))

    for arguments, own in (({"label_smoothing_factor": 0.1}, False), ({}, True)):
        callback = GradExporterCallback(**QUICK)
        shown.clear()
        trainer_of(gpt2(), tmp_path, [callback, Logged()], logging_steps=2, **arguments).train()
        assert len(shown) == 4
        assert all((told == pytest.approx(logged)) is not own for told, logged in shown)


SCRIPT = """
import sys, tests.trainers
from tests.trainers.test_transformers_callback import QUICK, GradExporterCallback, Looks, llama, trainer_of
def fail(state):
    if state.global_step == 3:
        raise RuntimeError('Broken')
callback = GradExporterCallback(textfile_dir=sys.argv[1], **QUICK)
trainer_of(llama(), sys.argv[1], [callback, Looks(fail)]).train()
"""


def test_a_failing_process(starter: Starter, tmp_path: Path) -> None:
    """The last values of a failing process say that the training has failed."""
    done = starter.start(SCRIPT, str(tmp_path))
    assert (done.wait(), done.err.read_text().rstrip()[-6:]) == (1, "Broken")
    (text,) = [file.read_text() for file in tmp_path.glob("*.prom")]
    assert re.search(r'^torch_train_state\{.*state="failed"\} 1', text, re.MULTILINE)
    assert re.search(r"^torch_train_steps_total\{.*\} 3", text, re.MULTILINE)


def test_resumed_training(tmp_path: Path) -> None:
    """Step numbers continue after a checkpoint, and tokens are those of this process."""
    model, tokens = llama(), {"include_num_input_tokens_seen": "all"}
    trainer_of(model, tmp_path, [], save_strategy="steps", save_steps=4, **tokens).train()
    callback, shown = GradExporterCallback(**QUICK), []

    def look(state: Any) -> None:
        assert callback.exporter is not None
        names = ("torch_grad_sample_step", "torch_train_earlier_steps", "torch_train_tokens_total")
        shown.append(tuple(value(callback.exporter, name) for name in names))
        assert shown[-1][0] == state.global_step

    trainer = trainer_of(model, tmp_path, [callback, Looks(look)], num_train_epochs=2, **tokens)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert shown == [(4 + step, 4, 16 * step) for step in range(1, 13)]


def test_what_is_logged(tmp_path: Path) -> None:
    """The trainer's log has the values at its logging steps, also for callbacks added before."""
    reported: list[dict[str, float]] = []

    class Reports(TrainerCallback):
        """As those of TensorBoard or W&B, which the trainer puts before those of the user."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_more: Any) -> None:
            reported.append(dict(logs))

    def log(how: bool | str) -> list[dict[str, float]]:
        reported.clear()
        callbacks = [Reports(), GradExporterCallback(log=how, **QUICK)]
        trainer = trainer_of(llama(), tmp_path, callbacks, logging_steps=4, save_strategy="epoch")
        trainer.train()
        logged = [one for one in reported if "loss" in one]
        assert len(logged) == 2
        assert [{**one, "step": 4 * (1 + i)} for i, one in enumerate(logged)] == trainer.state.log_history[:2]
        assert not any("torch_grad_global_norm" in one for one in reported if one not in logged)
        return logged

    assert not any(name.startswith("torch_") for one in log(False) for name in one)
    for one in log(True):
        assert one["torch_grad_global_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        assert one["torch_grad_norm/lm_head"] > 0
    saved = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert saved["log_history"][0]["torch_grad_norm/lm_head"] > 0
    assert [name for name in log("^torch_train_steps")[0] if name.startswith("torch_")] == ["torch_train_steps_total/AdamW"]


@pytest.mark.parametrize("log_values", [True, False])
def test_what_the_trainer_logs_is_shown(tmp_path: Path, log_values: bool) -> None:
    """The exporter shows what the trainer logs, under its names, without its own values; or nothing of it."""
    model = llama()
    with start_exporter(model, port=None) as exporter:
        callback = GradExporterCallback(exporter, log=True, log_values=log_values)
        trainer = trainer_of(model, tmp_path, [callback], logging_steps=4)
        trainer.train()
        shown = exporter.values("^torch_train_value/")
    logged = {name: value for entry in trainer.state.log_history for name, value in entry.items() if name != "step"}
    assert {"loss", "grad_norm", "epoch", "train_runtime"} <= logged.keys()
    names = [name for name in logged if not name.startswith("torch_")] if log_values else []
    assert shown == {f"torch_train_value/{name}": pytest.approx(logged[name]) for name in names}


def _rank(rank: int, folder: Path) -> None:
    import tests.trainers  # noqa: F401, PLC0415 - what it sets in a process

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    shown: list[tuple[Any, ...]] = []
    callback = GradExporterCallback(log="^torch_grad_global_norm$", **QUICK)

    def look(state: Any) -> None:
        assert callback.exporter is not None
        scrape = values(callback.exporter)
        shown.append((scrape[key("torch_train_samples_total")], scrape.get(key("torch_train_tokens_total"))))

    torch.manual_seed(0)
    trainer = trainer_of(
        llama(),
        folder / "trained",
        [callback, Looks(look)],
        ddp_backend="gloo",
        include_num_input_tokens_seen="all",
        max_grad_norm=0.5,
    )
    trainer.train()
    assert shown == [(2 * step, 32 * step if rank == 0 else None) for step in range(1, 5)]
    for one in trainer.state.log_history[:-1]:
        assert math.isclose(one["torch_grad_global_norm"], one["grad_norm"], rel_tol=1e-5)
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    """Under DDP norms are those of the reduced gradients, and one rank reports the tokens of all."""
    run_ranks(_rank, tmp_path)
