"""What is shown of a layer of which this rank has only a part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.aggregation.test_gradients import NAN, NOW, PLAN, aggregation, captured, closed, row
from torch_grad_exporter.collectors.gradients import GRAD_NORM, GRAD_SHARD_NORM, GradientCollector
from torch_grad_exporter.metrics.families import Spec
from torch_grad_exporter.transfer.events import Outcome


def test_the_norm_of_a_part_is_shown_when_its_size_is_known() -> None:
    """Neither before the first sample nor for one whose loss scale nobody knows; the norm of a whole layer as little."""
    table = replace(PLAN, sharded=np.array([True, False]))
    it = aggregation(table)
    collector = GradientCollector(lambda: it.snapshot(NOW), ["sgd"], dead_window=20)

    def shown() -> dict[Spec, dict[str, float]]:
        families = {family.spec: family for family in collector.collect()}
        found = {spec: families[spec] for spec in (GRAD_SHARD_NORM, GRAD_NORM)}
        return {spec: {one.labels.rows[at][0]: float(one.values[at]) for at in one.row_numbers} for spec, one in found.items()}

    nothing: dict[Spec, dict[str, float]] = {GRAD_SHARD_NORM: {}, GRAD_NORM: {}}
    assert shown() == nothing
    it.apply(captured(1, {0: row(NAN, nans=1), 2: row(4096.0)}, table=table, scale_known=False))
    it.apply(closed(1, Outcome.SKIPPED))
    assert shown() == nothing
    it.apply(captured(2, {0: row(3.0), 2: row(4.0)}, table=table))
    it.apply(closed(2))
    assert shown() == {GRAD_SHARD_NORM: {"a": 3.0}, GRAD_NORM: {"b": 4.0}}
