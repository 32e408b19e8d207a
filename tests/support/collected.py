"""What a collector yields as a flat mapping, for tests of single collectors."""

from __future__ import annotations

from torch_grad_exporter.collectors.registry import Collector


def series(collector: Collector) -> dict[tuple[str, ...], float]:
    """Every sample of one collection: metric and label values, in the order of the metric's labels, to the value."""
    found: dict[tuple[str, ...], float] = {}
    for family in collector.collect():
        for position, row in enumerate(family.labels.rows):
            if family.present is None or family.present[position]:
                found[family.spec.name, *row] = float(family.values[position])
    return found
