"""Transformers: what `Trainer` does with each round, and what the exporter says of it."""

from __future__ import annotations

import copy
import itertools
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
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D

from tests.matrix.harness import Way
from tests.support.scrape import lost, value
from tests.trainers.training import Training, compared

WORDS = 37

# What the record has to know: which dimensions of a parameter are those of its outputs, where they are not the first.
Conv1D.output_dims = {"weight": (1,)}
MixtralExperts.output_dims = {"gate_up_proj": (0, 1), "down_proj": (0, 1)}


def gpt2(**options: Any) -> PreTrainedModel:
    """Its linear layers are `Conv1D`, whose weight is (in, out); its embedding is tied to the head."""
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, vocab_size=WORDS, use_cache=False, **options))


def llama(**options: Any) -> PreTrainedModel:
    """Its layers are `Linear` ones."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=16, use_cache=False, **sizes, **options))


def mixtral() -> PreTrainedModel:
    """Each layer has all of its experts in one parameter of three dimensions."""
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 6, "num_experts_per_tok": 1, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(vocab_size=WORDS, max_position_embeddings=16, use_cache=False, **sizes, **experts))


def switch() -> PreTrainedModel:
    """Each expert is a module of its own, which gets no gradient in a round in which it gets no word."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "num_experts": 12}
    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(vocab_size=WORDS, use_cache=False, **sizes, **sparse)
    )


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random words; of each sentence another number is to be predicted."""

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
    """Compares each loss that is logged with the one that is shown; a loss may be absent where none can be known."""

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
    """Batches of two, each step logged, nothing saved; `arguments` replace these."""
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
    evaluation: int = 0,
    loss: str = "shown",
    trainer_type: type[Trainer] = Trainer,
    resume: Path | None = None,
    prepare: Callable[[Any], None] = lambda model: None,
    **arguments: Any,
) -> None:
    """Trains. `count`, `evaluation`: sentences. `loss`: whether that of each round is `shown`, `known`, or not looked at."""
    torch.manual_seed(0)
    model = made()
    prepare(model)
    trainer = trainer_type(
        model=model,
        args=settings(where, **{"eval_strategy": "steps", "eval_steps": 2} if evaluation else {}, **arguments),
        train_dataset=Sentences(count),
        eval_dataset=Sentences(evaluation) if evaluation else None,
        callbacks=[Logged(run, required=loss == "shown")] if loss else [],
    )
    with run.watching(model):
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    run.told += [(one.get("loss"), one.get("grad_norm"), one.get("eval_loss")) for one in trainer.state.log_history]


@pytest.mark.parametrize("made", [gpt2, llama])
@pytest.mark.parametrize(("accumulation", "limit"), [(1, 0.5), (4, 0.0), (4, 0.5)])
def test_accumulation_and_clipping(tmp_path: Path, made: Any, accumulation: int, limit: float) -> None:
    """Norms are those before clipping, and a round's loss is the one that is logged, by the items of the whole round."""
    compared(partial(finetune, where=tmp_path, made=made, gradient_accumulation_steps=accumulation, max_grad_norm=limit))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    """Both ways to compute forwards again within the backward, under accumulation and clipping."""
    how = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    compared(partial(finetune, where=tmp_path, made=llama, gradient_accumulation_steps=2, max_grad_norm=0.5, **how))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["autocast", "weights"])
def test_bfloat16(tmp_path: Path, weights: torch.dtype) -> None:
    """By autocast the gradients are of float32; of weights in bfloat16 they are as coarse as these."""
    train = partial(finetune, where=tmp_path, made=lambda: llama().to(weights), gradient_accumulation_steps=2, loss="")
    if weights == torch.float32:
        compared(partial(train, bf16=True))
    else:  # the norms that come out of a clipping are too coarse to tell a limit
        compared(train, rel=1e-2, by_limit=False)


def test_label_smoothing(tmp_path: Path) -> None:
    """The trainer computes the loss itself, so that the model returns none."""
    compared(partial(finetune, where=tmp_path, made=gpt2, label_smoothing_factor=0.1, gradient_accumulation_steps=2, loss="known"))


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_shorter_round_at_the_end_of_an_epoch(tmp_path: Path, limit: float) -> None:
    """Ten batches are rounds of 4, 4 and 2. The trainer edits gradients in any case, by 1 where there is no limit.

    So the first of the short rounds, which looks the same as one that goes on, is absent, and said to be.
    """
    train = partial(finetune, where=tmp_path, made=llama, count=20, gradient_accumulation_steps=4, max_grad_norm=limit)
    run = compared(partial(train, num_train_epochs=3), gauges=True)
    assert run.exporter is not None
    assert sum(lost(run.exporter).values()) == 1
    assert value(run.exporter, "torch_grad_captures_total", layer="lm_head") == 8


