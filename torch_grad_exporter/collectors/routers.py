"""Collector `routers`: how mixture-of-experts routers spread tokens in sampled rounds."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.inspection.router_loads import RouterTotals
from torch_grad_exporter.metrics.catalogue import Section
from torch_grad_exporter.metrics.families import Family, LabelledRows, Spec

ROUTERS = Section("Routers")


def _gauge(name: str, help_: str, *labels: str) -> Spec:
    return ROUTERS.gauge(name, help_, "layer", *labels, opt_in="routers")


MOE_EXPERTS = _gauge("torch_moe_experts", "Experts among which a router chooses.")
MOE_LOAD_IMBALANCE_RATIO = _gauge(
    "torch_moe_load_imbalance_ratio",
    "Tokens of the most loaded expert over the mean of all experts, in this rank's last sampled step.",
)
MOE_EFFECTIVE_EXPERTS = _gauge(
    "torch_moe_effective_experts",
    "Exponential of the entropy of the experts' shares of this rank's tokens, over the layer's last 16 samples: how many experts would share the tokens as evenly.",
)
MOE_DEAD_EXPERTS = _gauge(
    "torch_moe_dead_experts",
    "Experts without any token of this rank in the layer's last 16 samples; absent before there are 16.",
)
MOE_ROUTER_ENTROPY = _gauge(
    "torch_moe_router_entropy",
    "Mean entropy in nats of the router's probabilities of a token, over this rank's tokens in the last sampled step; absent where the router shows no logits, or what makes probabilities of them is not known.",
)
MOE_EXPERT_LOAD_RATIO = _gauge(
    "torch_moe_expert_load_ratio",
    "An expert's tokens over the mean of all experts, of this rank's tokens in the layer's last 16 samples; only of the three most and the three least loaded experts.",
    "expert",
)

_VALUES = {
    MOE_EXPERTS: attrgetter("experts"),
    MOE_LOAD_IMBALANCE_RATIO: attrgetter("imbalance"),
    MOE_EFFECTIVE_EXPERTS: attrgetter("effective"),
    MOE_DEAD_EXPERTS: attrgetter("dead"),
    MOE_ROUTER_ENTROPY: attrgetter("entropy"),
}


class RouterCollector:
    """Families of the routers, none before the first sample of one."""

    def __init__(self, totals: RouterTotals) -> None:
        self._totals = totals
        self._rows = LabelledRows()

    def collect(self) -> Iterator[Family]:
        """Yield the families of the last samples."""
        if not (layers := self._totals.rows):
            return
        for spec, value in _VALUES.items():
            yield self._rows.by_label(spec, {layer: value(row) for layer, row in layers.items()})
        ratios = {(layer, str(expert)): ratio for layer, row in layers.items() for expert, ratio in row.ratios.items()}
        yield self._rows.family(MOE_EXPERT_LOAD_RATIO, ratios)


COLLECTOR = Declaration("routers", (ROUTERS,), lambda context: RouterCollector(context.routers), place=17)
