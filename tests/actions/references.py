"""The policies once more, from their papers: in float64, in plain loops over numpy arrays, with nothing of the package.

Each takes the gradients of a step by name of parameter, and returns them clipped with the thresholds that it used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from tests.support.models import Conv1D

Array = npt.NDArray[np.float64]
Arrays = Mapping[str, Array]
Clipped = tuple[dict[str, Array], list[float]]

OTHER_AXES = {
    "linear.weight": (1,), "conv.weight": (1, 2, 3), "transposed.weight": (0, 2, 3), "gpt.weight": (0,), "embedding.weight": (1,),
    "first.weight": (1,), "second.weight": (1,), "experts.weight": (2,),
}  # fmt: skip
"""Of parameters with several units: the axes that lie within one unit."""


class Zoo(torch.nn.Module):
    """One layer of each kind whose units lie differently."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 4)
        self.conv = torch.nn.Conv2d(2, 3, 3)
        self.transposed = torch.nn.ConvTranspose2d(2, 3, 3)
        self.gpt = Conv1D(6, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.embedding = torch.nn.Embedding(7, 3)


def layer(name: str) -> str:
    """The layer of a parameter of the zoo."""
    return name.partition(".")[0]


def whole(gradients: Arrays) -> float:
    """The norm of all gradients."""
    return math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))


def by_layer(gradients: Arrays) -> dict[str, dict[str, Array]]:
    """The gradients of each layer."""
    layers: dict[str, dict[str, Array]] = {}
    for name, gradient in gradients.items():
        layers.setdefault(layer(name), {})[name] = gradient
    return layers


def scaled(gradients: Arrays, factor: float) -> dict[str, Array]:
    """All of them, multiplied."""
    return {name: gradient * factor for name, gradient in gradients.items()}


def to_norm(gradients: Arrays, threshold: float) -> dict[str, Array]:
    """As clip_grad_norm_ does it."""
    return scaled(gradients, min(1.0, threshold / (whole(gradients) + 1e-6)))


def unit_norms(name: str, tensor: Array) -> Array:
    """The norm of each unit, in a shape that multiplies the tensor."""
    return np.asarray(np.sqrt((tensor**2).sum(axis=OTHER_AXES.get(name), keepdims=True)))


class Reference:
    """A policy that treats each part of the gradients alike: the whole, or each layer."""

    def __init__(self, scope: str = "model") -> None:
        self.scope = scope

    def step(self, gradients: Arrays, weights: Arrays) -> Clipped:
        """One step."""
        parts = by_layer(gradients) if self.scope == "layer" else {"": gradients}
        clipped: dict[str, Array] = {}
        thresholds = []
        for part, own in parts.items():
            changed, threshold = self.part(part, own)
            clipped.update(changed)
            thresholds.append(threshold)
        return clipped, thresholds

    def part(self, part: str, gradients: Arrays) -> tuple[dict[str, Array], float]:
        """One part's gradients, clipped, and the threshold for its norm."""
        raise NotImplementedError


class MaxNorm(Reference):
    """Pascanu et al. 2013."""

    def __init__(self, max_norm: float, scope: str = "model") -> None:
        super().__init__(scope)
        self.max_norm = max_norm

    def part(self, part: str, gradients: Arrays) -> tuple[dict[str, Array], float]:
        return to_norm(gradients, self.max_norm), self.max_norm


class MaxNormOfUnits:
    """The same for each unit."""

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def step(self, gradients: Arrays, weights: Arrays) -> Clipped:
        limits = [self.max_norm] * sum(unit_norms(name, g).size for name, g in gradients.items())
        return {n: g * np.minimum(1, self.max_norm / (unit_norms(n, g) + 1e-6)) for n, g in gradients.items()}, limits


class MaxValue:
    """Mikolov 2012."""

    def __init__(self, value: float) -> None:
        self.value = value

    def step(self, gradients: Arrays, weights: Arrays) -> Clipped:
        return {name: np.clip(g, -self.value, self.value) for name, g in gradients.items()}, [self.value]


class LayerScale:
    """A product."""

    def __init__(self, factors: Mapping[str, float]) -> None:
        self.factors = factors

    def step(self, gradients: Arrays, weights: Arrays) -> Clipped:
        return {n: g * self.factors.get(layer(n), 1.0) for n, g in gradients.items()}, [math.inf] * len(by_layer(gradients))


