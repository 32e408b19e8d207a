"""A collector of another package: how many layers there are, and how often it was asked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_grad_exporter.collectors.context import CollectorContext
from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelRows, scalar

METRICS = Section("A toy")

TOY_LAYERS = METRICS.gauge("toy_layers", "Layers that the toy sees.")
TOY_QUESTIONS = METRICS.counter("toy_questions_total", "How often the toy was asked, by colour.", "colour")

COLOURS = LabelRows((("red",),))


class ToyCollector:
    """Families of the toy."""

    def __init__(self, context: CollectorContext) -> None:
        self._snapshots = context.snapshots
        self._questions = 0

    def collect(self) -> Iterator[Family]:
        """The present families."""
        self._questions += 1
        yield scalar(TOY_LAYERS, len(self._snapshots.latest.gradients.table.layers))
        yield Family(TOY_QUESTIONS, np.array([float(self._questions)]), COLOURS)


COLLECTOR = Declaration("toy", (METRICS,), ToyCollector)
