"""The row of the dashboard "Gradients by layer" about what is inside of models: `activations=` and `exporter.watch`."""

from __future__ import annotations

from dashboards.generate import panels as draw
from dashboards.generate import queries as ask
from dashboards.generate.panels import SCIENTIFIC, Panel, Query
from dashboards.generate.queries import KEPT, counted, highest, of_run

NOTHING = "Needs start_exporter(activations=True)"
BY = "{{layer}} {{run}}"


def _sizes() -> Panel:
    selector = of_run("torch_activation_rms")
    text = (
        "Every module is a row, run by run, in the order of the model. The colour is the decimal logarithm of the root mean "
        "square of its output: where rows turn blue with the depth, activations vanish."
    )
    rms = f"log10(clamp_min({highest(selector, 'run, layer')}, 1e-12))"
    query = Query(ask.in_model_order(rms, modules=True), BY)
    return draw.field_of_rows(
        "Size of every output", text, query, scheme="Spectral", limits=(-4, 4), nothing=NOTHING, unit=draw.POWER,
        ever=ask.ever(selector),
    )  # fmt: skip


def _dead() -> Panel:
    selector = of_run("torch_activation_dead_ratio")
    text = (
        "Every module is a row, in the order of the model. The colour is the share of its output units that were zero in every "
        "element of the sample, from 0 to 1. Units stay dead behind a ReLU whose inputs are all negative."
    )
    query = Query(ask.in_model_order(highest(selector, "run, layer"), modules=True), BY)
    return draw.field_of_rows(
        "Dead units of every output", text, query, scheme="Oranges", limits=(0, 1), nothing=NOTHING, ever=ask.ever(selector)
    )


def _gradients() -> Panel:
    selector = of_run("torch_activation_grad_norm")
    lines = ask.steadily_top(20, highest(selector, "run, layer"), "run, layer", selector)
    text = (
        "L2 norm of the gradient at each module's output, the 20 largest, of the rank that has the largest; each rank has its own "
        "loss."
    )
    panel = draw.lines("Gradient at the outputs", text, SCIENTIFIC, Query(lines, BY), nothing=NOTHING, many=True)
    return draw.logarithmic(panel)


def _nonfinite() -> Panel:
    selector = of_run("torch_activation_nonfinite_elements_total", KEPT)
    elements = f"sum by (run, layer, kind) ({counted(selector)})"
    most = f"topk(20, sum by (run, layer, kind) (increase({selector}[$__range] @ end())))"
    text = (
        "Elements of outputs that were NaN or Inf, over sampled steps, the 20 modules with the most. The first in the order of the "
        "model is where it began."
    )
    query = Query(f"{elements} and on (run, layer, kind) {most}", "{{layer}} {{kind}} {{run}}")
    panel = draw.lines("NaN and Inf in sampled outputs", text, "short", query, nothing=NOTHING, many=True)
    return draw.whole(panel)


def _outliers() -> Panel:
    selector = of_run("torch_activation_kurtosis")
    lines = ask.steadily_top(20, highest(selector, "run, layer"), "run, layer", selector)
    text = (
        "Kurtosis of the sizes of a module's output units, the 20 largest: 1 where all are equal. A few units that outgrow "
        "all others come before unstable training in low precision."
    )
    panel = draw.lines("Outliers among the units", text, "short", Query(lines, BY), nothing=NOTHING, many=True)
    return draw.logarithmic(panel)


def _watched() -> Panel:
    selector = of_run("torch_watch_grad_norm")
    lines = ask.steadily_top(20, highest(selector, "run, name"), "run, name", selector)
    text = "L2 norm of the gradients of the tensors that exporter.watch() was given, before they are clipped, the 20 largest."
    nothing = "Needs exporter.watch(name, tensor)"
    panel = draw.lines(
        "Gradients of watched tensors", text, SCIENTIFIC, Query(lines, "{{name}} {{run}}"), nothing=nothing, many=True
    )
    return draw.logarithmic(panel)


def row() -> list[Panel]:
    """All of them."""
    return [
        *(panel.span(12).height(10) for panel in (_sizes(), _dead())),
        *(panel.span(12) for panel in (_gradients(), _outliers(), _nonfinite(), _watched())),
    ]
