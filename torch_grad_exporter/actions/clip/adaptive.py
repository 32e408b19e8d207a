"""Policies with a memory: the threshold follows the norms, or the loss, of the training so far.

A norm that is not finite, or exactly 0, enters no memory. All memories are float64 if the device has it: a variance that is
small against its mean is lost in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from torch_grad_exporter.actions.clip.policy import (
    EPSILON,
    Decision,
    GradientNorms,
    Memory,
    NormGroups,
    Policy,
    Scope,
    finite,
    remembered,
    shrink,
)
from torch_grad_exporter.arguments import check_number, check_whole


@dataclass(frozen=True)
class AutoClip(Policy):
    """Norms are at most the `percentile` of all norms so far, including that of this step, as by `MaxNorm`.

    Source: P. Seetharaman, G. Wichern, B. Pardo, J. Le Roux, "AutoClip: Adaptive Gradient Clipping for Source Separation
    Networks" (arXiv:2007.14469), algorithm 1. Percentiles are interpolated linearly, as numpy does. The paper keeps every norm;
    here the last `history_size` are kept.
    """

    percentile: float = 10.0
    history_size: int = 1000
    scope: Scope = "model"

    def __post_init__(self) -> None:
        check_number(self.shown("percentile"), self.percentile, most=100.0, example=10.0)
        check_whole(self.shown("history_size"), self.history_size, example=1000)
        self.check_scope("model", "layer")

    def start(self, groups: NormGroups, /) -> Memory:
        """Return an empty history. Places without a norm hold infinity, which sorts behind all norms."""
        return {"history": groups.full(math.inf, self.history_size), "count": groups.full(0, dtype=torch.int64)}

    def decide(self, measured: GradientNorms, memory: Memory, /) -> Decision:
        """Enter the norms into the history, and take its percentile."""
        history, count = memory["history"], memory["count"]
        norms = measured.norms.to(history.dtype)
        entered = remembered(norms)
        # A ring: the newest norm replaces the oldest. A norm that is not remembered writes back what is there.
        place = (count % self.history_size)[None]
        history.scatter_(0, place, torch.where(entered, norms[None], history.gather(0, place)))
        count += entered
        threshold = self._percentile(history.sort(dim=0).values, count.clamp(max=self.history_size))
        # A threshold may be 0, and 0 over a norm that is not finite is NaN.
        return Decision(threshold, torch.where(finite(norms), shrink(norms, threshold), 1.0))

    def _percentile(self, ordered: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return the percentile of the first `count` ordered norms, infinity if there are none."""
        last = (count - 1).clamp(min=0)
        place = last.to(ordered.dtype) * (self.percentile / 100)
        low = place.floor().long()
        below = ordered.gather(0, low[None])[0]
        above = ordered.gather(0, torch.minimum(low + 1, last)[None])[0]
        return torch.where(count > 0, below + (above - below) * (place - low), math.inf)


@dataclass(frozen=True)
class ZClip(Policy):
    """A norm that lies more than `z_thresh` standard deviations above its moving mean is a spike, and is clipped.

    Source: A. Kumar, L. Owen, N. R. Chowdhury, F. Güra, "ZClip: Adaptive Spike Mitigation for LLM Pre-Training"
    (arXiv:2504.02507), with the small constant of the authors' program. With the z-score `z = (norm - mean) / (std + 1e-6)`,
    a norm with `z > z_thresh` becomes `mean + z_thresh² / z * std`. Mean and variance are moving averages with the weight
    `alpha`, into which the clipped norm enters; they begin with those of the first `warmup_steps` norms, which are not clipped.
    `max_norm` is a limit for all steps, those too; the authors' program has 1.0 there by default.
    """

    alpha: float = 0.97
    z_thresh: float = 2.5
    warmup_steps: int = 25
    max_norm: float | None = None
    scope: Scope = "model"

    def __post_init__(self) -> None:
        check_number(self.shown("alpha"), self.alpha, above=0.0, most=1.0, example=0.97)
        if self.alpha == 1:
            raise ValueError("ZClip(alpha=1): expected a number below 1, such as 0.97: the mean would never change")
        check_number(self.shown("z_thresh"), self.z_thresh, above=0.0, example=2.5)
        check_whole(self.shown("warmup_steps"), self.warmup_steps, least=2, example=25)  # one norm has no deviation
        if self.max_norm is not None:
            check_number(self.shown("max_norm"), self.max_norm, above=0.0, example=1.0)
        self.check_scope("model", "layer")

    def start(self, groups: NormGroups, /) -> Memory:
        """Return a memory of no norms."""
        return {"mean": groups.full(0.0), "variance": groups.full(0.0), "count": groups.full(0, dtype=torch.int64)}

    def decide(self, measured: GradientNorms, memory: Memory, /) -> Decision:
        """Compare the norms with mean and deviation before this step, then enter them."""
        mean, deviation = memory["mean"], memory["variance"].sqrt()
        norms, warm = measured.norms.to(mean.dtype), memory["count"] < self.warmup_steps
        scaled = (norms - mean) / (deviation + EPSILON)
        spike = ~warm & (scaled > self.z_thresh)
        effective = torch.where(spike, mean + deviation * (self.z_thresh**2 / scaled), norms)
        threshold = torch.where(warm, math.inf, mean + self.z_thresh * (deviation + EPSILON))
        allowed = effective
        if self.max_norm is not None:
            allowed, threshold = effective.clamp(max=self.max_norm), threshold.clamp(max=self.max_norm)
        clipped = (norms > allowed) & finite(norms)
        self._enter(effective, remembered(norms), warm, memory)
        return Decision(threshold, torch.where(clipped, allowed / (norms + EPSILON), 1.0))

    def _enter(self, norms: torch.Tensor, entered: torch.Tensor, warm: torch.Tensor, memory: Memory) -> None:
        """Update mean and variance: plain ones during the warm-up, then moving ones."""
        mean, variance, count = memory["mean"], memory["variance"], memory["count"]
        weight = torch.where(warm, 1 / (count.to(mean.dtype) + 1), 1 - self.alpha)
        delta = norms - mean
        later = mean + weight * delta
        # A plain variance takes the deviations from the means before and after, a moving one twice that from the mean after.
        squares = (norms - later) * torch.where(warm, delta, norms - later)
        spread = (1 - weight) * variance + weight * squares
        memory["mean"] = torch.where(entered, later, mean)
        memory["variance"] = torch.where(entered, spread, variance)
        count += entered


