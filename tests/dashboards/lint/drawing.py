"""What is demanded of how Grafana draws a panel, its defaults merged in. Each rule yields (panel, text) for what it finds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.dashboards.lint import grafana
from tests.dashboards.lint import labels as lint_labels
from tests.dashboards.lint.model import Board, Json, Query
from tests.dashboards.lint.values import alternatives, asked, decides, names, possible

Found = Iterator[tuple[str, str]]

TIMELINES = frozenset({"state-timeline", "status-history"})
LINES = frozenset({"timeseries", "trend"})

SERIOUS = {"green": 0, "blue": 0, "yellow": 1, "orange": 1, "purple": 1, "red": 2}
"""How serious a colour looks, whichever shade of it; of others, such as `text`, nobody can say."""

LEAST_COUNT = 0.01
"""An increase of a histogram's bucket is extrapolated, so that one observation may count a little less than 1."""


def _of_type(board: Board, *types: str) -> Iterator[tuple[Json, Json]]:
    for panel in board.panels():
        if panel["type"] in types:
            yield panel, grafana.options(panel)


def hidden_cells(board: Board) -> Found:
    """A heatmap hides cells by value only below what it can show, or where nothing was counted."""
    for panel, options in _of_type(board, "heatmap"):
        low, high = options["filterValues"].get("le"), options["filterValues"].get("ge")
        counts = any(target.get("format") == "heatmap" for target in panel.get("targets", []))
        least, most = (LEAST_COUNT, None) if counts else (options["color"].get("min"), options["color"].get("max"))
        if low is not None and (least is None or low >= least):
            yield panel["title"], f"cells of {low} and less are hidden, and its values begin at {least}"
        if high is not None and (most is None or high <= most):
            yield panel["title"], f"cells of {high} and more are hidden, and its values end at {most}"


def inverted_colors(board: Board) -> Found:
    """No heatmap turns colours that Grafana has turned already, and each scheme is one of Grafana's."""
    for panel, options in _of_type(board, "heatmap"):
        color = options["color"]
        if color["mode"] == "scheme" and color["scheme"] not in grafana.TURNED:
            yield panel["title"], f"no colour scheme {color['scheme']}"
        elif color["mode"] == "scheme" and color["reverse"]:
            yield panel["title"], f"Grafana turns {color['scheme']} by itself, and reverse turns it back"


def state_legends(board: Board) -> Found:
    """A timeline of states has a legend: no continuous colours, it is shown, and each state has its own colour."""
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
    """Each state that a query gives as a number has a word and a colour; in a timeline everything is a state."""
    for panel in board.panels_with_data():
        for query, config in _settled(board, panel) if panel["type"] in {*TIMELINES, "stat", "table"} else ():
            words = {value: result for value, result in grafana.words(config).items() if _is_number(value)}
            named = {float(value) for value, result in words.items() if result.get("text") and result.get("color")}
            values = possible(query.tree()) if query.tree() is not None else frozenset()
            if grafana.has_ranges(config) or (panel["type"] not in TIMELINES and (values is None or len(values) < 2)):
                continue
            if values is None:
                yield panel["title"], "nobody knows which values it gives, and it has no ranges with a word and a colour"
            for value in sorted((values or frozenset()) - named):
                yield panel["title"], f"{value:g} has no word with a colour"


def _settled(board: Board, panel: Json) -> Iterator[tuple[Query, Json]]:
    """Each query whose values are shown, and the config of their field or column."""
    if panel["type"] == "table":
        yield from ((column.query, column.config) for column in grafana.columns(board, panel) if column.query is not None)
    else:
        yield from ((query, grafana.settings(panel, query)) for query in asked(board, panel))


def _severity(result: Json) -> int | None:
    return SERIOUS.get(str(result.get("color", "")).rpartition("-")[2])


