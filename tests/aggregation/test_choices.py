"""Which parameters are of which layer is worked out when it changes, not at each sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from torch import nn

from tests.aggregation.test_gradients import captured, closed, row
from torch_grad_exporter.aggregation.gradients import GradientAggregation
from torch_grad_exporter.aggregation.samples import Choice, Choices
from torch_grad_exporter.metrics.families import BoolArray
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.parameters import ParameterTable


def table() -> ParameterTable:
    """Layer `a` with two parameters, at positions 0 and 1, layer `b` with one, at position 2."""
    return LayerIndex({"": nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2, bias=False)})}).table


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """What was asked for each time that a choice was worked out."""
    found: list[list[bool]] = []
    of = Choice.of

    def counted(of_table: ParameterTable, wanted: BoolArray) -> Choice:
        found.append(wanted.tolist())
        return of(of_table, wanted)

    monkeypatch.setattr(Choice, "of", counted)
    return found


def publish(totals: GradientAggregation, numbers: Sequence[int], of: ParameterTable, owners: Sequence[int] = (0, 0, 0)) -> None:
    """Samples in which all parameters get a gradient, whose norm is the number of the sample, and the first optimizer steps."""
    for number in numbers:
        totals.apply(captured(number, {place: row(number) for place in range(3)}, table=of, owners=owners))
        totals.apply(closed(number, owners=owners))


def test_the_same_parameters_are_grouped_once(worked_out: list[list[bool]]) -> None:
    """However many samples there are; where other parameters have gradients, or there is another table, once more."""
    totals, first, second = GradientAggregation(), table(), table()
    totals.use(first)
    publish(totals, range(1, 50), first)
    assert worked_out == [[True, True, True]]
    publish(totals, range(50, 60), first, owners=(0, 0, 1))
    publish(totals, range(60, 70), first)
    assert worked_out[1:] == [[True, True, False]]
    publish(totals, range(70, 80), second)
    assert worked_out[2:] == [[True, True, True]]
    norms = totals.snapshot(0.0).layer_values["norm"]
    assert norms == pytest.approx([79 * 2**0.5, 79])


def test_of_parameters_that_change_each_time_few_choices_are_kept(worked_out: list[list[bool]]) -> None:
    """As of experts of which each sample reaches others."""
    made, layers = Choices(), nn.ModuleDict({f"{i}": nn.Linear(1, 1, bias=False) for i in range(8)})
    of = LayerIndex({"": layers}).table
    for number in range(200):
        wanted = np.array([bool(number >> place & 1) for place in range(8)])
        assert made.of(of, wanted).layers.tolist() == np.flatnonzero(wanted).tolist()
        assert len(made._known) <= Choices.MOST + 1
    assert len(worked_out) == 200
