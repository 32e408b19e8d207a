"""The kinds of panel that the dashboards are made of, each a builder of Grafana's foundation SDK to go on with.

Every panel has a title, a description, a unit and a sentence for when there is nothing to show. Colours have names, which Grafana
renders for the light and the dark theme.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import bargauge, heatmap, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import common as build
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale
from grafana_foundation_sdk.models.prometheus import PromQueryFormat, QueryEditorMode

from dashboards.generate.queries import NO_RUNS, NOTHING, buckets, observed, or_nothing

Named = tuple[str, str]
"""A word and a colour for a value."""

NO_RUN = "No run in this time range"
ONE_SCRAPE = ", or one scrape only"
NO_OWN_TIME = "Not measured, or no rules"
"""Short, since Grafana writes it as large as the number would be: in the width of the panel."""

UNDRAWN = -1000
"""The value of a row of a heatmap that has no cells."""

CLICKED = "${__field.labels.run}"
"""The run of the line or number that is clicked, in a link."""

SCIENTIFIC = "sci"
"""The unit of what spans decades. Others write the small ticks of a logarithmic axis as 0."""

POWER = "prefix:10^"
"""The unit of a decimal logarithm."""

DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")

Panel = timeseries.Panel | stat.Panel | heatmap.Panel | statetimeline.Panel | table.Panel | bargauge.Panel
P = TypeVar("P", timeseries.Panel, stat.Panel, heatmap.Panel, statetimeline.Panel, table.Panel, bargauge.Panel)


@dataclass(frozen=True, slots=True)
class Query:
    """What Prometheus is asked, and how the answer is called: `{{label}}` stands for a label's value."""

    expression: str
    legend: str = ""


def _query(letter: str, query: Query, form: PromQueryFormat, *, instant: bool) -> Dataquery:
    target = Dataquery().expr(query.expression).legend_format(query.legend or "__auto").ref_id(letter).format(form)
    target.editor_mode(QueryEditorMode.CODE).datasource(DATASOURCE)
    return target.instant() if instant else target.range()


def _sentence(nothing: str, queries: Sequence[Query]) -> str:
    """What a graph says where there is nothing: of rates alone, that they need two scrapes."""
    counted = all("[$__rate_interval]" in query.expression for query in queries)
    return nothing + ONE_SCRAPE if counted else nothing


def asking(panel: P, queries: Sequence[Query], form: PromQueryFormat = PromQueryFormat.TIME_SERIES, *, instant: bool = False) -> P:
    """The panel with its queries, which are named A, B, C and so on."""
    letters = string.ascii_uppercase
    return panel.targets([_query(letter, query, form, instant=instant) for letter, query in zip(letters, queries, strict=False)])


def about(panel: P, title: str, description: str, unit: str, nothing: str) -> P:
    """The panel with what every panel has; `nothing` is what it says where there is no data, if anything."""
    panel = panel.title(title).description(description).unit(unit).datasource(DATASOURCE)
    if nothing:
        panel.no_value(nothing)
    return panel.decimals(2) if unit == SCIENTIFIC else panel


def steps(*colors: tuple[str, float | None]) -> builders.ThresholdsConfig:
    """Colours from values on; the first begins at None, below everything."""
    found = [dashboard.Threshold(value=value, color=color) for color, value in colors]
    return builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(found)


def url(uid: str, more: str = "", run: str = "") -> str:
    """The address of another of the dashboards that keeps time range, data source and jobs, and the runs unless one is named."""
    runs = f"var-run={run}" if run else "${run:queryparam}"
    kept = ("${datasource:queryparam}", "${job:queryparam}", runs, more, "${__url_time_range}")
    return f"/d/{uid}?{'&'.join(filter(None, kept))}"


class DataLink(dashboard.DashboardLink):
    """A link on a value. The SDK takes one of a dashboard for it, most of whose keys Grafana does not have here."""

    def to_json(self) -> dict[str, object]:
        """Title and address."""
        return {"title": self.title, "url": self.url}


@dataclass(frozen=True, slots=True)
class Link(Builder[dashboard.DashboardLink]):
    """A link on a value to an address, as `url` makes it."""

    title: str
    address: str

    def build(self) -> dashboard.DashboardLink:
        """As the SDK wants it."""
        return DataLink(title=self.title, url=self.address)


def link(title: str, uid: str, more: str = "", run: str = "") -> Link:
    """A link to another of the dashboards."""
    return Link(title, url(uid, more, run))


def panel_link(title: str, uid: str) -> builders.DashboardLink:
    """A link on the panel itself, for kinds of panel whose values have none."""
    return builders.DashboardLink(title).type(dashboard.DashboardLinkType.LINK).url(url(uid))


def setting(name: str, value: object) -> dashboard.DynamicConfigValue:
    """One property of a field that differs from the panel's."""
    return dashboard.DynamicConfigValue(id_val=name, value=value)


def names(texts: Mapping[int, Named] | Mapping[str, Named]) -> dashboard.ValueMap:
    """Words and colours for numbers or texts."""
    found = {
        str(value): dashboard.ValueMappingResult(text=text, color=color, index=place)
        for place, (value, (text, color)) in enumerate(texts.items())
    }
    return dashboard.ValueMap(options=found)