class AutoClip(Reference):
    """Seetharaman et al. 2020, algorithm 1: append the norm, take the percentile, clip to it."""

    def __init__(self, percentile: float, history_size: int, scope: str = "model") -> None:
        super().__init__(scope)
        self.percentile, self.size = percentile, history_size
        self.history: dict[str, list[float]] = {}

    def part(self, part: str, gradients: Arrays) -> tuple[dict[str, Array], float]:
        history = self.history.setdefault(part, [])
        history.append(whole(gradients))
        threshold = float(np.percentile(history[-self.size :], self.percentile))
        return to_norm(gradients, threshold), threshold


class ZClip(Reference):
    """Kumar et al. 2025: z-score of the norm, reciprocal adjustment, averages of the adjusted norm."""

    def __init__(self, alpha: float, z_thresh: float, warmup: int, max_norm: float = math.inf, scope: str = "model") -> None:
        super().__init__(scope)
        self.alpha, self.z_thresh, self.warmup, self.max_norm = alpha, z_thresh, warmup, max_norm
        self.first: dict[str, list[float]] = {}
        self.moments: dict[str, tuple[float, float]] = {}

    def part(self, part: str, gradients: Arrays) -> tuple[dict[str, Array], float]:
        norm = whole(gradients)
        if part not in self.moments:
            first = self.first.setdefault(part, [])
            first.append(norm)
            if len(first) == self.warmup:
                self.moments[part] = (float(np.mean(first)), float(np.var(first)))
            return (to_norm(gradients, self.max_norm) if norm > self.max_norm else dict(gradients)), self.max_norm
        mean, variance = self.moments[part]
        deviation = math.sqrt(variance)
        z = (norm - mean) / (deviation + 1e-6)
        target = mean + self.z_thresh * deviation / (z / self.z_thresh) if z > self.z_thresh else norm
        threshold = min(mean + self.z_thresh * (deviation + 1e-6), self.max_norm)
        new = self.alpha * mean + (1 - self.alpha) * target
        self.moments[part] = (new, self.alpha * variance + (1 - self.alpha) * (target - new) ** 2)
        allowed = min(target, self.max_norm)
        return (to_norm(gradients, allowed) if norm > allowed else dict(gradients)), threshold


class AGC:
    """Brock et al. 2021, equation 3."""

    def __init__(self, clip_factor: float, eps: float, scope: str = "unit") -> None:
        self.factor, self.eps, self.scope = clip_factor, eps, scope

    def step(self, gradients: Arrays, weights: Arrays) -> Clipped:
        clipped: dict[str, Array] = {}
        thresholds: list[float] = []
        if self.scope == "layer":
            for part, own in by_layer(gradients).items():
                limit = self.factor * max(self.eps, whole({n: w for n, w in weights.items() if layer(n) == part}))
                clipped.update(scaled(own, limit / whole(own)) if whole(own) > limit else own)
                thresholds.append(limit)
            return clipped, thresholds
        for name, gradient in gradients.items():
            limits = self.factor * np.maximum(unit_norms(name, weights[name]), self.eps)
            norms = unit_norms(name, gradient)
            clipped[name] = np.where(norms > limits, gradient * (limits / np.maximum(norms, 1e-6)), gradient)
            thresholds += limits.reshape(-1).tolist()
        return clipped, thresholds


class Plateau(Reference):
    """ReduceLROnPlateau's rule on the limit; `epochs` has the losses of each epoch so far."""

    def __init__(self, max_norm: float, factor: float, patience: int, min_norm: float = 0.0, scope: str = "model") -> None:
        super().__init__(scope)
        self.limit, self.factor, self.patience, self.min_norm = max_norm, factor, patience, min_norm
        self.best, self.bad = math.inf, 0

    def epoch(self, losses: list[float]) -> None:
        """An epoch has ended."""
        loss = sum(losses) / len(losses)
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        if self.bad == self.patience:
            self.limit, self.bad = max(self.limit * self.factor, self.min_norm), 0

    def part(self, part: str, gradients: Arrays) -> tuple[dict[str, Array], float]:
        return to_norm(gradients, self.limit), self.limit


def arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """In float64."""
    return {name: tensor.detach().double().numpy().copy() for name, tensor in tensors.items()}
