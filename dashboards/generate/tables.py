"""Tables: the answers to several queries side by side, a row for each set of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common as build
from grafana_foundation_sdk.builders import table
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.generate.panels import NO_RUN, SCIENTIFIC, Named, Query, about, asking, names, setting, steps
from dashboards.generate.queries import NO_RUNS, NOTHING, or_nothing_now

# The columns of what the first query answers, which is asked whether there is anything.
FIRST_VALUES = frozenset({"Value", "Value #A"})
NO_VALUE: Mapping[int, Named] = {NOTHING: ("-", "text"), NO_RUNS: ("-", "text")}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: a label, or the value of the query with this letter (`Value #A`).

    `width`: in pixels; one without has 150 or what is left. `full`: the value is drawn as a bar from 0 to it. `orange`: from where
    on the bar says that something is wrong.
    """

    field: str
    title: str
    unit: str = "short"
    decimals: int | None = None
    width: int | None = None
    full: float | None = None
    orange: float | None = None
    link: str = ""
    texts: Mapping[str, Named] | Mapping[int, Named] | None = None


NOTE = Column("note", "Note")
"""The column of the sentence of a table without rows; Grafana leaves it out where there are some."""


def rows(
    title: str, description: str, queries: Sequence[Query], columns: Sequence[Column], nothing: str, *, order: Sequence[str]
) -> table.Panel:
    """A table: the answers to the queries side by side, with their labels in front; one row with `nothing` where there is none.

    `order`: the titles of the columns that it is sorted by; a minus in front puts the largest on top. Names are sorted by Grafana,
    from 12 on with the numbers within them by their size.
    """
    panel = about(table.Panel(), title, description, "short", NO_RUN)
    # Grafana 12's table draws no sentence where it has no rows. The sentence has a column of its own: others lead somewhere.
    columns = [NOTE, *columns]
    first = Query(or_nothing_now(queries[0].expression, f"{{{{{NOTE.field}}}}}", nothing))
    queries = [first, *queries[1:]]
    if len(queries) > 1:
        panel.with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
        queries = [_by_labels(query, columns) for query in queries]
    panel = asking(panel, queries, PromQueryFormat.TABLE, instant=True)
    panel.with_transformation(_only(columns)).with_transformation(_arranged(columns))
    panel.override_by_regexp("/.*/", [setting("noValue", "-")])
    for column in columns:
        panel.override_by_name(column.title, _properties(column))
    panel.sort_by([build.TableSortByFieldState().display_name(by.lstrip("-")).desc(by.startswith("-")) for by in order])
    return panel.show_header(True).thresholds(steps(("text", None)))


def _by_labels(query: Query, columns: Sequence[Column]) -> Query:
    # Grafana puts answers into one row only if no label differs, and recording rules keep their names as one.
    labels = ", ".join(column.field for column in columns if not column.field.startswith("Value"))
    return Query(f"max by ({labels}) ({query.expression})", query.legend)


def _only(columns: Sequence[Column]) -> dashboard.DataTransformerConfig:
    options = {"include": {"names": [column.field for column in columns]}}
    return dashboard.DataTransformerConfig(id_val="filterFieldsByName", options=options)


def _arranged(columns: Sequence[Column]) -> dashboard.DataTransformerConfig:
    options = {
        "excludeByName": {},
        "indexByName": {column.field: place for place, column in enumerate(columns)},
        "renameByName": {column.field: column.title for column in columns},
    }
    return dashboard.DataTransformerConfig(id_val="organize", options=options)


def _properties(column: Column) -> list[dashboard.DynamicConfigValue]:
    found: dict[str, object] = {"unit": column.unit}
    if column.field in FIRST_VALUES:
        found["mappings"] = [names(NO_VALUE)]
    if column.width is not None:
        found["custom.width"] = column.width
    if column.decimals is not None or column.unit == SCIENTIFIC:
        found["decimals"] = 2 if column.decimals is None else column.decimals
    if column.full is not None:
        bar = common.TableBarGaugeCellOptions(common.BarGaugeDisplayMode.BASIC, common.BarGaugeValueMode.TEXT)
        found |= {"custom.cellOptions": bar, "min": 0, "max": column.full}
        colors = steps(("blue", None), *([("orange", column.orange)] if column.orange is not None else []))
        found |= {"color": {"mode": "thresholds"}, "thresholds": colors.build()}
    if column.texts:
        found["mappings"] = [names({**column.texts, **NO_VALUE})]
        found["custom.cellOptions"] = common.TableColorTextCellOptions()
    if column.link:
        found["links"] = [{"title": "Look closer", "url": column.link}]
    return [setting(name, value) for name, value in found.items()]