def _nothing(text: str) -> dashboard.SpecialValueMap:
    # Without it, "no value" would stand on the ground of the lowest threshold, often on green.
    result = dashboard.ValueMappingResult(text=text, color="transparent", index=100)
    options = dashboard.DashboardSpecialValueMapOptions(match=dashboard.SpecialValueMatch.NULL_AND_NAN, result=result)
    return dashboard.SpecialValueMap(options=options)


def lines(title: str, description: str, unit: str, *queries: Query, nothing: str = NO_RUN, many: bool = False) -> timeseries.Panel:
    """Lines over time. Where there are `many`, their names stand in a table on the right, the largest last value first."""
    legend = build.VizLegendOptions().show_legend(True)
    if many:
        legend.display_mode(common.LegendDisplayMode.TABLE).placement(common.LegendPlacement.RIGHT).calcs(["lastNotNull"])
        legend.sort_by("Last *").sort_desc(True).width(320)
    else:
        legend.display_mode(common.LegendDisplayMode.LIST).placement(common.LegendPlacement.BOTTOM).calcs([])
    panel = asking(about(timeseries.Panel(), title, description, unit, _sentence(nothing, queries)), queries).legend(legend)
    tooltip = build.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    panel = panel.tooltip(tooltip).color_scheme(_palette(queries)).line_width(1).fill_opacity(0)
    return panel.show_points(common.VisibilityMode.AUTO)


def _palette(queries: Sequence[Query]) -> builders.FieldColor:
    """Colours by the order of the lines; by their names where these are runs, so that a run has one colour on all panels."""
    runs = all(query.legend == "{{run}}" for query in queries)
    mode = dashboard.FieldColorModeId.PALETTE_CLASSIC_BY_NAME if runs else dashboard.FieldColorModeId.PALETTE_CLASSIC
    return builders.FieldColor().mode(mode)


def logarithmic(panel: timeseries.Panel, base: float = 10) -> timeseries.Panel:
    """The same with a logarithmic axis, for what spans decades: its unit is `SCIENTIFIC`, or one that knows small parts.

    Grafana's axis ends at powers of `base`.
    """
    return panel.scale_distribution(build.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(base))


def stacked(panel: timeseries.Panel) -> timeseries.Panel:
    """The same as areas on top of each other, for parts of a whole."""
    return panel.stacking(build.StackingConfig().mode(common.StackingMode.NORMAL).group("A")).fill_opacity(60).line_width(0)


def bars(panel: timeseries.Panel) -> timeseries.Panel:
    """The same as bars, for how often something happened in each interval."""
    return whole(panel.draw_style(common.GraphDrawStyle.BARS).fill_opacity(80))


def whole(panel: timeseries.Panel) -> timeseries.Panel:
    """The same with an axis of whole numbers from 0, to 1 at least: Grafana's ends at 100 where all are 0."""
    return panel.min(0).axis_soft_max(1).decimals(0)


def repeated(panel: timeseries.Panel, variable: str, side_by_side: int) -> timeseries.Panel:
    """The same once for each chosen value of a variable; without any, once with its sentence."""
    return panel.repeat(variable).repeat_direction("h").max_per_row(side_by_side)


def band(panel: timeseries.Panel, above: Query, below: Query, color: str) -> timeseries.Panel:
    """The same with the area between two of its queries filled; their legends name no label, so each is one line at most."""
    hidden = [setting("custom.lineWidth", 0), setting("color", {"mode": "fixed", "fixedColor": color})]
    panel.override_by_name(below.legend, [*hidden, setting("custom.hideFrom", {"legend": True, "tooltip": False, "viz": False})])
    filled = [setting("custom.fillBelowTo", below.legend), setting("custom.fillOpacity", 20)]
    return panel.override_by_name(above.legend, [*hidden, *filled])


def limit(panel: timeseries.Panel, value: float) -> timeseries.Panel:
    """The same with a dashed line where an alert begins."""
    panel.thresholds(steps(("transparent", None), ("orange", value)))
    return panel.thresholds_style(build.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED))


