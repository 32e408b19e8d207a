"""The row of the dashboard "Gradients by layer" about what changes gradients: `clip=`, `dry_run=` and `Freeze`."""

from __future__ import annotations

from dashboards.generate import panels as draw
from dashboards.generate import queries as ask
from dashboards.generate.panels import SCIENTIFIC, Panel, Query
from dashboards.generate.queries import KEPT, highest, of_layer, of_run, rate

FROZEN = {1: ("Frozen", "blue"), 0: ("Trained", "green")}
NOTHING = "Needs start_exporter(clip=...)"


def _thresholds() -> Panel:
    whole = highest(of_run("torch_grad_clip_threshold", 'layer=""'), "run, policy, optimizer")
    selector = of_layer("torch_grad_clip_threshold")
    each = f"min by (run, layer, policy) ({selector})"
    lines = ask.steadily_top(20, each, "run, layer, policy", selector)
    text = (
        "Largest norm, or element, that each policy leaves alone, those of dry_run= included; of policies with a threshold for "
        "each layer those of the chosen layers, the 20 largest. A line that ends is a policy for which nothing is too large."
    )
    panel = draw.lines(
        "Threshold of each policy", text, SCIENTIFIC,
        Query(whole, "{{policy}} {{run}} {{optimizer}}"), Query(lines, "{{policy}} {{layer}} {{run}}"),
        nothing="Needs start_exporter(clip=...) or dry_run=[...]", many=True,
    )  # fmt: skip
    return draw.logarithmic(panel)


def _candidates() -> Panel:
    text = (
        "Share of the steps that each policy of dry_run= would have clipped, or left out, and that each policy of clip= did: over "
        "all steps, on the same run. MaxValue is counted only as a candidate."
    )
    panel = draw.lines(
        "Would have been clipped", text, "percentunit",
        Query(ask.share_clipped("torch_grad_clip_candidates_total"), "{{policy}} {{run}}"),
        Query(ask.share_clipped("torch_grad_clip_policy_steps_total"), "{{policy}} {{run}} in force"),
        nothing="Needs start_exporter(dry_run=[...])", many=True,
    )  # fmt: skip
    return panel.min(0).max(1)


def _layers_left() -> Panel:
    selector = of_layer("torch_grad_layer_clip_coefficient")
    left = f"min by (run, layer) ({selector})"
    least = f"bottomk(20, min by (run, layer) (min_over_time({selector}[$__range] @ end())))"
    text = (
        "Share of each chosen layer's norm that clipping left at the last sample, the 20 layers of which it took most. A policy "
        "for the whole model leaves the same of all."
    )
    query = Query(f"{left} and on (run, layer) {least}", "{{layer}} {{run}}")
    return draw.lines("Norm left by layer in the last sample", text, "percentunit", query, nothing=NOTHING, many=True).min(0).max(1)


def _layers_clipped() -> Panel:
    clipped, samples = (of_layer(name, KEPT) for name in ("torch_grad_layer_clipped_steps_total", "torch_grad_captures_total"))
    share = f"max by (run, layer) ({rate(clipped)}) / (max by (run, layer) ({rate(samples)}) > 0)"
    most = f"topk(20, max by (run, layer) (increase({clipped}[$__range] @ end())))"
    text = "Share of the samples of each chosen layer in which clipping made its gradient smaller, the 20 layers with the most."
    query = Query(f"clamp_max({share}, 1) and on (run, layer) {most}", "{{layer}} {{run}}")
    return draw.lines("Samples clipped by layer", text, "percentunit", query, nothing=NOTHING, many=True).min(0).max(1)


def _frozen() -> Panel:
    selector = of_run("torch_layer_frozen")
    ever = f"max by (run, layer) (max_over_time({selector}[$__range] @ end())) == 1"
    frozen = ask.in_model_order(f"({highest(selector, 'run, layer')} > bool 0) and on (run, layer) ({ever})")
    text = "Layers that Freeze() has stopped from being trained in the time range, and when. It may try them again."
    nothing = "No layer was frozen"
    return draw.timeline("Frozen layers", text, Query(frozen, "{{layer}} {{run}}"), FROZEN, nothing, ever=ever)


def row() -> list[Panel]:
    """All of them."""
    return [*(panel.span(12) for panel in (_thresholds(), _candidates(), _layers_left(), _layers_clipped())), _frozen().span(24)]