def seriousness(board: Board) -> Found:
    """Where a larger number or the order of the conditions decides what is seen, the more serious state wins."""
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
                if order != sorted(order, reverse=True):
                    yield (
                        panel["title"],
                        f"the first condition wins, but they stand in the order {[f'{value:g}' for value in order]}",
                    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _ordered(panel: Json, states: list[tuple[float, Json]]) -> Found:
    for (_, less), (_, more) in itertools.pairwise(states):
        one, other = _severity(less), _severity(more)
        if one is not None and other is not None and one > other:
            yield panel["title"], f"{more.get('text')} ({more.get('color')}) hides {less.get('text')} ({less.get('color')})"
    said = [str(result.get("text", "")).lower() for _, result in states]
    if "dead" in said and "vanished" in said and said.index("dead") < said.index("vanished"):
        yield panel["title"], "a dead layer has vanished too, and is called that"


def bars(board: Board) -> Found:
    """Each bar has a minimum and a maximum of its own: without them it is as long as its share of any field's largest."""
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


def table_width(board: Board) -> Found:
    """All columns of a table are seen on a laptop's screen."""
    for panel in board.panels():
        if panel["type"] == "table":
            columns, room = grafana.columns(board, panel), grafana.inner_width(panel["gridPos"]["w"])
            needed = sum(column.width() for column in columns)
            if needed > room:
                yield panel["title"], f"its {len(columns)} columns need {needed:g} pixels of {room}"


def colors(board: Board) -> Found:
    """A line that is called by its run has the run's colour everywhere; others have the colours of their order, which differ."""
    for panel in board.panels():
        for query in asked(board, panel) if panel["type"] in LINES else ():
            mode, own = (found["color"]["mode"] for found in (grafana.settings(panel, query), grafana.config(panel)))
            of_run = query.target.get("legendFormat") == "{{run}}"
            if of_run and mode != "palette-classic-by-name" and mode == own:
                yield panel["title"], f"{mode}: a run has another colour in each panel"
            if not of_run and mode == "palette-classic-by-name":
                yield panel["title"], f"colours by name, of which several are nearly the same: {query.target.get('legendFormat')}"
            if not of_run and mode == own and not mode.startswith("palette-"):
                yield panel["title"], f"{mode}: its lines have one colour"


def _draws(query: Query, *parts: str) -> bool:
    return any(part in name for name in names(query) for part in parts)


def axes(board: Board) -> Found:
    """Utilisation has all of its axis, temperature a limit, and throttling is a state."""
    states = any("gpu_throttled" in query.text for query in board.queries() if query.panel["type"] in TIMELINES)
    for panel in board.panels():
        for query in asked(board, panel) if panel["type"] in LINES else ():
            config = grafana.settings(panel, query)
            if _draws(query, "utilization_ratio") and (config.get("min"), config.get("max")) != (0, 1):
                yield panel["title"], f"utilisation from {config.get('min')} to {config.get('max')}, not from 0 to 1"
            steps, style = config["thresholds"]["steps"], config["custom"].get("thresholdsStyle", {}).get("mode", "off")
            if _draws(query, "temperature") and (
                "thresholds" not in panel["fieldConfig"]["defaults"] or len(steps) < 2 or style == "off"
            ):
                yield panel["title"], "temperature without a threshold that is drawn"
            if _draws(query, "gpu_throttled") and not states:
                yield panel["title"], "throttling as lines only, not as a state timeline"


def per_host(board: Board) -> Found:
    """What is of a host is drawn once for it, not once for each run or rank on it."""
    for query in board.queries():
        if query.target and _draws(query, "torch_host_", "torch_container_"):
            left = lint_labels.of(query.tree(), board.recorded)
            legend = query.target.get("legendFormat", "")
            if "host" not in left or left & {"run", "rank"} or "{{run}}" in legend or "{{rank}}" in legend:
                yield query.panel["title"], f"of a host, but drawn for each {', '.join(sorted(left)) or 'sum'}: {legend}"
            elif "{{host}}" not in legend and query.panel["type"] != "table":
                yield query.panel["title"], f"of a host whose name is not in the legend {legend!r}"
