"""Transformers' mixtures of experts: loads and entropies of their routers against a recount of what these return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.support.scrape import errors, values
from torch_grad_exporter import start_exporter

WORDS = 37
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL = {**SIZES, "intermediate_size": 16, "max_position_embeddings": 32, "use_cache": False, "pad_token_id": 0}
QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
DEEPSEEK = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_shared_experts": 1,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], str, set[str]]] = {
    "Mixtral": ({"num_local_experts": 8, "num_experts_per_tok": 2}, "gate", {"0", "1"}),
    "Qwen2Moe": (QWEN | {"shared_expert_intermediate_size": 8}, "gate", {"0", "1"}),
    "Qwen3Moe": (QWEN, "gate", {"0", "1"}),
    "DeepseekV3": (DEEPSEEK, "gate", {"1"}),
    "GptOss": ({"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}, "router", {"0", "1"}),
    "Olmoe": ({"num_experts": 8, "num_experts_per_tok": 2}, "gate", {"0", "1"}),
}
"""By the start of the class: options of its configuration, the name of the router, and the layers that have one."""


def made(kind: str) -> nn.Module:
    """Return a tiny model with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **MODELS[kind][0]})
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith((".gate.weight", ".router.weight")):
            nn.init.normal_(parameter, std=0.5)
    return model


def train(model: nn.Module, *, steps: int = 3, routers: bool = True, checkpoints: bool = False) -> dict[tuple[str, Any], float]:
    """Train with two micro-batches a step and return the scrape."""
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    with start_exporter(model, None, every=1, routers=routers) as exporter:
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(2):
                words = torch.randint(1, WORDS, (2, 8))
                model(input_ids=words, labels=words).loss.backward()
            optimizer.step()
    assert errors(exporter) == {}
    return values(exporter)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_routers(kind: str, checkpoints: bool) -> None:
    """Loads are exact and entropies those of float64, for each layer with a router, also with checkpoints."""
    model = made(kind)
    model.train()
    name, layers = MODELS[kind][1:]
    seen: dict[str, list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]] = {}

    def remember(layer: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _arguments: object, output: tuple[torch.Tensor, ...]) -> None:
            if torch._C._current_graph_task_id() == -1:
                seen.setdefault(layer, []).append((output[0].detach().double().numpy(), output[2].numpy().copy()))

        return hook

    labels = {f"model.layers.{number}.mlp.{name}" for number in layers}
    for label in labels:
        model.get_submodule(label).register_forward_hook(remember(label))
    shown = train(model, checkpoints=checkpoints)
    assert {dict(of)["layer"] for metric, of in shown if metric == "torch_moe_experts"} == labels
    for label in labels:
        counts = [
            np.bincount(np.concatenate([ids.ravel() for _, ids in seen[label][at : at + 2]]), minlength=8) for at in (0, 2, 4)
        ]
        total = np.sum(counts, axis=0)
        shares = total[total > 0] / total.sum()
        here = {
            (metric, dict(of).get("expert")): number for (metric, of), number in shown.items() if dict(of).get("layer") == label
        }
        assert here["torch_moe_experts", None] == 8
        assert here["torch_moe_load_imbalance_ratio", None] == pytest.approx(counts[-1].max() / counts[-1].mean(), rel=1e-12)
        assert here["torch_moe_effective_experts", None] == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-12)
        loads = {int(of): number for (metric, of), number in here.items() if metric == "torch_moe_expert_load_ratio"}
        assert len(loads) == 6
        assert all(number == pytest.approx(total[of] / total.mean(), rel=1e-12) for of, number in loads.items())
        logits = np.concatenate([logits for logits, _ in seen[label][-2:]])
        scores = 1 / (1 + np.exp(-logits)) if kind == "DeepseekV3" else np.exp(logits)
        p = scores / scores.sum(-1, keepdims=True)
        assert here["torch_moe_router_entropy", None] == pytest.approx(-(p * np.log(p)).sum(-1).mean(), abs=1e-5)


@pytest.mark.parametrize("kind", ["Mixtral", "DeepseekV3"])
def test_training_is_unchanged(kind: str) -> None:
    """Parameters are bit-identical with and without the option."""
    after = []
    for routers in (False, True):
        model = made(kind)
        train(model, routers=routers)
        after.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*after, strict=True))
