"""Faults that the demo injects from outside, so that one can see how each shows in the metrics."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

EXPLODE_STEPS = 5

# Below the exporter's logger, so that both are shown alike.
logger = logging.getLogger("torch_grad_exporter.demo")


@dataclass(frozen=True, slots=True)
class DemoFault:
    """A fault that can be injected: what happens, and which metrics show it."""

    effect: str
    watch: str


KINDS: dict[str, DemoFault] = {
    "nan": DemoFault(
        "the gradient of one layer is NaN for one step while the loss is finite",
        "torch_grad_nonfinite_steps_total, torch_grad_nonfinite_elements_total",
    ),
    "explode": DemoFault(
        f"every gradient is 10,000 times as large for {EXPLODE_STEPS} steps",
        "torch_grad_global_norm, torch_grad_global_norm_spikes_total, torch_grad_clip_coefficient",
    ),
    "vanish": DemoFault("from then on a billionth of the gradient reaches the first half of the model", "torch_grad_norm by layer"),
    "dead": DemoFault("from then on all ReLU units of one layer are dead", "torch_grad_zero_units_ratio, torch_grad_dead_ratio"),
    "stall": DemoFault(
        "the loop hangs for ten minutes, or SECONDS with stall@STEP:SECONDS", "torch_train_last_step_timestamp_seconds"
    ),
}


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault and the step, counted from 1, at which it begins; `seconds` is the length of a stall."""

    kind: str
    step: int
    seconds: float = 600.0


class Trouble:
    """The chosen faults of a training, which it spoils. Logs when each begins."""

    def __init__(self, blocks: nn.ModuleList, injections: tuple[Injection, ...]) -> None:
        middle = blocks[(len(blocks) - 1) // 2]
        assert isinstance(middle, nn.TransformerEncoderLayer)  # noqa: S101 - for the type checker
        self._middle = middle
        self._injections = injections

    def begin(self, step: int) -> None:
        """Start the faults that begin at this step; a stall happens in here."""
        for injection in self._injections:
            if injection.step != step:
                continue
            kind = KINDS[injection.kind]
            logger.warning("step %d: %s: %s; watch %s", step, injection.kind, kind.effect, kind.watch)
            if injection.kind == "vanish":
                self._middle.register_forward_hook(_vanish)
            elif injection.kind == "dead":
                with torch.no_grad():
                    self._middle.linear1.bias.fill_(-1e4)
            elif injection.kind == "stall":
                time.sleep(injection.seconds)

    def spoil(self, loss: Tensor, step: int) -> Tensor:
        """Return the loss whose gradient is taken instead of that of the true one."""
        for injection in self._injections:
            if injection.kind == "nan" and injection.step == step:
                # A classic: a penalty on the distance to a copy of the weight. It is 0, and so harmless in
                # the loss, but the square root's slope at 0 is infinite, and infinity times 0 is NaN.
                weight = self._middle.linear2.weight
                loss = loss + (weight - weight.detach()).square().sum().sqrt()
            if injection.kind == "explode" and injection.step <= step < injection.step + EXPLODE_STEPS:
                loss = loss * 1e4
        return loss


def _vanish(_module: nn.Module, _inputs: object, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * 1e-9)  # type: ignore[no-untyped-call] # torch leaves it untyped
