"""TRL's GRPO: rewards and entropy stand beside gradients, by the callback for Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.support.scrape import errors, values
from torch_grad_exporter.integrations.session import running_exporter
from torch_grad_exporter.integrations.transformers import GradExporterCallback

WORDS = ["<pad>", "<eos>", *map(str, range(30))]
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>"}

LOGGED_AS = {
    "reward": "torch_rl_reward_mean",
    "reward_std": "torch_rl_reward_std",
    "eval_reward": "torch_rl_eval_reward_mean",
    "kl": "torch_rl_kl_divergence",
    "entropy": "torch_rl_entropy",
    "clip_ratio/region_mean": "torch_rl_clip_ratio",
    "completions/mean_length": "torch_rl_response_length_tokens",
    "frac_reward_zero_std": "torch_rl_zero_advantage_ratio",
}


def different_words(completions: list[str], **_: Any) -> list[float]:
    """Reward responses for the number of words that differ."""
    return [float(len(set(text.split()))) for text in completions]


class LastLogged(TrainerCallback):
    """Keeps what the trainer has logged last by each name, and what the exporter shows at the end."""

    def __init__(self) -> None:
        self.logged: dict[str, float] = {}
        self.shown: dict[Any, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **_: Any) -> None:
        self.logged |= logs
        exporter = running_exporter(model)
        if exporter is not None:
            assert errors(exporter) == {}
            self.shown = values(exporter)


def test_grpo_is_shown_beside_gradients(tmp_path: Path) -> None:
    """Each value that GRPO logs is shown as what it means, as it was logged last, and gradients by layer are there."""
    torch.manual_seed(0)
    tokens = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, **SPECIAL)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": len(WORDS)}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, pad_token_id=0))
    model.save_pretrained(tmp_path / "model")  # it looks its configuration up again
    prompts = Dataset.from_dict({"prompt": ["1 2 3", "4 5 6"] * 4})
    arguments = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", per_device_train_batch_size=8,
        per_device_eval_batch_size=8, num_generations=4, max_completion_length=6, max_steps=4, logging_steps=1, beta=0.04,
        eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    last = LastLogged()
    trainer = GRPOTrainer(
        model=str(tmp_path / "model"), reward_funcs=different_words, args=arguments, train_dataset=prompts, eval_dataset=prompts,
        processing_class=tokenizer, callbacks=[GradExporterCallback(port=None, every=1), last],
    )  # fmt: skip
    trainer.train()
    expected = {metric: last.logged[name] for name, metric in LOGGED_AS.items()}
    by_name = {name: number for (name, _), number in last.shown.items()}
    assert {metric: by_name[metric] for metric in expected} == pytest.approx(expected)
    assert ("torch_grad_norm", (("layer", "transformer.h.0.attn.c_attn"),)) in last.shown
