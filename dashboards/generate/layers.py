"""The dashboard "Gradients by layer": which layer is in trouble, since when, and what its gradient looks like."""

from __future__ import annotations

from grafana_foundation_sdk.builders import statetimeline
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.generate import activations, clipping, layer_times, leading
from dashboards.generate import panels as draw
from dashboards.generate import queries as ask
from dashboards.generate.board import Row, board
from dashboards.generate.panels import CLICKED, SCIENTIFIC, Panel, Query, link, url
from dashboards.generate.queries import KEPT, counted_over_range, highest, last_known, of_layer, of_rank, of_run, rate
from dashboards.generate.tables import Column, rows

UID = "torch-grad-layers"
HERE = url(UID, "var-layer=${__data.fields.layer}", run="${__data.fields.run}")
# By how much a person should care; a layer in several kinds of trouble shows the highest.
TROUBLE = {1: ("Vanished", "yellow"), 2: ("No gradient", "orange"), 3: ("Dead", "dark-orange"), 4: ("NaN or Inf", "red")}
CHOSEN = 'layer=~"$layer"'
LAYER = Column("layer", "Layer", link=HERE)
RUN = Column("run", "Run", width=120)


def trouble() -> str:
    """A number of TROUBLE for each layer that is in it, the gravest first; nothing for one that is well."""
    conditions = {4: ask.nonfinite(), 3: ask.dead(), 2: ask.without_gradient(), 1: ask.vanished()}
    return " or ".join(f"(({found.where()}) * 0 + {number})" for number, found in conditions.items())


def troubled() -> statetimeline.Panel:
    """The layers in trouble, over time."""
    text = (
        "Each layer that was in trouble in the time range, and when. Dead: more than nine in ten output units "
        "without gradient for the whole dead_window. Vanished: a norm below a ten-millionth of the global norm. No "
        "gradient: parameters without a gradient. NaN or Inf: within the last 5 minutes."
    )
    nothing = "No layer is in trouble"
    panel = draw.timeline("Layers in trouble", text, Query(ask.in_model_order(trouble()), "{{layer}} {{run}}"), TROUBLE, nothing)
    return panel.data_links([link("This layer", UID, "var-layer=${__field.labels.layer}", run=CLICKED)])


def norms() -> Panel:
    """A row for each layer, its norm as a colour."""
    text = (
        "Every layer is a row, run by run, in the order of the model. The colour is the decimal logarithm of the norm of its "
        "gradient before clipping: -3 is 0.001. Rows that turn blue have a vanishing gradient, rows that turn red an "
        f"exploding one. NaN and Inf are {ask.OFF_SCALE}."
    )
    logarithm = f"log10(clamp_min({ask.layer_norm()} < +Inf, 1e-12)) or on (run, layer) {ask.not_finite()}"
    query = Query(ask.in_model_order(f"({logarithm})"), "{{layer}} {{run}}")
    nothing = "No layer was read; for sharded gradients this needs the recording rules"
    return draw.field_of_rows(
        "Norm of every layer", text, query, scheme="Spectral", limits=(-6, 2), unit=draw.POWER, nothing=nothing,
        ever=ask.ever(of_run("torch_grad_norm"), of_run("torch_grad_shard_norm")),
    )  # fmt: skip


def _deviations() -> Panel:
    text = (
        "Every layer is a row. The colour is the distance of its norm from its own median of the last 128 samples, "
        "in robust sigmas: red is far above, blue far below. For a sharded layer it is the part that is furthest "
        f"above. NaN and Inf are {ask.OFF_SCALE}, a gradient of zeros is -{ask.OFF_SCALE}."
    )
    sigmas = highest(of_run("torch_grad_norm_zscore"), "run, layer")
    zero = f"-{ask.OFF_SCALE} * group by (run, layer) ({of_run('torch_grad_norm')} == 0)"
    every = f"({sigmas} or on (run, layer) {ask.not_finite()} or on (run, layer) {zero})"
    query = Query(ask.in_model_order(every), "{{layer}} {{run}}")
    return draw.field_of_rows(
        "Deviation of every layer from its own baseline", text, query, scheme="RdYlBu", limits=(-6, 6),
        nothing="Needs 20 samples of a layer", ever=ask.ever(of_run("torch_grad_norm_zscore")),
    )  # fmt: skip


def _largest() -> Panel:
    spikes = f"max by (run, layer) ({counted_over_range(of_run('torch_grad_norm_spikes_total', KEPT))})"
    largest = ask.top(15, ask.last_layer_norm())
    columns = [RUN, LAYER, Column("Value #A", "Norm", SCIENTIFIC, width=110), Column("Value #B", "Spikes", width=80, decimals=0)]
    queries = [Query(largest), Query(f"{spikes} and on (run, layer) {largest}")]
    text = (
        "The layers with the largest gradients, and how often their norm spiked in the time range. A layer's name "
        "leads to its view below."
    )
    return rows("Largest norms", text, queries, columns, nothing="No layer was read", order=["-Norm"])


