"""The rule on copies of a model that are no longer equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from torch_grad_exporter.collectors.replicas_compared import REPLICA_ODD, REPLICAS_COMPARED, REPLICAS_DIFFER
from torch_grad_exporter.rules.context import GOING, MINUTES_30, RuleContext, times
from torch_grad_exporter.rules.declaration import Alert, Finding, rule

# Layers that one sentence names, at most.
NAMED = 3

# The past of layers is remembered in 32 bits: rounded by less than this share.
ROUNDING = 2.0**-23

# The end of the description, as a template of Prometheus: what differs most often, and the ranks that differ from most others.
WHERE = (
    '{{ with query (printf "topk(3, sum by (layer, what) (torch_replicas_differ_total{run=%q}) > 0)" $labels.run) }} Affected:'
    "{{ range $i, $row := . }}{{ if $i }},{{ end }} {{ $row.Labels.layer }} ({{ $row.Labels.what }}){{ end }}.{{ end }}"
    '{{ with query (printf "topk(3, sum by (replica) (torch_replica_odd_total{run=%q}))" $labels.run) }} Differing from most ranks:'
    "{{ range $i, $row := . }}{{ if $i }},{{ end }} rank {{ $row.Labels.replica }}{{ end }}.{{ end }}"
)


@rule(
    "ReplicasDiffer",
    GOING,
    Alert(
        "critical",
        """
        max by (run) (
          increase(torch_replicas_differ_total[30m]) > 0
          or
          torch_replicas_differ_total > 0
          and on (run, rank, job, instance) time() - torch_train_start_timestamp_seconds < 600
        )
        and on (run) torch_train_state{state!~"finished|failed"} == 1
        """,
        summary="Ranks of run {{ $labels.run }} that must be equal differ.",
        description=(
            "In the last 30 minutes gradients, weights or buffers of which all ranks have a copy were not the same on all of them. "
            "From then on each rank trains another model." + WHERE
        ),
    ),
    remembers={REPLICAS_DIFFER: MINUTES_30},
    needs=(REPLICAS_COMPARED,),
    first_steps=(
        "If one rank differs from all others, take its host out and go back to a checkpoint from before. If every rank differs in "
        "one layer, its gradients are not reduced, or its buffers not broadcast: DistributedDataParallel does not know it."
    ),
    why=(
        "One bit is enough: no rounding explains it, since copies compute the same from the same. 30 minutes: weights and buffers "
        "are compared in one of four comparisons, and these are as seldom as samples. In the first 600 s of a process its whole "
        "count matters, since `increase` does not show what came before the first scrape."
    ),
    note=(
        "Needs replicas=True. Also fires, without a fault, where ranks are meant to differ, as in local SGD or with batch norm "
        "whose statistics stay local: leave such layers out with exclude=, or the option off."
    ),
)
def replicas_differ(context: RuleContext) -> Iterator[Finding]:
    """Yield a finding if ranks have differed."""
    grown, whole = context.recent(REPLICAS_DIFFER, MINUTES_30), context.values.table(REPLICAS_DIFFER).numbers
    chosen = [row for row, more in zip(grown.rows, grown.numbers > ROUNDING * whole, strict=True) if more]
    if not chosen:
        return
    places = [f"the {what} of {layer}" for layer, what in chosen]
    rest = f" and {times(len(places) - NAMED, 'more place')}" if len(places) > NAMED else ""
    odd = [rank for (rank,), _ in context.values.table(REPLICA_ODD).items()]
    ranks = f" Rank {', '.join(odd[:NAMED])} had other bits than most." if odd else ""
    layers = tuple(dict.fromkeys(layer for layer, _ in chosen))
    text = f"Ranks differ in {', '.join(places[:NAMED])}{rest}, {context.since(MINUTES_30)}.{ranks}"
    yield Finding("critical", text, others=layers, value=float(len(places)))
