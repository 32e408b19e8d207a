"""A layer that is removed gives its row to another one, and leaves it nothing but room."""

from __future__ import annotations

import math

import numpy as np
from torch import nn

from tests.aggregation.test_gradients import NOW, aggregation, captured, closed, model, row, shown
from tests.aggregation.test_moments import Run, of
from torch_grad_exporter.aggregation.gradients import GradientAggregation
from torch_grad_exporter.model.layers import LayerIndex, ParameterTable


def sample(to: GradientAggregation, table: ParameterTable, number: int, norms: dict[str, float]) -> None:
    """One sample of the first parameter of each of these layers."""
    first = {layer: table.layer_of.tolist().index(table.layers.index(layer)) for layer in norms}
    owners = np.zeros(len(table.tracked), dtype=np.int64)
    to.apply(captured(number, {first[layer]: row(norm) for layer, norm in norms.items()}, table=table, owners=owners))
    to.apply(closed(number, owners=owners))


def test_a_new_layer_is_not_judged_by_the_past_of_a_removed_one() -> None:
    """Thirty samples of the removed layer are no past of the layer in its place: norms 1,000 times as large have no verdict."""
    module = model()
    index = LayerIndex({"": module})
    it = aggregation(index.table)
    for number in range(1, 31):
        sample(it, index.table, number, {"a": 1.0 + number % 3 / 10, "b": 2.0})
    del module["a"]
    module["c"] = nn.Linear(3, 4)
    table = index.refresh()
    assert table.layers == ("b", "c")
    for number in range(31, 41):
        sample(it, table, number, {"b": 2.0, "c": 1000.0})
    found = it.snapshot(NOW)
    assert math.isnan(shown(found, "c", "zscore"))
    assert [shown(found, layer, "spikes") for layer in table.layers] == [0, 0]
    assert [shown(found, layer, "captures") for layer in table.layers] == [40, 10]
    assert not math.isnan(shown(found, "b", "zscore"))


def test_a_layer_that_was_removed_and_added_again_between_two_moments_has_a_sample() -> None:
    """The history has the ratios of its first sample, though fewer samples are counted than at the moment before."""
    module = model()
    index = LayerIndex({"": module})
    it = Run(aggregation(index.table))
    for number in (1, 2, 3):
        sample(it.gradients, index.table, number, {"a": 3.0, "b": 4.0})
    it.look()
    del module["a"]
    it.gradients.use(index.refresh())
    module["a"] = nn.Linear(3, 4)
    sample(it.gradients, index.refresh(), 4, {"a": 5.0})
    moment = it.look()
    assert list(moment.layers) == ["b", "a"]
    assert np.isnan(of(moment, "zero_ratio")).tolist() == [True, False]
    assert of(moment, "norm")[1] == 5.0
