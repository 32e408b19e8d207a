"""The row of the dashboard "Gradients by layer" about what shows before the loss does: options that are off by default."""

from __future__ import annotations

from dashboards.generate import panels as draw
from dashboards.generate import queries as ask
from dashboards.generate.panels import Panel, Query
from dashboards.generate.queries import KEPT, counted, highest, of_run

BY = "{{layer}} {{run}}"


def _largest(title: str, text: str, unit: str, metric: str, option: str) -> Panel:
    """Return the 20 layers with the largest values of a gauge."""
    selector = of_run(metric)
    lines = ask.steadily_top(20, highest(selector, "run, layer"), "run, layer", selector)
    nothing = f"Needs start_exporter({option}=True)"
    return draw.lines(title, f"{text} With start_exporter({option}=True).", unit, Query(lines, BY), nothing=nothing, many=True)


def _second_moment() -> Panel:
    text = (
        "Root mean square of a layer's gradient over the root of Adam's second moment. About 1 is usual; a layer far above it, or "
        "all layers near 0, come before spikes of the loss."
    )
    return draw.logarithmic(_largest("Gradient over second moment", text, "short", "torch_optimizer_rms_ratio", "optimizer_state"))


def _unchanged() -> Panel:
    text = "Share of a layer's elements that its last update left as they were. In bf16 a small update rounds to nothing."
    panel = _largest("Elements that updates leave", text, "percentunit", "torch_weight_unchanged_ratio", "weights")
    return panel.min(0).max(1)


def _logits() -> Panel:
    text = "Largest attention logit of a layer. Beyond 50 to 100 the softmax saturates, and a training often diverges soon."
    return _largest("Largest attention logit", text, "short", "torch_attention_max_logit", "attention")


def _lowest(title: str, text: str, unit: str, metric: str, option: str, *, over: str = "") -> Panel:
    """Return the 20 layers with the lowest values of a gauge in the time range, over another gauge where one is given."""
    per = f" / {over}" if over else ""
    lowest = f"min by (run, layer) (min_over_time({metric}[$__range] @ end()){per})"
    lines = f"min by (run, layer) ({metric}{per}) and on (run, layer) bottomk(20, {lowest})"
    nothing, query = f"Needs start_exporter({option}=True)", Query(lines, BY)
    return draw.lines(title, f"{text} With start_exporter({option}=True).", unit, query, nothing=nothing, many=True).min(0)


def _entropy() -> Panel:
    text = "Mean entropy of a layer's attention in nats, the 20 lowest: 0 where each query attends to one key."
    return _lowest("Entropy of attention", text, "short", of_run("torch_attention_entropy"), "attention")


def _experts() -> Panel:
    text = "How many experts would share a layer's tokens as evenly, of all that there are, the 20 lowest. 1 is an even load."
    experts, effective = of_run("torch_moe_experts"), of_run("torch_moe_effective_experts")
    return _lowest("Experts in use", text, "percentunit", effective, "routers", over=experts).max(1)


def _replicas() -> Panel:
    differ = counted(of_run("torch_replicas_differ_total", KEPT))
    query = Query(f"sum by (run, layer, what) ({differ})", "{{layer}} {{what}} {{run}}")
    text = "Comparisons in which ranks had other bits of what is to be the same on all of them, by layer."
    nothing = "Needs start_exporter(replicas=True) and several ranks; or no replica differs"
    panel = draw.lines(
        "Replicas that differ", f"{text} With start_exporter(replicas=True).", "short", query, nothing=nothing, many=True
    )
    return draw.whole(panel)


def row() -> list[Panel]:
    """All of them."""
    return [panel.span(8) for panel in (_second_moment(), _unchanged(), _logits(), _entropy(), _experts(), _replicas())]