def number(
    title: str, description: str, unit: str, *queries: Query, nothing: str, texts: Mapping[int, Named] | None = None
) -> stat.Panel:
    """A few numbers as of now, large, on a coloured ground where thresholds or names give one."""
    panel = asking(about(stat.Panel(), title, description, unit, nothing), queries, instant=True)
    panel.reduce_options(build.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
    panel.color_mode(common.BigValueColorMode.BACKGROUND_SOLID).graph_mode(common.BigValueGraphMode.NONE)
    panel.mappings([*([names(texts)] if texts else []), _nothing(nothing)])
    # Grafana shrinks the names with the panel, to 5 pixels if it is not stopped.
    panel.text(build.VizTextDisplayOptions().title_size(12))
    return panel.text_mode(common.BigValueTextMode.VALUE_AND_NAME).wide_layout(True).thresholds(steps(("transparent", None)))


def plain(panel: stat.Panel) -> stat.Panel:
    """The same without a coloured ground: the numbers are neither good nor bad."""
    return panel.color_mode(common.BigValueColorMode.NONE)


def ranking(title: str, description: str, unit: str, *queries: Query, full: float, nothing: str) -> bargauge.Panel:
    """A bar for each series, as of now, from 0 to `full`."""
    panel = asking(about(bargauge.Panel(), title, description, unit, nothing), queries, instant=True)
    panel.reduce_options(build.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
    panel.display_mode(common.BarGaugeDisplayMode.BASIC).orientation(common.VizOrientation.HORIZONTAL)
    return panel.min(0).max(full).show_unfilled(True).thresholds(steps(("blue", None)))


def timeline(
    title: str, description: str, query: Query, texts: Mapping[int, Named], nothing: str, *, ever: str = ""
) -> statetimeline.Panel:
    """A row for each series whose colour says its state; 10 rows to a page. While there is none a green row says so.

    With the colour mode that Grafana takes otherwise, a continuous one, there is no legend. `ever`: see `or_nothing`.
    """
    # For a timeline without series Grafana draws an error, no sentence. Where there are some, a sentence is in the legend of gaps,
    # and an empty one makes each gap a 0.
    panel = about(statetimeline.Panel(), title, description, "short", nothing="")
    filled = Query(or_nothing(query.expression, query.legend, nothing, unless=ever), query.legend)
    empty = {NOTHING: ("None", "green"), NO_RUNS: ("No run", "text")}
    panel = asking(panel, [filled]).mappings([names({**texts, **empty})])
    panel.legend(build.VizLegendOptions().show_legend(True).display_mode(common.LegendDisplayMode.LIST).placement(
        common.LegendPlacement.BOTTOM))  # fmt: skip
    panel.show_value(common.VisibilityMode.NEVER).merge_values(True).row_height(0.85).per_page(10).fill_opacity(80)
    tooltip = build.VizTooltipOptions().mode(common.TooltipDisplayMode.SINGLE).sort(common.SortOrder.NONE)
    panel.color_scheme(builders.FieldColor().mode(dashboard.FieldColorModeId.FIXED).fixed_color("text"))
    return panel.thresholds(steps(("text", None))).tooltip(tooltip).max_data_points(120)


def _color(scheme: str) -> heatmap.HeatmapColorOptions:
    color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme(scheme).steps(64).fill("dark-orange")
    return color.scale(HeatmapColorScale.EXPONENTIAL).exponent(0.5)


def _heatmap(panel: heatmap.Panel, color: heatmap.HeatmapColorOptions, hidden: float) -> heatmap.Panel:
    """`hidden`: cells up to this value are not drawn. Grafana hides those up to 1e-9 where nothing is said."""
    panel.color(color).mode(common.TooltipDisplayMode.SINGLE).show_color_scale(True).show_legend().calculate(False)
    return panel.filter_values(heatmap.FilterValueRange().le(hidden)).cell_gap(1).max_data_points(120)


def distribution(title: str, description: str, unit: str, selector: str, nothing: str) -> heatmap.Panel:
    """How the observations of a histogram spread over time; `selector`: its buckets. Without any there is a row that says so."""
    filled = or_nothing(buckets(selector), "{{le}}", nothing + ONE_SCRAPE, UNDRAWN, unless=f"{observed(selector)} > 0")
    query = Query(filled, "{{le}}")
    panel = about(heatmap.Panel(), title, description, unit, NO_RUN)
    panel = asking(panel, [query], PromQueryFormat.HEATMAP)
    axis = heatmap.YAxisConfig().unit(unit).axis_placement(common.AxisPlacement.LEFT).reverse(False)
    if unit == SCIENTIFIC:
        axis.decimals(2)
    return _heatmap(panel, _color("Oranges"), hidden=1e-9).y_axis(axis).cell_values(heatmap.CellValues().unit("short").decimals(0))


def field_of_rows(
    title: str,
    description: str,
    query: Query,
    *,
    scheme: str,
    limits: tuple[float, float],
    nothing: str,
    ever: str,
    unit: str = "short",
) -> heatmap.Panel:
    """A thin row for each series, its value as a colour between two limits: hundreds of layers at a glance.

    Grafana itself turns the schemes that end in blue, so that red is high. `ever`: see `or_nothing`.
    """
    filled = Query(or_nothing(query.expression, query.legend, nothing, UNDRAWN, unless=ever), query.legend)
    panel = asking(about(heatmap.Panel(), title, description, unit, NO_RUN), [filled])
    color = _color(scheme).scale(HeatmapColorScale.LINEAR).min(limits[0]).max(limits[1]).reverse(False)
    axis = heatmap.YAxisConfig().unit("short").axis_placement(common.AxisPlacement.LEFT).axis_width(180)
    axis.reverse(True)  # the first row on top
    panel = _heatmap(panel, color, hidden=UNDRAWN).y_axis(axis).cell_gap(0)
    return panel.cell_values(heatmap.CellValues().unit(unit).decimals(1))