def _furthest() -> Panel:
    score = f"abs({last_known(of_run('torch_grad_norm_zscore'), 'run, layer')})"
    columns = [RUN, LAYER, Column("Value", "Sigmas", full=12, orange=6, width=160)]
    text = "The norms furthest from their own last 128 samples, above or below, in robust sigmas; spikes are beyond 6."
    query = Query(ask.top(15, score))
    return rows("Furthest from their own baseline", text, [query], columns, "Needs 20 samples", order=["-Sigmas"])


def _dead() -> Panel:
    units, dead = ask.last_share("zero_units_ratio"), ask.last_share("dead_ratio")
    elements = last_known(of_run("torch_grad_zero_ratio"), "run, layer")
    worst = f"topk(15, {units})"
    queries = [Query(worst), Query(f"{dead} and on (run, layer) {worst}"), Query(f"{elements} and on (run, layer) {worst}")]
    columns = [
        RUN, LAYER,
        Column("Value #A", "Zero units", "percentunit", full=1, width=115),
        Column("Value #B", "Dead units", "percentunit", full=1, orange=0.9, width=115),
        Column("Value #C", "Zero elements", "percentunit", full=1, width=115),
    ]  # fmt: skip
    text = (
        "Share of output units without gradient: at the last sample, and in each of the last dead_window samples; "
        "and the share of single elements. Units that are zero and not dead are normal with sparse activations and "
        "padding."
    )
    return rows("Zero and dead units", text, queries, columns, nothing="No layer was read", order=["-Zero units"])


def _broken() -> Panel:
    elements = counted_over_range(of_run("torch_grad_nonfinite_elements_total", KEPT))
    missing = f"{last_known(of_run('torch_grad_missing_parameters'), 'run, layer')} > 0"
    counted = f"sum by (run, layer, kind) ({elements}) > 0"
    found = f'{counted} or label_replace({missing}, "kind", "parameters without gradient", "", "")'
    columns = [RUN, LAYER, Column("kind", "What", width=180), Column("Value", "How many", "locale", width=100, decimals=0)]
    text = (
        "NaN or Inf elements of gradients in the time range, before clipping spreads them to all layers, and parameters that "
        "require a gradient and got none."
    )
    nothing = "In the sampled steps every gradient was there and finite"
    query = Query(ask.top(50, found))
    return rows("NaN, Inf and missing gradients", text, [query], columns, nothing=nothing, order=["Run", "Layer"])


def _origin() -> Panel:
    place = "run, layer, pass, kind"
    found = last_known(of_run("torch_nonfinite_origin_step"), place)
    told = f"{last_known(of_run('torch_nonfinite_origin_info'), place)} * 0"
    columns = [
        RUN, LAYER, Column("pass", "Pass", width=180), Column("kind", "What", width=120),
        Column("Value", "At step", "locale", width=120, decimals=0),
    ]  # fmt: skip
    text = (
        "Where finite values have given NaN or Inf that reached the loss or a gradient, and the step at which that was last "
        "found. With start_exporter(nan_origin=True)."
    )
    nothing = "Needs start_exporter(nan_origin=True), and a NaN or Inf"
    query = Query(ask.top(50, f"{found} or {told}"))
    return rows("Where a NaN began", text, [query], columns, nothing=nothing, order=["Run", "-At step"])


def _global_distribution() -> Panel:
    selector = of_rank("torch_grad_global_norm_distribution_bucket")
    text = (
        "Norm over all parameters at every sampled step of the chosen ranks, also between two scrapes: one outlier in fifty "
        "steps shows here and not in a line."
    )
    return draw.distribution("Distribution of the global norm", text, SCIENTIFIC, selector, nothing="No gradient was sampled")


def _balance() -> Panel:
    text = (
        "Gradient norm of each optimizer over that of all optimizers of the run, where several models are watched, such as a GAN. "
        "What is healthy differs from run to run. A line that moves towards 0 is of a model that no longer learns from the other: "
        "ModelsOutOfBalance fires where the norms part by a factor of 10 from what they were."
    )
    norm = of_run("torch_grad_global_norm", 'optimizer!=""')
    norms = highest(f"{norm} == {norm}", "run, optimizer")
    several = f"max by (run) ({of_run('torch_grad_exporter_models')}) > 1"
    share = f"{norms} / on (run) group_left () sqrt(sum by (run) ({norms} ^ 2) > 0) and on (run) {several}"
    nothing = "Needs several models in start_exporter, and an optimizer of each"
    panel = draw.lines("Balance of the models", text, "percentunit", Query(share, "{{run}} {{optimizer}}"), nothing=nothing)
    return panel.min(0).max(1)


