"""What routers return: how it is read, and how tokens are counted, on their device and without waiting for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from torch_grad_exporter.arguments import check_whole, shown
from torch_grad_exporter.inspection.tensors import dense
from torch_grad_exporter.statistics.device import wide

# Characters of a name that `exporter.router` is given, at most.
LONGEST = 200

# Routers of Transformers, by the start of their class: what makes probabilities of their logits.
SOFTMAX = frozenset((
    "AriaText", "DeepseekV2", "Ernie4_5_Moe", "FlexOlmo", "GptOss", "GraniteMoe", "GraniteMoeHybrid", "GraniteMoeShared", "Jamba",
    "Mellum", "MiniMax", "Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Qwen3OmniMoeThinkerText", "Qwen3VLMoeText",
    "Qwen3_5Moe",
))  # fmt: skip
SIGMOID = frozenset((
    "Cohere2Moe", "DeepseekV3", "DeepseekV32", "Dots1", "ExaoneMoe", "Glm4Moe", "Glm4MoeLite", "Glm4vMoeText", "GlmMoeDsa",
    "KimiLinear", "Lfm2Moe", "MiMoV2Flash", "MiniMaxM2", "NemotronH", "SolarOpen",
))  # fmt: skip


@dataclass(slots=True, eq=False)
class Load:
    """Tokens by expert, shape (experts,), and the entropies of `tokens` added up, shape (1,). Never changed in place."""

    counts: torch.Tensor
    entropies: torch.Tensor | None = None
    tokens: int = 0

    def __add__(self, other: Load) -> Load:
        entropies = [each for each in (self.entropies, other.entropies) if each is not None]
        return Load(self.counts + other.counts, sum(entropies[1:], entropies[0]) if entropies else None, self.tokens + other.tokens)


@torch.no_grad()
def load_of(values: torch.Tensor, experts: int | None) -> Load:
    """Return a copy of counts; of indices how often each expert is among them, without others such as -1."""
    dtype = wide(values.device)
    if experts is None:
        return Load(values.to(dtype, copy=True))
    flat = values.reshape(-1).long()
    places = torch.where((flat >= 0) & (flat < experts), flat, experts)  # an index beyond would end the CUDA context
    counts = torch.zeros(experts + 1, dtype=dtype, device=values.device)
    return Load(counts.scatter_add_(0, places, torch.ones_like(places, dtype=dtype))[:experts])


def entropies_of(router: torch.nn.Module, logits: torch.Tensor) -> torch.Tensor | None:
    """Return the entropies of a router's probabilities for all tokens, added up, shape (1,); None if they are not known."""
    names = (re.sub("Top[Kk]Router$", "", kind.__name__) for kind in type(router).__mro__)
    known = next((name for name in names if name in SOFTMAX or name in SIGMOID), None)
    if known in SOFTMAX:
        probabilities = logits.float().softmax(-1)
    elif known in SIGMOID:
        scores = logits.float().sigmoid()
        probabilities = scores / scores.sum(-1, keepdim=True)
    else:
        return None
    entropies: torch.Tensor = torch.special.entr(probabilities)
    return entropies.sum(dtype=wide(logits.device)).reshape(1)


def read(output: object) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the logits and the indices in what a router of Transformers returns: logits, weights, indices; None in other forms."""
    if not isinstance(output, tuple) or len(output) < 3 or not all(isinstance(part, torch.Tensor) for part in output[:3]):
        return None
    logits, weights, ids = (None if part.dim() < 2 else dense(part) for part in output[:3])
    if logits is None or weights is None or ids is None or weights.shape != ids.shape or not logits.is_floating_point():
        return None
    known = not ids.is_floating_point() and ids.dtype is not torch.bool and logits.shape[:-1].numel() == ids.shape[:-1].numel()
    return (logits, ids) if known else None


def check(name: object, given: object, experts: object) -> None:
    """Check the arguments of `router`.

    Raises:
        TypeError: An argument is of a wrong type; the message names it, the value and the fix.
        ValueError: An argument is wrong; likewise.
    """
    if not isinstance(name, str):
        raise TypeError(f"router(name={shown(name)}): expected a name")
    if not 1 <= len(name) <= LONGEST:
        raise ValueError(f"router(name={name[:20]!r}): expected a name of 1 to {LONGEST} characters")
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"router({name!r}, {shown(given)}): expected a tensor of counts or indices")
    if given.dtype is torch.bool or given.is_complex():
        raise TypeError(f"router({name!r}, ...): expected counts or indices, got a tensor of {given.dtype}")
    if experts is not None:
        check_whole(f"router({name!r}, experts={shown(experts)})", experts, least=1, what="the number of experts", example=8)
    if experts is None and given.dim() != 1:
        raise ValueError(
            f"router({name!r}, ...): expected counts of shape (experts,), got {tuple(given.shape)}; for indices give experts="
        )
    if experts is not None and given.is_floating_point():
        raise TypeError(
            f"router({name!r}, ...): with experts= expected indices, got a tensor of {given.dtype}; for counts leave it out"
        )
