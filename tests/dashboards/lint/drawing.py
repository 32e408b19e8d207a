"""Rules about what Grafana draws with its defaults merged in: each yields (panel, text) for every fault."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.dashboards.lint import grafana
from tests.dashboards.lint.model import Board, Json, Query
from tests.dashboards.lint.values import alternatives, asked, decides, possible

Found = Iterator[tuple[str, str]]

TIMELINES = frozenset({"state-timeline", "status-history"})
SERIOUS = {"green": 0, "blue": 0, "yellow": 1, "orange": 1, "purple": 1, "red": 2}


def _of_type(board: Board, *types: str) -> Iterator[tuple[Json, Json]]:
    for panel in board.panels():
        if panel["type"] in types:
            yield panel, grafana.options(panel)


def hidden_cells(board: Board) -> Found:
    """A heatmap hides no cell whose value it can show."""
    for panel, options in _of_type(board, "heatmap"):
        low, high = options["filterValues"].get("le"), options["filterValues"].get("ge")
        counts = any(target.get("format") == "heatmap" for target in panel.get("targets", []))
        # Prometheus extrapolates increases, so one observation may count slightly less than 1.
        least, most = (0.01, None) if counts else (options["color"].get("min"), options["color"].get("max"))
        if low is not None and (least is None or low >= least):
            yield panel["title"], f"cells of {low} and less are hidden, and its values begin at {least}"
        if high is not None and (most is None or high <= most):
            yield panel["title"], f"cells of {high} and more are hidden, and its values end at {most}"


def inverted_colors(board: Board) -> Found:
    """No heatmap reverses its colours: Grafana has reversed them already."""
    for panel, options in _of_type(board, "heatmap"):
        color = options["color"]
        if color["mode"] == "scheme" and color["reverse"]:
            yield panel["title"], f"{color['scheme']} is reversed twice"


def state_legends(board: Board) -> Found:
    """A state timeline shows its legend, and each state has its own colour."""
    for panel, options in _of_type(board, *TIMELINES):
        config, legend = grafana.config(panel), options["legend"]
        if config["color"]["mode"].startswith("continuous"):
            yield panel["title"], f"has no legend: its colour mode is {config['color']['mode']}"
        if not legend["showLegend"] or legend["displayMode"] == "hidden":
            yield panel["title"], "its legend is not shown"
        colors = [result.get("color") for result in grafana.words(config).values()]
        for color in sorted({str(color) for color in colors if colors.count(color) > 1}):
            yield panel["title"], f"{color} stands for several states"


def states_have_names(board: Board) -> Found:
    """Each state that a query returns as a number has a word and a colour."""
    for panel in board.panels_with_data():
        for query, config in _settled(board, panel) if panel["type"] in {*TIMELINES, "stat", "table"} else ():
            words = {value: result for value, result in grafana.words(config).items() if _is_number(value)}
            named = {float(value) for value, result in words.items() if result.get("text") and result.get("color")}
            values = possible(query.tree()) if query.tree() is not None else frozenset()
            if grafana.has_ranges(config) or (panel["type"] not in TIMELINES and (values is None or len(values) < 2)):
                continue
            if values is None:
                yield panel["title"], "unknown values without ranges that have a word and a colour"
            for value in sorted((values or frozenset()) - named):
                yield panel["title"], f"{value:g} has no word with a colour"


def _settled(board: Board, panel: Json) -> Iterator[tuple[Query, Json]]:
    """Yield each query with the config of its series or column."""
    if panel["type"] == "table":
        yield from ((column.query, column.config) for column in grafana.columns(board, panel) if column.query is not None)
    else:
        yield from ((query, grafana.settings(panel, query)) for query in asked(board, panel))


def _severity(result: Json) -> int | None:
    return SERIOUS.get(str(result.get("color", "")).rpartition("-")[2])


def seriousness(board: Board) -> Found:
    """Where several states compete, the more serious one is shown."""
    for panel in board.panels_with_data():
        for query in asked(board, panel):
            words = {
                float(value): result for value, result in grafana.words(grafana.settings(panel, query)).items() if _is_number(value)
            }
            decided = decides(query)
            if len(words) < 2 or not decided:
                continue  # A single series has one state at a time.
            rising = sorted(words, reverse="min" in decided and "max" not in decided)
            yield from _ordered(panel, [(value, words[value]) for value in rising])
            branches = [possible(branch) for branch in alternatives(query.tree())]
            if len(branches) > 1 and all(values is not None and len(values) == 1 for values in branches):
                order = [next(iter(values)) for values in branches if values]
                yield from _ordered(panel, [(value, words[value]) for value in reversed(order) if value in words])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _ordered(panel: Json, states: list[tuple[float, Json]]) -> Found:
    for (_, less), (_, more) in itertools.pairwise(states):
        low, high = _severity(less), _severity(more)
        if low is not None and high is not None and low > high:
            yield panel["title"], f"{more.get('text')} ({more.get('color')}) hides {less.get('text')} ({less.get('color')})"


def bars(board: Board) -> Found:
    """Each bar has its own minimum and maximum; otherwise its length depends on other fields."""
    for panel in board.panels_with_data():
        for name, config in _bars(board, panel):
            for limit in ("min", "max"):
                if config.get(limit) is None:
                    yield panel["title"], f"the bar {name} has no {limit}"


def _bars(board: Board, panel: Json) -> Iterator[tuple[str, Json]]:
    if panel["type"] in {"bargauge", "gauge", "stat"}:
        for query in asked(board, panel):
            config = grafana.settings(panel, query)
            if panel["type"] != "stat" or config["thresholds"]["mode"] == "percentage":
                yield str(query.target.get("refId")), config
    elif panel["type"] == "table":
        for column in grafana.columns(board, panel):
            if column.config["custom"].get("cellOptions", {}).get("type") == "gauge":
                yield column.title, column.config


def _fields(board: Board, panel: Json) -> Iterator[tuple[str, Json]]:
    if panel["type"] == "table":
        yield from ((column.title, column.config) for column in grafana.columns(board, panel))
    else:
        yield from ((str(query.target.get("refId")), grafana.settings(panel, query)) for query in asked(board, panel))


def decimals(board: Board) -> Found:
    """Scientific notation states its decimals: by default Grafana writes all of them."""
    for panel in board.panels_with_data():
        options = grafana.options(panel)
        configs = [*_fields(board, panel)] if panel["type"] != "heatmap" else []
        configs += [(key, options[key]) for key in ("yAxis", "cellValues") if panel["type"] == "heatmap" and key in options]
        for name, config in configs:
            if config.get("unit") == "sci" and config.get("decimals") is None:
                yield panel["title"], f"{name}: scientific notation without decimals"


def log_axis(board: Board) -> Found:
    """A logarithmic axis has a unit that distinguishes its small ticks, or begins at 1."""
    for panel in board.panels():
        for name, config in _fields(board, panel) if panel["type"] in {"timeseries", "trend", "barchart"} else ():
            unit = str(config.get("unit", "short"))
            logarithmic = config["custom"].get("scaleDistribution", {}).get("type") == "log"
            if logarithmic and unit.partition(":")[0] in grafana.FIXED_POINT and (config.get("min") or 0) < 1:
                yield panel["title"], f"{name}: ticks below 1 of a logarithmic axis all read 0 as {unit}"


def limits(board: Board) -> Found:
    """An axis, bar or colour scale begins below its end, and the thresholds of a ratio are ratios."""
    for panel in board.panels_with_data():
        color = grafana.options(panel).get("color", {}) if panel["type"] == "heatmap" else {}
        for name, config in [("colours", color), *_fields(board, panel)]:
            low, high = config.get("min"), config.get("max")
            if low is not None and high is not None and low >= high:
                yield panel["title"], f"{name} from {low} to {high}"
        own = panel.get("fieldConfig", {}).get("defaults", {})  # Grafana's own threshold is 80, which most graphs do not draw
        for step in own.get("thresholds", {}).get("steps", ()) if own.get("unit") == "percentunit" else ():
            if (step.get("value") or 0) > max(1, own.get("max") or 1):
                yield panel["title"], f"a threshold of {step['value']} on a share"
