"""Attention of Transformers' models, with random weights: each number against float64 logits of the layer's queries and keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.support.scrape import errors, value
from torch_grad_exporter import start_exporter

NAMES = ("max_logit", "entropy", "logit_bound")


def llama(implementation: str) -> nn.Module:
    """Return a model with rotary embeddings and two heads of queries to one of keys."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        attn_implementation=implementation, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2(implementation: str) -> nn.Module:
    """Return a model with fused projections."""
    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=4, attn_implementation=implementation)
    return GPT2LMHeadModel(config)


class QueriesAndKeys:
    """The queries and keys of the first layer of attention, as hooks on its projections see them."""

    def __init__(self, model: Any) -> None:
        self._parts: dict[str, torch.Tensor] = {}
        if isinstance(model, GPT2LMHeadModel):
            self.layer = "transformer.h.0.attn"
            self._hook("qkv", model.transformer.h[0].attn.c_attn)
        else:
            self.layer = "model.layers.0.self_attn"
            attention = model.model.layers[0].self_attn
            self._hook("q", attention.q_proj)
            self._hook("k", attention.k_proj)
            model.model.rotary_emb.register_forward_hook(lambda _m, _a, out: self._parts.update(cos=out[0], sin=out[1]))

    def _hook(self, name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda _m, _a, out: self._parts.update({name: out.detach().double()}))

    def expected(self, padding: torch.Tensor) -> dict[str, float]:
        """Return the values by their definitions; `padding`: which tokens are there, shape (batch, length)."""
        parts = self._parts
        q, k = parts["qkv"].chunk(3, -1)[:2] if "qkv" in parts else (parts["q"], parts["k"])
        q, k = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k))
        if "cos" in parts:
            q, k = apply_rotary_pos_emb(q, k, parts["cos"].double(), parts["sin"].double())
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        logits = q @ k.mT / math.sqrt(8)
        seen = padding[:, None, None, :] & torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        logits = logits.masked_fill(~seen, -math.inf)
        known = (logits > -math.inf).any(-1)
        bound = (q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1)).max() / math.sqrt(8)
        entropy = torch.special.entr(logits[known].softmax(-1)).sum(-1).mean()
        return dict(zip(NAMES, map(float, (logits.max(), entropy, bound)), strict=True))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("made", [llama, gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("padded", [False, True])
def test_values(made: Any, implementation: str, padded: bool) -> None:
    """The values are those of queries and keys after rotary embeddings; the bound is absent where attention is written out."""
    torch.manual_seed(0)
    model = made(implementation)
    kept = QueriesAndKeys(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens, mask = torch.randint(1, 50, (3, 16)), torch.ones(3, 16, dtype=torch.long)
    if padded:
        mask[1, 10:] = 0
    with start_exporter(model, None, every=1, attention=True) as exporter:
        model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
        optimizer.step()
        expected: dict[str, float | None] = {**kept.expected(mask.bool())}
        found = {name: value(exporter, f"torch_attention_{name}", layer=kept.layer) for name in NAMES}
        if implementation == "eager":
            assert found.pop("logit_bound") is None
            del expected["logit_bound"]
        assert found == pytest.approx(expected, rel=1e-5)
        assert errors(exporter) == {}
