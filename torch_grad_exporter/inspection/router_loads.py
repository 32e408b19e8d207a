"""RouterTotals: the loads of experts by layer, from the counts that sampled rounds have sent."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from torch_grad_exporter.metrics.families import FloatArray
from torch_grad_exporter.store.records import Inspected

# Samples of a layer over which the use of its experts is judged: a batch of few documents leaves some of them idle.
WINDOW = 16

# Experts that are shown by themselves: this many of the most loaded, and of the least loaded.
ENDS = 3

# Samples without any token of a layer after which it is not shown any more.
KEPT = 8


@dataclass(frozen=True, slots=True)
class SentLoad:
    """A layer's part of a vector: the tokens of each expert, and then the sum of the entropies of `tokens`, 0 if unknown."""

    layer: str
    experts: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class SentLoads:
    """The data of a record: what the vector of each ticket has, in its order."""

    parts: tuple[tuple[SentLoad, ...], ...]


@dataclass(frozen=True, slots=True)
class RouterLoads:
    """What is shown of a layer; None where it is unknown.

    Attributes:
        experts: Their number.
        imbalance: The largest load of the last sample over the mean one.
        entropy: The mean over its tokens, in nats.
        effective: The exponential of the entropy of the shares, over the last samples.
        dead: Experts without a token in the last `WINDOW` samples; None before there are as many.
        ratios: Loads over the mean one, over the last samples, of the experts at both ends.
        sample: The number of the last sample.
    """

    experts: int
    imbalance: float
    entropy: float | None
    effective: float
    dead: int | None
    ratios: Mapping[int, float]
    sample: int


class RouterTotals:
    """The loads by layer. Belongs to the worker, but for `snapshot`."""

    def __init__(self) -> None:
        self._windows: dict[str, deque[FloatArray]] = {}
        self._rows: Mapping[str, RouterLoads] = {}
        self._samples = 0

    def take(self, record: Inspected, values: tuple[FloatArray, ...]) -> None:
        """Take the counts of a round. Counts that are none, such as negative ones, leave their layer as it was."""
        assert isinstance(record.data, SentLoads)  # noqa: S101 - only `Routers` sends records of this name
        self._samples += 1
        rows = dict(self._rows)
        for parts, vector in zip(record.data.parts, values, strict=True):
            start = 0
            for part in parts:
                end = start + part.experts
                counts, entropies = vector[start:end], float(vector[end])
                if counts.min() >= 0 and 0 < counts.sum() < np.inf:
                    entropy = entropies / part.tokens if part.tokens and math.isfinite(entropies) else None
                    rows[part.layer] = self._row(part.layer, counts, entropy)
                start = end + 1
        self._rows = rows

    def _row(self, layer: str, counts: FloatArray, entropy: float | None) -> RouterLoads:
        window = self._windows.setdefault(layer, deque(maxlen=WINDOW))
        if window and len(window[0]) != len(counts):
            window.clear()
        window.append(counts)
        recent = np.sum(window, axis=0)
        ratios = recent / recent.mean()
        shares = recent[recent > 0] / recent.sum()
        order = np.argsort(-ratios, kind="stable").tolist()
        ends = order if len(order) <= 2 * ENDS else order[:ENDS] + order[-ENDS:]
        return RouterLoads(
            experts=len(counts),
            imbalance=float(counts.max() / counts.mean()),
            entropy=entropy,
            effective=float(np.exp(-np.sum(shares * np.log(shares)))),
            dead=int(np.count_nonzero(recent == 0)) if len(window) == WINDOW else None,
            ratios={expert: float(ratios[expert]) for expert in ends},
            sample=self._samples,
        )

    def snapshot(self) -> dict[str, RouterLoads]:
        """Return the layers that had tokens in the last samples. From any thread."""
        rows, samples = self._rows, self._samples
        return {layer: row for layer, row in rows.items() if samples - row.sample < KEPT}
