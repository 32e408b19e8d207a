"""peft: adapters on a GPT-2, whose layers are `Conv1D`, and on a Llama; switched, merged, added and removed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftConfig, PrefixTuningConfig
from transformers import Trainer

from tests.support.scrape import key, values
from tests.trainers.test_transformers import Sentences, gpt2, llama, settings
from tests.trainers.training import Training, compared

LINEAR = ["q_proj", "v_proj", "down_proj"]
ACCUMULATED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}


def adapted(run: Training, where: Path, made: Callable[[], Any], config: PeftConfig, **arguments: Any) -> None:
    """Train an adapter by Transformers' trainer."""
    torch.manual_seed(0)
    model = peft.get_peft_model(made(), config)
    trainer = Trainer(model=model, args=settings(where, **arguments), train_dataset=Sentences(16))
    with run.watching(model):
        trainer.train()
    run.told += [one.get("loss") for one in trainer.state.log_history]


ADAPTERS = {
    "lora with embeddings": partial(LoraConfig, r=4, target_modules=["c_attn", "wte"], fan_in_fan_out=True),
    "ia3": partial(IA3Config, target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"], fan_in_fan_out=True),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_gpt2(tmp_path: Path, name: str) -> None:
    """Only the trained parts of an adapter are shown."""
    run = compared(partial(adapted, where=tmp_path, made=gpt2, config=ADAPTERS[name](task_type="CAUSAL_LM"), **ACCUMULATED))
    assert run.heard is not None
    layers = run.heard.steps["AdamW"][-1].layers
    assert all(any(part in layer for part in ("lora", "ia3", "ln_f", "bias", "base_layer")) for layer in layers)


LINEAR_ADAPTERS = {
    "dora": partial(LoraConfig, r=4, target_modules=LINEAR, use_dora=True),
    "adalora": partial(AdaLoraConfig, init_r=4, target_r=2, tinit=2, tfinal=2, total_step=8, target_modules=LINEAR),
    "prefix": partial(PrefixTuningConfig, num_virtual_tokens=3),
}


@pytest.mark.parametrize("name", LINEAR_ADAPTERS)
def test_adapters_of_llama(tmp_path: Path, name: str) -> None:
    """Numbers are right for adapters with parameters in lists and dictionaries."""
    compared(partial(adapted, where=tmp_path, made=llama, config=LINEAR_ADAPTERS[name](task_type="CAUSAL_LM")))


def by_hand(run: Training, between: Callable[[Any, int], None], *, steps: int = 9, config: LoraConfig | None = None) -> None:
    """Train in a plain loop; `between` changes the model before each step."""
    torch.manual_seed(0)
    config = config or LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(gpt2(), config)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "lora" in n], lr=0.01)
    batches = torch.utils.data.DataLoader(Sentences(2 * steps), 2)
    with run.watching(model):
        for step, batch in enumerate(batches):
            between(model, step)
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            run.told.append(float(loss))


def test_switched_adapters() -> None:
    """Only the active adapter has gauges, and the counters of the other one stay."""
    seen: list[set[Any]] = []

    def train(run: Training) -> None:
        def switch(model: Any, step: int) -> None:
            if run.exporter is not None and step > 1:
                seen.append({one for one in values(run.exporter) if one[0] == "torch_grad_captures_total"})
            model.set_adapter("other" if step // 3 % 2 else "default")

        by_hand(run, switch)

    compared(train, optional=["torch_grad_norm_recent_max"])  # of one that is frozen for now there may be none
    assert seen[-1] >= set().union(*seen)
    assert key("torch_grad_captures_total", layer="base_model.model.transformer.h.0.attn.c_proj.lora_A.other") in seen[-1]


def test_added_and_removed_adapters() -> None:
    """The counts of a deleted adapter stay in the remainder of removed layers."""

    def between(model: Any, step: int) -> None:
        if step == 3:
            model.set_adapter("other")
        if step == 6:
            model.delete_adapter("default")

    compared(partial(by_hand, between=between))
