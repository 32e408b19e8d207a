"""The loads of experts: read from what routers return, counted on their device, and shown by layer."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from torch_grad_exporter.arguments import check_whole, shown
from torch_grad_exporter.inspection.layer_rows import KEPT
from torch_grad_exporter.inspection.measuring import dense
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.statistics.device import wide
from torch_grad_exporter.store.records import Inspected

# Characters of a name that `exporter.router` is given, at most.
LONGEST = 200

# Samples of a layer over which the use of its experts is judged: a batch of few documents leaves some of them idle.
WINDOW = 16

# Experts that are shown by themselves: this many of the most loaded, and of the least loaded.
ENDS = 3

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


def logits_and_indices(output: object) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the logits and the indices in what a router of Transformers returns: logits, weights, indices; None in other forms."""
    if not isinstance(output, tuple) or len(output) < 3 or not all(isinstance(part, torch.Tensor) for part in output[:3]):
        return None
    logits, weights, ids = (None if part.dim() < 2 else dense(part) for part in output[:3])
    if logits is None or weights is None or ids is None or weights.shape != ids.shape or not logits.is_floating_point():
        return None
    known = not ids.is_floating_point() and ids.dtype is not torch.bool and logits.shape[:-1].numel() == ids.shape[:-1].numel()
    return (logits, ids) if known else None


def check_arguments(name: object, given: object, experts: object) -> None:
    """Check the arguments of `router`; raise `TypeError` or `ValueError`."""
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


@dataclass(frozen=True, slots=True)
class SentLoad:
    """A layer in a record: its part of the vectors has the tokens of each expert, then the entropies of `tokens`, added up."""

    layer: str
    experts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LayerLoads:
    """What is shown of a layer; None where it is unknown.

    Attributes:
        experts: Their number.
        imbalance: The largest load of the last sample over the mean one.
        entropy: The mean over its tokens, in nats.
        effective: The exponential of the entropy of the shares, over the last samples.
        dead: Experts without a token in the last `WINDOW` samples; None before there are as many.
        ratios: Loads over the mean one, over the last samples, of the experts at both ends.
        sample: The number of the last sample.
    """

    experts: int
    imbalance: float
    entropy: float | None
    effective: float
    dead: int | None
    ratios: Mapping[int, float]
    sample: int


class RouterTotals:
    """The loads of layers that had tokens in the last samples. Belongs to the worker, but for `rows`, which is replaced only."""

    def __init__(self) -> None:
        self._windows: dict[str, deque[FloatArray]] = {}
        self.rows: Mapping[str, LayerLoads] = {}
        self._samples = 0

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take the counts of a round. Counts that are none, such as negative ones, leave their layer as it was."""
        assert isinstance(record.data, tuple)  # noqa: S101 - only `Routers` sends records of this name
        self._samples += 1
        vector = np.concatenate(values)
        rows = {layer: row for layer, row in self.rows.items() if self._samples - row.sample < KEPT}
        for part in record.data:
            counts, (entropies, *_), vector = np.split(vector, [part.experts, part.experts + 1])
            if counts.min() >= 0 and 0 < counts.sum() < np.inf:
                entropy = float(entropies) / part.tokens if part.tokens and math.isfinite(entropies) else None
                rows[part.layer] = self._row(part.layer, counts, entropy)
        self.rows = rows

    def _row(self, layer: str, counts: FloatArray, entropy: float | None) -> LayerLoads:
        window = self._windows.setdefault(layer, deque(maxlen=WINDOW))
        if window and len(window[0]) != len(counts):
            window.clear()
        window.append(counts)
        recent = np.sum(window, axis=0)
        ratios = recent / recent.mean()
        shares = recent[recent > 0] / recent.sum()
        order = np.argsort(-ratios, kind="stable").tolist()
        ends = order if len(order) <= 2 * ENDS else order[:ENDS] + order[-ENDS:]
        return LayerLoads(
            experts=len(counts),
            imbalance=float(counts.max() / counts.mean()),
            entropy=entropy,
            effective=float(np.exp(-np.sum(shares * np.log(shares)))),
            dead=int(np.count_nonzero(recent == 0)) if len(window) == WINDOW else None,
            ratios={expert: float(ratios[expert]) for expert in ends},
            sample=self._samples,
        )
