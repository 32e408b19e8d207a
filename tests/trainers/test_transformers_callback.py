"""The callback for Transformers: what it starts, tells and ends, in trainings of the real `Trainer`."""

from __future__ import annotations

import json
import logging
import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, Trainer, TrainerCallback

from tests.support.ranks import run_ranks
from tests.support.scrape import errors, key, value, values
from tests.trainers.test_transformers import Sentences, gpt2, llama, settings
from tests.trainers.training import Training, compared
from tests.matrix.harness import Way
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Stop
from torch_grad_exporter.integrations.session import running_exporter
from torch_grad_exporter.integrations.transformers import GradExporterCallback

QUICK = {"port": None, "every": 1, "collectors": {"process": False, "host": False, "container": False, "gpu": False}}
"""Options of an exporter that looks at each step, and at no machine."""


class Looks(TrainerCallback):
    """Calls a function after each step, behind the callbacks that were added before."""

    def __init__(self, look: Callable[[Any], object]) -> None:
        self._look = look

    def on_step_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        self._look(state)


def trainer_of(model: torch.nn.Module, where: Path, callbacks: list[Any], *, count: int = 16, **arguments: Any) -> Trainer:
    """A trainer that has these callbacks."""
    evaluation = {"eval_dataset": Sentences(6)} if "eval_strategy" in arguments else {}
    return Trainer(
        model=model, args=settings(where, **arguments), train_dataset=Sentences(count), callbacks=callbacks, **evaluation
    )  # fmt: skip


def finetune(run: Training, where: Path, made: Callable[[], PreTrainedModel] = llama, **arguments: Any) -> None:
    """Trains with the callback, or without."""
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
    """Every number is that of the record, and the training is the same to the last bit as without the callback."""
    run = compared(partial(finetune, where=tmp_path, made=gpt2, **arguments))
    assert run.exporter is not None
    assert errors(run.exporter) == {}


def test_at_defaults(tmp_path: Path) -> None:
    """What is shown at defaults is of the step that it is said to be of."""
    run = compared(partial(finetune, where=tmp_path, count=80, num_train_epochs=9, max_grad_norm=0.5), Way.DEFAULTS, between=3)
    assert len(run.samples) > 2


def test_what_the_trainer_knows(tmp_path: Path) -> None:
    """Epoch, tokens and learning rate are the trainer's, examples are counted once, and the state is that of the moment."""
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
        llama(), tmp_path, [callback, Looks(look)], include_num_input_tokens_seen="all", gradient_accumulation_steps=2, warmup_steps=2
    )
    trainer.train()
    rates = [one["learning_rate"] for one in trainer.state.log_history if "learning_rate" in one]
    assert [one[key("torch_train_learning_rate", optimizer="AdamW", group="0")] for one in shown] == rates
    assert len(set(rates)) > 2
    assert callback.exporter is None
