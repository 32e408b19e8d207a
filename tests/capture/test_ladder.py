"""The ladder of rungs: how many rounds without a backward that is seen cost one of them."""

from __future__ import annotations

import torch

from tests.support.models import Perceptron, batch
from torch_grad_exporter.capture.accumulate_grad import AccumulateGradNodes
from torch_grad_exporter.capture.gradient_versions import GradientProbes
from torch_grad_exporter.capture.ladder import Ladder
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.transfer.outcomes import Mode


def test_each_rung_has_two_misses_of_its_own() -> None:
    """Two in a row cost a rung; what the rung above has missed is not held against the next one, nor what was before a success."""
    ladder = Ladder(AccumulateGradNodes(), GradientProbes(), Optimizers(LayerIndex({"": Perceptron()})))
    modes = []
    for seen in (False, True, False, False, False, True, False, False):
        if seen:
            ladder.seen()
        else:
            ladder.missed(compiled=False, lower=True)
        modes.append(ladder.mode)
    assert modes == [Mode.OUTPUT] * 3 + [Mode.PARAMETER] * 4 + [Mode.OPTIMIZER]


def test_the_rung_between_is_left_out_where_it_would_see_no_more() -> None:
    """Where hooked nodes saw no backward either, the second miss leads to the step at once."""
    ladder = Ladder(AccumulateGradNodes(), GradientProbes(), Optimizers(LayerIndex({"": Perceptron()})))
    ladder.missed(compiled=False, lower=True)
    assert ladder.mode is Mode.OUTPUT
    ladder.missed(compiled=False, lower=False)
    assert ladder.mode is Mode.OPTIMIZER


def test_detectors_follow_what_is_trained() -> None:
    """One that is frozen reports no backward, so another one takes its place; one that is trained stays."""
    model = Perceptron()
    index = LayerIndex({"": model})
    ladder = Ladder(AccumulateGradNodes(), GradientProbes(), Optimizers(index), Mode.PARAMETER)
    seen: list[torch.Tensor] = []

    def backward() -> list[int]:
        """The sizes of the gradients that detectors report, after a sample of all that is trained."""
        table = index.refresh()
        trained = {i for i, one in enumerate(table.tracked) if one.parameter().requires_grad}
        ladder.follow(table, trained, [seen.append])
        seen.clear()
        model(batch()).square().mean().backward()
        return sorted(gradient.numel() for gradient in seen)

    bias, first, second = (one.numel() for one in (model.second.bias, model.first.weight, model.second.weight))
    assert backward() == [bias, first]
    model.first.requires_grad_(False)
    assert backward() == [bias, second]
    model.first.requires_grad_(True)
    assert backward() == [bias, second]