def test_evaluation_between_steps(tmp_path: Path) -> None:
    """Evaluation changes no number."""
    compared(partial(finetune, where=tmp_path, made=llama, count=24, evaluation=6, gradient_accumulation_steps=2))


def test_a_mean_over_micro_batches(tmp_path: Path) -> None:
    """Where the model takes no number of items, the trainer logs the mean over a round's micro-batches."""

    class Means(Trainer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.model_accepts_loss_kwargs = False

    compared(partial(finetune, where=tmp_path, made=llama, trainer_type=Means, gradient_accumulation_steps=4, loss="known"))


def test_experts_in_one_parameter(tmp_path: Path) -> None:
    """The gradient of a Mixtral's idle expert is zero, and never missing."""
    compared(partial(finetune, where=tmp_path, made=mixtral, per_device_train_batch_size=1, loss=""))


def test_idle_experts(tmp_path: Path) -> None:
    """An expert without a word in the last round has no norm of an older one, and is missing."""
    run = compared(partial(finetune, where=tmp_path, made=switch, per_device_train_batch_size=1, loss=""))
    assert run.heard is not None
    layers = [step.layers.keys() for step in run.heard.steps["AdamW"]]
    assert any(before - after for before, after in itertools.pairwise(layers)), "no expert became idle"


def test_resumed_training(tmp_path: Path) -> None:
    """From a checkpoint on, with the optimizer's state loaded."""
    finetune(Training(Way.PLAIN), tmp_path, gpt2, save_strategy="steps", save_steps=4)
    train = partial(finetune, where=tmp_path / "on", made=gpt2, resume=tmp_path / "checkpoint-4", num_train_epochs=2)
    run = compared(train)
    assert len(run.told) == 16 + 1, "those of the checkpoint, and those since then"


def test_checkpoints_of_a_model_that_keeps_the_exporter(tmp_path: Path) -> None:
    """What a trainer saves of a model that has the exporter as an attribute loads, and the model can be copied meanwhile."""

    class Copies(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, model: Any = None, **_more: Any) -> None:
            run.told.append(len(copy.deepcopy(model).state_dict()))
            torch.save(model, tmp_path / "model.pt")

    def train(this: Training) -> None:
        nonlocal run
        run = this
        torch.manual_seed(0)
        model = llama()
        arguments = settings(tmp_path, save_strategy="steps", save_steps=3)
        trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(16), callbacks=[Copies()])
        with this.watching(model):
            model.exporter = this.exporter
            trainer.train()
            loaded = torch.load(tmp_path / "model.pt", weights_only=False)
            assert loaded.exporter is None
            model.exporter = None

    run = Training(Way.PLAIN)
    compared(train)


def test_frozen_layers_and_noise_in_embeddings(tmp_path: Path) -> None:
    """A part of the model is frozen, and a hook of the trainer's adds noise to what the embedding returns."""
    compared(
        partial(
            finetune, where=tmp_path, made=llama, prepare=lambda model: model.model.layers[0].requires_grad_(False),
            neftune_noise_alpha=5, max_grad_norm=0.5,
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", ["adafactor", "adamw_torch_fused", "sgd"])
def test_optimizers(tmp_path: Path, name: str) -> None:
    """Optimizers that the trainer chooses by name."""
    compared(partial(finetune, where=tmp_path, made=gpt2, optim=name, gradient_accumulation_steps=2, max_grad_norm=0.5))


def test_at_defaults(tmp_path: Path) -> None:
    """What is shown at defaults is of the step that it is said to be of, over 150 steps of accumulation and clipping."""
    train = partial(finetune, where=tmp_path, made=llama, count=100, num_train_epochs=9, gradient_accumulation_steps=3)
    run = compared(partial(train, max_grad_norm=0.5, loss=""), Way.DEFAULTS, between=3)
    assert len(run.samples) > 2