def _clipping() -> Panel:
    samples = f"max by (run) ({rate(of_run('torch_grad_exporter_captures_total'))})"
    clipped = f"max by (run, optimizer) ({rate(of_run('torch_grad_clipped_steps_total'))})"
    every = ask.share_clipped("torch_grad_clip_policy_steps_total")
    text = (
        "Share of the steps that were clipped: of all steps by the policy of clip=, else of the sampled ones, where that is known "
        "of all of them. And the share of the norm that was left in the last sample: 1 is all of it."
    )
    sampled = f"clamp_max({clipped} / on (run) group_left () ({samples} > 0), 1)"
    panel = draw.lines(
        "Clipping", text, "percentunit",
        Query(f"{sampled} unless on (run) {every}", "{{run}} {{optimizer}} samples clipped"),
        Query(every, "{{run}} {{policy}} steps clipped"),
        Query(f"min by (run, optimizer) ({of_run('torch_grad_clip_coefficient')})", "{{run}} {{optimizer}} norm left in a sample"),
        nothing="No gradient was sampled in this time range",
    )  # fmt: skip
    return panel.min(0).max(1)


def _chosen_norms() -> Panel:
    exact, rule = of_layer("torch_grad_norm_recent_max"), ("run_layer:torch_grad_norm:rms5m", CHOSEN)
    norms = f"{highest(exact, 'run, layer')} or on (run, layer) {ask.of_parts(rule[0], 'run, layer', rule[1])}"
    lines = ask.steadily_top(20, norms, "run, layer", exact, ask.record(*rule))
    text = (
        "Largest norm within the last 60 s, so that no step between two scrapes is missed; for sharded layers the root mean square "
        "of 5 minutes. With All layers, the 20 largest."
    )
    panel = draw.lines("Norm", text, SCIENTIFIC, Query(lines, "{{layer}} {{run}}"), nothing="No gradient was sampled", many=True)
    return draw.logarithmic(panel)


def _chosen_distribution() -> Panel:
    selector = of_layer("torch_grad_norm_distribution_bucket", KEPT)
    text = "Norms of the chosen layers at every sampled step, by decade. A sharded layer has none: no rank knows the whole norm."
    nothing = "No distribution: the gradients are sharded, or none was sampled"
    return draw.distribution("Distribution of the norm", text, SCIENTIFIC, selector, nothing=nothing)


def _chosen_elements() -> Panel:
    selector = of_layer("torch_grad_max_magnitude")
    lines = ask.steadily_top(20, highest(selector, "run, layer"), "run, layer", selector)
    text = "Largest absolute element of the gradient. A single element about as large as the norm is an outlier in the data."
    panel = draw.lines(
        "Largest element", text, SCIENTIFIC, Query(lines, "{{layer}} {{run}}"),
        nothing="No gradient was sampled, or they are sharded", many=True,
    )  # fmt: skip
    return draw.logarithmic(panel)


def _chosen_silence() -> Panel:
    selector = of_layer("torch_grad_zero_units_ratio")
    lines = ask.steadily_top(20, highest(selector, "run, layer"), "run, layer", selector)
    text = "Share of output units without gradient at the last sample. For a sharded layer it is the part with the largest share."
    panel = draw.lines(
        "Zero units", text, "percentunit", Query(lines, "{{layer}} {{run}}"), nothing="No gradient was sampled", many=True
    )
    return panel.min(0).max(1)


def _parts() -> Panel:
    parts = of_layer("torch_grad_shard_norm", 'rank=~"$rank"')
    lines = ask.steadily_top(20, highest(parts, "run, layer, rank"), "run, layer, rank", parts)
    text = "Sharded gradients: norm of each chosen rank's part of the chosen layers, the 20 largest."
    panel = draw.lines(
        "Norm of each rank's part", text, SCIENTIFIC, Query(lines, "{{layer}} rank {{rank}} {{run}}"),
        nothing="The gradients of these layers are not sharded", many=True,
    )  # fmt: skip
    return draw.logarithmic(panel)


def _chosen_deviation() -> Panel:
    selector = of_layer("torch_grad_norm_spikes_total", KEPT)
    spikes = ask.events(selector, "run, layer", "max")
    text = "Samples in each interval with a norm beyond 6 robust sigmas and 5 times the median: which layer spiked, and when."
    panel = draw.lines(
        "Spikes", text, "short", Query(spikes, "{{layer}} {{run}}"), nothing="No chosen layer spiked, or none is known", many=True
    )
    return draw.bars(panel)


