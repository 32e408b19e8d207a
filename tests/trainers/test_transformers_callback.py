"""The callback for Transformers: start, reported values and end, in trainings of the real `Trainer`."""

from __future__ import annotations

import json
import math
import pickle
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, Trainer, TrainerCallback

from tests.matrix.harness import Way
from tests.support.programs import Starter
from tests.support.ranks import run_ranks
from tests.support.scrape import errors, key, value, values
from tests.trainers.test_transformers import Sentences, gpt2, llama, settings
from tests.trainers.training import AMPLE, QUICK, Broken, Training, compared, ending_of, spent
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Stop
from torch_grad_exporter.integrations.session import running_exporter
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


def finetune(run: Training, where: Path, made: Callable[[], PreTrainedModel] = llama, **arguments: Any) -> None:
    """Train with the callback, or without."""
    torch.manual_seed(0)
    model = made()
    with run.called_back(model, GradExporterCallback) as callbacks:
        trainer = trainer_of(model, where, callbacks, **arguments)
        trainer.train()
    assert running_exporter(model) is None
    run.told += [(one.get("loss"), one.get("grad_norm"), one.get("eval_loss")) for one in trainer.state.log_history]


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_grad_norm": 0.5},
        {"gradient_accumulation_steps": 4, "max_grad_norm": 0.5},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "eval_strategy": "steps", "eval_steps": 2, "count": 24},
        {"bf16": True, "max_grad_norm": 0.5},
    ],
    ids=["clipped", "accumulated", "evaluated", "bf16"],
)
def test_numbers(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """All numbers are those of the record, and training ends in the same bits."""
    run = compared(partial(finetune, where=tmp_path, made=gpt2, **arguments))
    assert run.exporter is not None
    assert errors(run.exporter) == {}


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


def test_at_defaults(tmp_path: Path) -> None:
    """At the default options each value belongs to the step that it names."""
    run = compared(
        partial(finetune, where=tmp_path, count=80, num_train_epochs=9, max_grad_norm=0.5), Way.DEFAULTS, between=3, **AMPLE
    )
    assert len(run.samples) > 2


def test_what_the_trainer_knows(tmp_path: Path) -> None:
    """Epoch, tokens, samples, learning rate and state are those of the trainer."""
    shown: list[dict[Any, float]] = []
    callback = GradExporterCallback(**QUICK)

    def look(state: Any) -> None:
        assert callback.exporter is not None
        shown.append(values(callback.exporter))
        assert shown[-1][key("torch_train_epoch")] == state.epoch
        assert shown[-1][key("torch_train_tokens_total")] == state.num_input_tokens_seen == 8 * 4 * state.global_step
        assert shown[-1][key("torch_train_samples_total")] == 4 * state.global_step
        assert shown[-1][key("torch_train_state", state="training")] == 1

    trainer = trainer_of(
        llama(),
        tmp_path,
        [callback, Looks(look)],
        include_num_input_tokens_seen="all",
        gradient_accumulation_steps=2,
        warmup_steps=2,
    )
    trainer.train()
    rates = [one["learning_rate"] for one in trainer.state.log_history if "learning_rate" in one]
    assert [one[key("torch_train_learning_rate", optimizer="AdamW", group="0")] for one in shown] == rates
    assert len(set(rates)) > 2
    assert callback.exporter is None


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


class Fails(TrainerCallback):
    """Raises at the third step, once."""

    def __init__(self, callback: GradExporterCallback, error: BaseException) -> None:
        self._callback = callback
        self.error: BaseException | None = error
        self.exporters: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        if self._callback.exporter not in self.exporters:
            self.exporters.append(self._callback.exporter)
        if state.global_step == 3 and self.error is not None:
            error, self.error = self.error, None
            raise error


@pytest.mark.parametrize("error", [Broken("secret"), KeyboardInterrupt()])
def test_a_failure_within_a_with(tmp_path: Path, error: BaseException) -> None:
    """The state is failed with the exception's name, and finished after Ctrl-C."""
    callback, model = GradExporterCallback(**QUICK), llama()
    fails = Fails(callback, error)
    with pytest.raises(type(error)), callback:
        trainer_of(model, tmp_path, [callback, fails]).train()
    assert ending_of(fails.exporters[0], tmp_path) == (("failed", "Broken") if isinstance(error, Broken) else ("finished", None))
    assert running_exporter(model) is None


def test_a_failure_without_a_with(tmp_path: Path) -> None:
    """Without a `with` the next training marks the unfinished one as failed."""
    callback, model = GradExporterCallback(**QUICK), llama()
    fails = Fails(callback, Broken())
    trainer = trainer_of(model, tmp_path, [callback, fails])
    with pytest.raises(Broken):
        trainer.train()
    assert running_exporter(model) is fails.exporters[0]
    trainer.train()
    first, second = fails.exporters
    assert ending_of(first, tmp_path) == ("failed", "TrainingInterrupted")
    assert ending_of(second, tmp_path) == ("finished", None)
    assert first.run == second.run


SCRIPT = """
import sys, tests.trainers
from transformers import TrainerCallback
from tests.trainers.test_transformers_callback import Fails, Broken, QUICK, GradExporterCallback, llama, trainer_of
callback = GradExporterCallback(textfile_dir=sys.argv[1], **QUICK)
trainer_of(llama(), sys.argv[1], [callback, Fails(callback, Broken())]).train()
"""


def test_a_failing_process(starter: Starter, tmp_path: Path) -> None:
    """The last values of a failing process say that the training has failed."""
    done = starter.start(SCRIPT, str(tmp_path))
    assert (done.wait(), done.err.read_text().rstrip()[-6:]) == (1, "Broken")
    (text,) = [file.read_text() for file in tmp_path.glob("*.prom")]
    assert re.search(r'^torch_train_state\{.*state="failed"\} 1', text, re.MULTILINE)
    assert re.search(r"^torch_train_steps_total\{.*\} 3", text, re.MULTILINE)


def test_stop(tmp_path: Path) -> None:
    """`Stop()` ends the training after a whole step."""
    callback = GradExporterCallback(**QUICK)

    class Stops(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
            assert callback.exporter is not None
            callback.exporter.on(lambda m: m.mean("torch_train_steps_total", samples=1) >= 3, Stop())

    trainer = trainer_of(llama(), tmp_path, [callback, Stops()], num_train_epochs=100_000, logging_steps=1_000_000)
    trainer.train()
    assert 3 <= trainer.state.global_step < trainer.state.max_steps


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


def test_several_trainings(tmp_path: Path) -> None:
    """Each `train()` has an exporter of one run; the user's own exporter continues."""
    model = llama()
    fails = Fails(callback := GradExporterCallback(**QUICK), Broken())
    fails.error = None
    trainer = trainer_of(model, tmp_path, [callback, fails])
    trainer.train()
    trainer.train()
    with pytest.raises(ValueError, match="added to the trainer twice; add it once"):
        trainer_of(model, tmp_path, [callback, callback]).train()
    assert len({exporter.run for exporter in fails.exporters}) == 1
    assert [ending_of(exporter, tmp_path) for exporter in fails.exporters] == 2 * [("finished", None)]
    with start_exporter(model, **QUICK) as exporter:
        trainer_of(model, tmp_path, [GradExporterCallback()]).train()
        assert value(exporter, "torch_train_steps_total", optimizer="AdamW") == 8
        assert value(exporter, "torch_train_epoch") == 1
        assert running_exporter(model) is exporter


def test_wrong_arguments_raise(tmp_path: Path) -> None:
    """Wrong arguments raise where the callback is made or when training begins, and a callback pickles."""
    assert isinstance(pickle.loads(pickle.dumps(GradExporterCallback(port=None))), GradExporterCallback)  # noqa: S301 - our own
    with pytest.raises(TypeError, match=r"GradExporterCallback\(prot=...\): not an option of start_exporter"):
        GradExporterCallback(prot=9100)
    with pytest.raises(TypeError, match="expected True, False or a regular expression"):
        GradExporterCallback(log=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"log_values=3.*True or False"):
        GradExporterCallback(log_values=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every"):
        trainer_of(llama(), tmp_path, [GradExporterCallback(port=None, every=-1)]).train()


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
