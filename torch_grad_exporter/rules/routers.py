"""Rules on mixture-of-experts routers: experts that get no tokens, and experts that get too many."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_grad_exporter.collectors.routers import MOE_DEAD_EXPERTS, MOE_EFFECTIVE_EXPERTS, MOE_EXPERT_LOAD_RATIO, MOE_EXPERTS
from torch_grad_exporter.rules.context import BUSY, THRESHOLDS, RuleContext, by_layer
from torch_grad_exporter.rules.declaration import Alert, Finding, rule
from torch_grad_exporter.rules.values import Table


@rule(
    "ExpertCollapse",
    BUSY,
    Alert(
        "warning",
        """
        max by (run, layer) (
          torch_moe_effective_experts
          and on (run, rank, job, instance) torch_train_state{state=~"training|evaluating"} == 1
        )
        / on (run, layer) max by (run, layer) (torch_moe_experts)
        < 0.3
        """,
        for_="15m",
        summary="Router {{ $labels.layer }} of run {{ $labels.run }} uses few of its experts.",
        description=(
            "For 15 minutes its tokens have been spread as if over {{ $value | humanizePercentage }} of its experts, evenly used."
        ),
    ),
    Alert(
        "info",
        """
        max by (run, layer) (
          torch_moe_effective_experts
          and on (run, rank, job, instance) torch_train_state{state=~"training|evaluating"} == 1
        )
        / on (run, layer) max by (run, layer) (torch_moe_experts)
        < 0.3
        or
        min by (run, layer) (
          torch_moe_dead_experts
          and on (run, rank, job, instance) torch_train_state{state=~"training|evaluating"} == 1
        )
        / on (run, layer) max by (run, layer) (torch_moe_experts)
        > 0
        """,
        for_="15m",
        summary="Experts of router {{ $labels.layer }} of run {{ $labels.run }} get no tokens.",
        description="For 15 minutes, some of its experts have had no token of any sample, or next to none.",
    ),
    by_samples=True,
    needs=(MOE_EFFECTIVE_EXPERTS,),
    first_steps=(
        "Check that the auxiliary loss reaches the loss, with a coefficient of about 0.01, or that the bias that balances is "
        "updated after each step. Else lower the learning rate of the router. Go back to a checkpoint from before the fall."
    ),
    why=(
        "0.3: a router that always chooses the same 2 of 8 experts uses a quarter of them; healthy ones use more than half, and "
        "with a narrow data set more than a third. It is over 16 samples, since a batch of one document uses few experts."
    ),
    note=(
        "Needs routers=True or exporter.router(). Of several ranks the one with the most even spread counts: each has its own "
        "tokens. Cannot fire as a warning where a token is sent to 3 in 10 of the experts or more."
    ),
)
def expert_collapse(context: RuleContext) -> Iterator[Finding]:
    """Yield layers whose tokens go to few of the experts, and others with experts that get none."""
    effective, dead = context.values.table(MOE_EFFECTIVE_EXPERTS), context.values.table(MOE_DEAD_EXPERTS)
    shares = Table(effective.rows, effective.numbers / context.values.table(MOE_EXPERTS).at(effective.rows))
    few = shares.numbers < THRESHOLDS["ExpertCollapse"]
    warned = Table(shares.rows, few.astype(np.float64)).at(dead.rows) == 1
    yield from by_layer("warning", shares, few, "its tokens go to few of its experts")
    yield from by_layer("info", dead, (dead.numbers > 0) & ~warned, "experts get no tokens")


@rule(
    "RouterImbalance",
    BUSY,
    Alert(
        "info",
        """
        avg by (run, layer) (
          max by (run, rank, job, instance, layer) (torch_moe_expert_load_ratio)
          and on (run, rank, job, instance) torch_train_state{state=~"training|evaluating"} == 1
        ) > 3
        """,
        for_="30m",
        summary="Router {{ $labels.layer }} of run {{ $labels.run }} overloads an expert.",
        description="For 30 minutes an expert has had {{ $value | humanize }} times the tokens of the mean one.",
    ),
    by_samples=True,
    needs=(MOE_EXPERT_LOAD_RATIO,),
    first_steps=(
        "Raise the coefficient of the auxiliary loss, or the rate at which the bias that balances is updated. With a capacity "
        "factor look how many tokens are dropped; with expert parallelism, how long other ranks wait."
    ),
    why=(
        "3: the ranks of expert parallelism wait for the busiest expert, whose layer then takes three times as long, and a "
        "capacity factor of 1.25 to 2 drops a third of its tokens or more. It is over 16 samples, as documents differ."
    ),
    note=(
        "Needs routers=True or exporter.router(). Of several ranks the mean counts. Cannot fire where a token is sent to a third "
        "of the experts or more."
    ),
)
def router_imbalance(context: RuleContext) -> Iterator[Finding]:
    """Yield layers one of whose experts has several times the tokens of the mean one."""
    largest: dict[tuple[str, ...], float] = {}
    for (layer, _), ratio in context.values.table(MOE_EXPERT_LOAD_RATIO).items():
        largest[layer,] = max(ratio, largest.get((layer,), 0.0))
    ratios = Table(tuple(largest), np.array([*largest.values()]))
    yield from by_layer("info", ratios, ratios.numbers > THRESHOLDS["RouterImbalance"], "an expert gets too many of its tokens")
