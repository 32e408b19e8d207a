"""Collector `attention`: the logits and the entropy of attention in sampled rounds."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows

if TYPE_CHECKING:
    from torch_grad_exporter.inspection.attention import AttentionTotals

ATTENTION = Section("Attention")

ATTENTION_MAX_LOGIT = ATTENTION.gauge(
    "torch_attention_max_logit",
    "Largest logit, query times key times scale, that no mask hides, of up to 64 query rows of each head in the last sampled step, of this rank's heads and examples.",
    "layer",
    opt_in="attention",
)
ATTENTION_LOGIT_BOUND = ATTENTION.gauge(
    "torch_attention_logit_bound",
    "Upper bound of the magnitude of all logits in the last sampled step: the largest norm of a head's queries times that of its keys times the scale; absent where attention multiplies them itself.",
    "layer",
    opt_in="attention",
)
ATTENTION_ENTROPY = ATTENTION.gauge(
    "torch_attention_entropy",
    "Mean entropy in nats of the attention weights of these query rows in the last sampled step: 0 where each query attends to one key.",
    "layer",
    opt_in="attention",
)

_VALUES = {
    ATTENTION_MAX_LOGIT: attrgetter("max_logit"),
    ATTENTION_LOGIT_BOUND: attrgetter("bound"),
    ATTENTION_ENTROPY: attrgetter("entropy"),
}


class AttentionCollector:
    """Families of the attention, none without the option."""

    def __init__(self, totals: AttentionTotals | None) -> None:
        self._totals = totals
        self._rows = LabelledRows()

    def collect(self) -> Iterator[Family]:
        """Yield the families of the last sampled rounds."""
        if self._totals is None:
            return
        layers = self._totals.rows
        for spec, value in _VALUES.items():
            yield self._rows.by_label(spec, {layer: value(row) for layer, row in layers.items()})


COLLECTOR = Declaration("attention", (ATTENTION,), lambda context: AttentionCollector(context.attention), place=16)
