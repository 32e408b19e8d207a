"""The ladder of rungs: how many rounds without a backward that is seen cost one of them."""

from __future__ import annotations

from tests.support.models import Perceptron
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
            ladder.missed(compiled=False, fully_sharded=False)
        modes.append(ladder.mode)
    assert modes == [Mode.OUTPUT] * 3 + [Mode.PARAMETER] * 4 + [Mode.OPTIMIZER]
