"""Transformers: what `Trainer` does with each round, and what the exporter says of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.pytorch_utils import Conv1D

from tests.support.scrape import lost, value
from tests.trainers.training import Training, compared

WORDS = 37

# What the record has to know: which dimensions of a parameter are those of its outputs, where they are not the first.
Conv1D.output_dims = {"weight": (1,)}


def gpt2(**options: Any) -> PreTrainedModel:
    """Return a model with `Conv1D` layers, whose weight is (in, out), and tied embeddings."""
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, vocab_size=WORDS, use_cache=False, **options))


def llama(**options: Any) -> PreTrainedModel:
    """Return a model with `Linear` layers."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=16, use_cache=False, **sizes, **options))


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random words, of which the first few are not predicted."""

    def __init__(self, count: int, length: int = 8) -> None:
        generator = torch.Generator().manual_seed(1)
        self._words = torch.randint(0, WORDS, (count, length), generator=generator)
        self._ignored = torch.randint(0, length - 2, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self._words[index].clone()
        labels[: int(self._ignored[index])] = -100
        return {"input_ids": self._words[index], "labels": labels}


class Logged(TrainerCallback):
    """Compares each logged loss with the shown one; a loss may be absent if unknown."""

    def __init__(self, run: Training, *, required: bool) -> None:
        self._run = run
        self._required = required

    def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **_more: Any) -> None:
        if self._run.exporter is None or "loss" not in logs:
            return
        shown = value(self._run.exporter, "torch_train_loss")
        wrong = self._required if shown is None else abs(shown - logs["loss"]) > 1e-4 * logs["loss"]
        if wrong:
            self._run.wrong.append(f"at step {state.global_step}: loss {shown} is shown, {logs['loss']} is logged")


def settings(where: Path, **arguments: Any) -> TrainingArguments:
    """Return arguments for batches of two, each step logged, nothing saved."""
    return TrainingArguments(
        **{
            "output_dir": str(where), "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1,
            "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "num_train_epochs": 1, "seed": 0,
            **arguments,
        }
    )  # fmt: skip


def finetune(
    run: Training,
    where: Path,
    made: Callable[[], PreTrainedModel],
    *,
    count: int = 16,
    loss: str = "shown",
    trainer_type: type[Trainer] = Trainer,
    resume: Path | None = None,
    **arguments: Any,
) -> None:
    """Train; `loss`: whether the loss of each round is `shown`, `known`, or not compared."""
    torch.manual_seed(0)
    model = made()
    trainer = trainer_type(
        model=model,
        args=settings(where, **arguments),
        train_dataset=Sentences(count),
        callbacks=[Logged(run, required=loss == "shown")] if loss else [],
    )
    with run.watching(model):
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    run.told += [(one.get("loss"), one.get("grad_norm"), one.get("eval_loss")) for one in trainer.state.log_history]


@pytest.mark.parametrize(("made", "accumulation", "limit"), [(gpt2, 1, 0.5), (llama, 4, 0.5)])
def test_accumulation_and_clipping(tmp_path: Path, made: Any, accumulation: int, limit: float) -> None:
    """Norms are those before clipping, and the loss of a round is the logged one."""
    compared(partial(finetune, where=tmp_path, made=made, gradient_accumulation_steps=accumulation, max_grad_norm=limit))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    """Both kinds of gradient checkpointing keep all numbers right."""
    how = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    compared(partial(finetune, where=tmp_path, made=llama, gradient_accumulation_steps=2, max_grad_norm=0.5, **how))


def test_a_shorter_round_ends_an_epoch(tmp_path: Path) -> None:
    """Rounds of 4, 4 and 2 batches are measured, and the first short round is counted as lost."""
    train = partial(finetune, where=tmp_path, made=llama, count=20, gradient_accumulation_steps=4, max_grad_norm=0.5)
    run = compared(partial(train, num_train_epochs=3), gauges=True)
    assert run.exporter is not None
    assert sum(lost(run.exporter).values()) == 1
    assert value(run.exporter, "torch_grad_captures_total", layer="lm_head") == 8


def test_a_mean_over_micro_batches(tmp_path: Path) -> None:
    """The loss is the mean over micro-batches where the model takes no number of items."""

    class Means(Trainer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.model_accepts_loss_kwargs = False

    compared(partial(finetune, where=tmp_path, made=llama, trainer_type=Means, gradient_accumulation_steps=4, loss="known"))
