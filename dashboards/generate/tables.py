"""Tables: the answers to several queries side by side, a row for each set of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common as build
from grafana_foundation_sdk.builders import table
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.generate.panels import Named, Query, about, asking, names, setting, steps


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: a label, or the value of the query with this letter (`Value #A`). `bar` draws the value as one."""

    field: str
    title: str
    unit: str = "short"
    bar: bool = False
    full: float | None = None
    link: str = ""
    width: int | None = None
    texts: Mapping[str, Named] | None = None


def rows(title: str, description: str, queries: Sequence[Query], columns: Sequence[Column], nothing: str) -> table.Panel:
    """A table: the answers to the queries side by side, with their labels in front; sorted by the first bar, the largest on top."""
    panel = about(table.Panel(), title, description, "short", nothing)
    if len(queries) > 1:
        panel.with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
        queries = [_by_labels(query, columns) for query in queries]
    panel = asking(panel, queries, PromQueryFormat.TABLE, instant=True)
    panel.with_transformation(_only(columns)).with_transformation(_arranged(columns))
    panel.override_by_regexp("/.*/", [setting("noValue", "-")])
    for column in columns:
        panel.override_by_name(column.title, _properties(column))
    sorted_by = next((column.title for column in columns if column.bar), columns[-1].title)
    panel.sort_by([build.TableSortByFieldState().display_name(sorted_by).desc(True)])
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
    if column.bar:
        bar = common.TableBarGaugeCellOptions(common.BarGaugeDisplayMode.BASIC, common.BarGaugeValueMode.TEXT)
        found |= {"custom.cellOptions": bar, "min": 0, "color": {"mode": "fixed", "fixedColor": "blue"}}
    if column.texts:
        found |= {"mappings": [names(column.texts)], "custom.cellOptions": common.TableColorTextCellOptions()}
    if column.full is not None:
        found["max"] = column.full
    if column.width is not None:
        found["custom.width"] = column.width
    if column.link:
        found["links"] = [{"title": "Look closer", "url": column.link}]
    return [setting(name, value) for name, value in found.items()]
