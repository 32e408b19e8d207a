"""What all dashboards have in common: variables, links to each other, annotations, time range, and where panels stand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

from dashboards.generate.panels import DATASOURCE, Panel
from dashboards.generate.queries import KEPT, equal, firing, of_run

TAG = "torch-grad-exporter"
EVERYTHING = dashboard.VariableOption(selected=True, text="All", value="$__all")
# Without it Grafana chooses the first by name.
DEFAULT = dashboard.VariableOption(selected=False, text="default", value="default")

# Panels narrower than this, of 24, have no room for a legend at the right.
WIDE = 12


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading. Those of a collapsed row are not queried before it is opened."""

    title: str
    panels: Sequence[Panel]
    collapsed: bool = False


class Event(dashboard.AnnotationQuery):
    """An annotation from Prometheus whose moment is the value of its series, with what the SDK's model has no place for.

    Grafana makes a region of the moments at which a series is there; of a moment that stays the same it makes one mark.
    """

    title: str
    text: str

    def to_json(self) -> dict[str, object]:
        """As the SDK has it, and the rest."""
        return super().to_json() | {"titleFormat": self.title, "textFormat": self.text, "useValueForTime": True}


class _Annotation(Builder[dashboard.AnnotationQuery]):
    """`expression`: the moments, in seconds of Unix time; `shown`: from the start."""

    def __init__(self, name: str, color: str, expression: str, title: str, text: str, *, shown: bool) -> None:
        milliseconds = f"round(1000 * {expression})"
        self._event = Event(name=name, datasource=DATASOURCE, enable=shown, hide=False, icon_color=color, expr=milliseconds)
        self._event.title, self._event.text = title, text

    def build(self) -> dashboard.AnnotationQuery:
        """The annotation."""
        return self._event


def _annotations() -> list[_Annotation]:
    # Of critical ones: with many runs the marks of all would be a comb.
    critical = firing(equal("severity", "critical"))
    begun = f'min by (alertname, severity, run) (ALERTS_FOR_STATE{{run=~"$run"}} and ignoring (alertstate) {critical})'
    over = of_run("torch_train_state", 'state=~"finished|failed"')
    last = of_run("torch_train_last_activity_timestamp_seconds")
    ends = f"min by (run, state) ({last} * on (job, instance, run, rank) group_left (state) ({over} == 1))"
    acted = f"max by (run, action) ({of_run('torch_grad_exporter_last_action_timestamp_seconds')})"
    return [
        _Annotation("Actions", "green", acted, "{{action}}", "{{run}}", shown=False),
        _Annotation("Alerts begin", "red", begun, "{{alertname}}", "{{severity}}: {{run}}", shown=True),
        _Annotation("Runs end", "blue", ends, "{{run}} has {{state}}", "", shown=True),
    ]


def _variable(name: str, label: str, description: str, query: str, sort: dashboard.VariableSort) -> builders.QueryVariable:
    variable = builders.QueryVariable(name).label(label).description(description).query(query).datasource(DATASOURCE)
    variable.refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(sort)
    return variable.multi(True).include_all(True).all_value(".+").current(EVERYTHING)


def _variables(*, layer: bool, value: bool) -> list[Builder[dashboard.VariableModel]]:
    world, by_name = "torch_train_world_size", dashboard.VariableSort.ALPHABETICAL_ASC
    found: list[Builder[dashboard.VariableModel]] = [
        builders.DatasourceVariable("datasource").label("Data source").type("prometheus").current(DEFAULT),
        _variable("job", "Job", "Scrape job of Prometheus", f"label_values({world}, job)", by_name),
        _variable("run", "Run", "Training run", f'label_values({world}{{job=~"$job"}}, run)', by_name),
        _variable("rank", "Rank", "Process of the run, for panels about processes",
            f"label_values({of_run(world)}, rank)", dashboard.VariableSort.NUMERICAL_ASC),
    ]  # fmt: skip
    if value:
        query = f"label_values({of_run('torch_train_value')}, name)"
        found.append(_variable("value", "Value", "Logged names, a panel each", query, dashboard.VariableSort.NATURAL_ASC))
    if layer:
        query = f"label_values({of_run('torch_grad_captures_total', KEPT)}, layer)"
        found.append(
            _variable("layer", "Layer", "Layers for the panels about chosen layers", query, dashboard.VariableSort.NATURAL_ASC)
        )
    return found


def _numbered(place: int, row: Row) -> tuple[builders.Row, list[Panel]]:
    # A hundred ids for each row: a panel more in one moves none in the others, so that saved links to panels stay right.
    for number, panel in enumerate(row.panels, start=100 * place + 1):
        panel.id(number)
    return builders.Row(row.title).id(100 * place).collapsed(row.collapsed), list(row.panels)


def plain(found: dashboard.Dashboard) -> dict[str, object]:
    """The dashboard as plain JSON, without what the SDK adds and Grafana does not have: `auto` is of interval variables only."""
    made: dict[str, object] = json.loads(json.dumps(found, cls=JSONEncoder))
    for variable in made["templating"]["list"]:  # type: ignore[index]
        for name in ("auto", "auto_count", "auto_min"):
            variable.pop(name, None)
    return made


def board(
    uid: str, title: str, description: str, content: Sequence[Row], *, layer: bool = False, value: bool = False
) -> dashboard.Dashboard:
    """A dashboard of these rows, with all that is the same in each; `layer`, `value`: the variables that it has besides."""
    found = builders.Dashboard(title).uid(uid).description(description).tags([TAG, "pytorch"]).readonly()
    found.tooltip(dashboard.DashboardCursorSync.CROSSHAIR).time("now-1h", "now").refresh("30s").timezone("browser")
    found.variables(_variables(layer=layer, value=value)).annotations(list(_annotations()))
    links = builders.DashboardLink("Training dashboards").type(dashboard.DashboardLinkType.DASHBOARDS).tags([TAG])
    found.links([links.include_vars(True).keep_time(True).as_dropdown(True).tooltip("Another view of the same runs")])
    for place, row in enumerate(content, start=1):
        heading, shown = _numbered(place, row)
        for panel in shown if row.collapsed else ():
            heading.with_panel(panel)
        found.with_row(heading)
        for panel in () if row.collapsed else shown:
            found.with_panel(panel)
    made = found.build()
    _close_up(made)
    for drawn in _panels(made):
        legend = getattr(drawn.options, "legend", None)
        if legend is not None and drawn.grid_pos is not None and drawn.grid_pos.w < WIDE:
            legend.placement, legend.width = common.LegendPlacement.BOTTOM, None
    return made


def _close_up(made: dashboard.Dashboard) -> None:
    """Move what is below a collapsed row up to it: the builder leaves room for the panels within."""
    end, gap = 0, 0
    for panel in made.panels or ():
        within = panel.panels if isinstance(panel, dashboard.RowPanel) else []
        places = [each.grid_pos for each in (panel, *within) if each.grid_pos is not None]
        gap = places[0].y - end if isinstance(panel, dashboard.RowPanel) else gap
        for place in places:
            place.y -= gap
        end = max(end, places[0].y + places[0].h)


def _panels(made: dashboard.Dashboard) -> Iterator[dashboard.Panel]:
    for panel in made.panels or ():
        if isinstance(panel, dashboard.RowPanel):
            yield from panel.panels
        else:
            yield panel