def _updates() -> Panel:
    selector = of_layer("torch_weight_update_ratio")
    lines = ask.steadily_top(20, highest(selector, "run, layer"), "run, layer", selector)
    text = "Norm of a layer's last update over the norm of its weights. About 0.001 is usual. With start_exporter(weights=True)."
    nothing = "Needs start_exporter(weights=True)"
    panel = draw.lines("Update over weight", text, SCIENTIFIC, Query(lines, "{{layer}} {{run}}"), nothing=nothing, many=True)
    return draw.logarithmic(panel)


def _weights() -> Panel:
    selector = of_layer("torch_weight_norm")
    lines = ask.steadily_top(20, highest(selector, "run, layer"), "run, layer", selector)
    text = "Norm of a layer's weights. A norm that grows without end calls for weight decay. With start_exporter(weights=True)."
    nothing = "Needs start_exporter(weights=True), and weights that are not sharded"
    return draw.lines("Norm of the weights", text, "short", Query(lines, "{{layer}} {{run}}"), nothing=nothing, many=True)


def _elements_of_weights() -> Panel:
    selector = of_layer("torch_weight_distribution_bucket", KEPT)
    text = (
        "Magnitudes of the elements of the chosen layers' weights, by half a decade: all elements, each time that a layer is "
        "measured. The lowest bucket has those up to 1e-5, zeros among them. With start_exporter(weights=True)."
    )
    nothing = "Needs start_exporter(weights=True)"
    return draw.distribution("Distribution of the weights", text, SCIENTIFIC, selector, nothing=nothing)


def _moments() -> Panel:
    deviation = of_layer("torch_grad_stddev")
    lines = ask.steadily_top(10, highest(deviation, "run, layer"), "run, layer", deviation)
    mean = f"{highest(of_layer('torch_grad_mean'), 'run, layer')} and on (run, layer) ({lines})"
    text = (
        "Mean and standard deviation over the elements of the gradient, for the 10 chosen layers with the largest "
        "deviation. With start_exporter(moments=True)."
    )
    return draw.lines(
        "Mean and standard deviation of the elements", text, SCIENTIFIC,
        Query(mean, "{{layer}} {{run}} mean"), Query(lines, "{{layer}} {{run}} deviation"),
        nothing="Needs start_exporter(moments=True)", many=True,
    )  # fmt: skip


def _extremes() -> Panel:
    largest = of_layer("torch_grad_max")
    lines = ask.steadily_top(10, highest(largest, "run, layer"), "run, layer", largest)
    smallest = f"min by (run, layer) ({of_layer('torch_grad_min')}) and on (run, layer) ({lines})"
    return draw.lines(
        "Smallest and largest element, with sign", (
            "Smallest and largest element of the gradients of the chosen layers. With start_exporter(moments=True)."
        ), SCIENTIFIC,
        Query(smallest, "{{layer}} {{run}} smallest"), Query(lines, "{{layer}} {{run}} largest"),
        nothing="Needs start_exporter(moments=True)", many=True,
    )  # fmt: skip


def _all_layers() -> list[Panel]:
    return [troubled().span(24).height(8), norms().span(12).height(14), _deviations().span(12).height(14)]


def _chosen() -> list[Panel]:
    left = [_chosen_norms(), _chosen_distribution(), _chosen_elements(), _chosen_silence(), _chosen_deviation(), _parts()]
    return [panel.span(12) for panel in left]


def dashboard() -> Dashboard:
    """The whole dashboard."""
    whole = [_global_distribution().span(12), _clipping().span(12)]
    tables = [panel.span(12).height(10) for panel in (_largest(), _furthest(), _dead(), _broken())]
    more = [panel.span(12) for panel in (_updates(), _weights(), _elements_of_weights(), _moments(), _extremes())]
    tables.append(_origin().span(24).height(6))
    content = [
        Row("All layers", _all_layers()),
        Row("Layers to look at", tables),
        Row("The whole gradient", whole),
        Row("Chosen layers: $layer", _chosen()),
        Row("Chosen layers, optional metrics: weights and moments", more, collapsed=True),
        Row("Clipping policies and frozen layers", clipping.row(), collapsed=True),
        Row("What leads the loss", leading.row(), collapsed=True),
        Row("Activations and watched tensors", activations.row(), collapsed=True),
        Row("Time of the layers", layer_times.row(), collapsed=True),
        Row("Several models", [_balance().span(24)], collapsed=True),
    ]
    text = "Which layer is in trouble, since when, and what its gradient looks like."
    return board(UID, "Gradients by layer", text, content, layer=True)