@dataclass(frozen=True)
class Plateau(Policy):
    """Like `MaxNorm`, with a limit that is multiplied by `factor` after `patience` epochs in a row without a smaller loss.

    Source: the rule of `torch.optim.lr_scheduler.ReduceLROnPlateau`, applied to the limit. But that one, and clipping made with
    it, acts one epoch later, after `patience + 1` of them, and takes only a loss that is smaller by a ten-thousandth for better.

    `observe(loss)` of the clipper gives it the loss of an epoch; `observe(loss, epoch=)` any number of losses per epoch, whose mean
    counts once the next epoch begins. All ranks have to observe the same loss, such as its mean over them: limits that differ make
    replicas differ.
    """

    max_norm: float = 1.0
    factor: float = 0.5
    patience: int = 10
    min_norm: float = 0.0
    scope: Scope = "model"
    needs_loss: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self.shown("max_norm"), self.max_norm, above=0.0, example=1.0)
        check_number(self.shown("factor"), self.factor, above=0.0, most=1.0, example=0.5)
        check_whole(self.shown("patience"), self.patience, example=10)
        check_number(self.shown("min_norm"), self.min_norm, most=self.max_norm, example=0.01)
        self.check_scope("model", "layer", "unit")

    def start(self, groups: NormGroups, /) -> Memory:
        """Return one limit for all groups, before the first epoch."""
        first = {"max_norm": float(self.max_norm), "best": math.inf, "bad_epochs": 0.0, "loss": 0.0, "losses": 0.0}
        return {name: torch.full((), value, device=groups.device, dtype=groups.dtype) for name, value in first.items()}

    def decide(self, measured: GradientNorms, memory: Memory, /) -> Decision:
        """Apply the present limit to all groups."""
        limit = memory["max_norm"]
        return Decision(limit, shrink(measured.norms.to(limit.dtype), limit))

    def observe(self, loss: torch.Tensor, memory: Memory, /) -> None:
        """Add a loss to its epoch."""
        memory["loss"] += loss
        memory["losses"] += 1

    def end_epoch(self, memory: Memory, /) -> None:
        """Judge the epoch by its mean loss. A loss that is NaN is not smaller. Without a loss nothing changes."""
        seen, loss = memory["losses"] > 0, memory["loss"] / memory["losses"].clamp(min=1)
        better = seen & (loss < memory["best"])
        memory["best"] = torch.where(better, loss, memory["best"])
        bad = torch.where(better, 0.0, memory["bad_epochs"] + seen)
        # No `if` anywhere: it would wait for the device.
        enough = bad >= self.patience
        smaller = (memory["max_norm"] * self.factor).clamp(min=self.min_norm)
        memory["max_norm"] = torch.where(enough, smaller, memory["max_norm"])
        memory["bad_epochs"] = torch.where(enough, 0.0, bad)
        memory["loss"], memory["losses"] = torch.zeros_like(loss), torch.zeros_like(loss)
