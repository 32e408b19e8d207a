"""ActivationTotals: what sampled rounds have shown of the outputs of inner modules, by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch_grad_exporter.inspection.layer_rows import LayerRows
from torch_grad_exporter.inspection.tallies import SentTallies
from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.store.records import Inspected

# Samples without any call of a layer's modules after which its gauges vanish.
KEPT = 8


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """What is shown of a layer; None where it is unknown. Totals are over `captures` samples, the last one in `sample`."""

    captures: int = 0
    nans: float = 0.0
    infs: float = 0.0
    rms: float | None = None
    max_magnitude: float | None = None
    zero_ratio: float | None = None
    dead_ratio: float | None = None
    grad_norm: float | None = None
    sample: int = 0

    def only_counts(self) -> LayerActivations:
        """Return the same without what is of a single sample."""
        return LayerActivations(self.captures, self.nans, self.infs, sample=self.sample)

    def with_totals_of(self, other: LayerActivations) -> LayerActivations:
        """Return the totals of both, without what is of a single sample."""
        return LayerActivations(self.captures + other.captures, self.nans + other.nans, self.infs + other.infs)


@dataclass(frozen=True, slots=True)
class ActivationSnapshot:
    """All values at one moment. `samples`: how many there were; `folded`: modules; `left_out`: modules by the reason."""

    layers: Mapping[str, LayerActivations]
    samples: int
    folded: int
    left_out: Mapping[str, int]


class ActivationTotals:
    """The totals of the outputs of at most `most` layers. Belongs to the worker, but for `snapshot` and `left_out`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._table = LayerRows(LayerActivations())
        self._samples = 0
        self._left_out: tuple[int, Mapping[str, int]] = 0, {}

    def left_out(self, folded: int, by_reason: Mapping[str, int]) -> None:
        """Set how many modules share a row, and how many are left out. From the training thread."""
        self._left_out = folded, by_reason

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Count a sample."""
        assert isinstance(record.data, SentTallies)  # noqa: S101 - only `Activations` sends records of this name
        self._samples += 1
        changed: dict[str, LayerActivations] = {}
        scale = record.data.scale(values)
        for layer, tally in record.data.by_label(values).items():
            known = self._table.get(layer)
            changed[layer] = LayerActivations(
                captures=known.captures + 1,
                nans=known.nans + tally.nans,
                infs=known.infs + tally.infs,
                rms=tally.norm / math.sqrt(tally.elements),
                max_magnitude=tally.peak,
                zero_ratio=tally.zeros / tally.elements,
                dead_ratio=tally.dead / tally.units if tally.units else None,
                grad_norm=tally.gradient / scale if tally.graded and scale is not None else None,
                sample=self._samples,
            )
        self._table.enter(changed, most=self._most)

    def snapshot(self) -> ActivationSnapshot:
        """Return all values at this moment; of layers that were not called for a while only totals. From any thread."""
        rows, samples = self._table.rows, self._samples
        layers = {layer: row if samples - row.sample < KEPT else row.only_counts() for layer, row in rows.items()}
        return ActivationSnapshot(layers, samples, *self._left_out)
