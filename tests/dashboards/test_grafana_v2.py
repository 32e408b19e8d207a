"""The resources of Grafana's second schema have all that the classic dashboards have."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dashboards.generate.v2 import resource
from tests.support.grafana import dashboards

BOARDS = dashboards()

Json = dict[str, Any]


def classic_panels(board: Json) -> dict[str, list[Json]]:
    """Return the panels under each heading, in order."""
    found: dict[str, list[Json]] = {}
    title = ""
    for panel in board["panels"]:
        if panel["type"] == "row":
            title = panel["title"]
            found[title] = list(panel["panels"])
        else:
            found[title].append(panel)
    return found


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_panels_are_the_same(name: str) -> None:
    """Each row has the same panels at the same places, with the same queries and the same look."""
    board: Json = dict(BOARDS[name])
    spec = resource(board)["spec"]
    rows = {row["spec"]["title"]: row["spec"] for row in spec["layout"]["spec"]["rows"]}
    assert list(rows) == list(classic_panels(board))
    seen = []
    for title, panels in classic_panels(board).items():
        items = [item["spec"] for item in rows[title]["layout"]["spec"]["items"]]
        assert min(item["y"] for item in items) == 0
        for panel, item in zip(panels, items, strict=True):
            element = spec["elements"][item["element"]["name"]]["spec"]
            seen.append(item["element"]["name"])
            place = panel["gridPos"]
            assert (item["x"], item["width"], item["height"]) == (place["x"], place["w"], place["h"])
            assert item["y"] - items[0]["y"] == place["y"] - panels[0]["gridPos"]["y"]
            assert all(element[key] == panel[key] for key in ("id", "title", "description"))
            drawn = element["vizConfig"]
            assert (drawn["group"], drawn["spec"]) == (panel["type"], {key: panel[key] for key in ("options", "fieldConfig")})
            queries = [query["spec"]["query"] for query in element["data"]["spec"]["queries"]]
            assert [query["spec"]["expr"] for query in queries] == [target["expr"] for target in panel["targets"]]
            assert {query["datasource"]["name"] for query in queries} == {"${datasource}"}
            assert [each["spec"] for each in element["data"]["spec"]["transformations"]] == panel.get("transformations", [])
    assert sorted(seen) == sorted(spec["elements"])


@pytest.mark.parametrize("place", ["board", "panel", "variable"])
def test_nothing_is_lost_silently(place: str) -> None:
    """A setting that the second schema has no place for is refused."""
    board: Json = copy.deepcopy(dict(next(iter(BOARDS.values()))))
    part = {"board": board, "panel": board["panels"][1], "variable": board["templating"]["list"][1]}[place]
    part["thing"] = 1
    with pytest.raises(ValueError, match=r"no place in .*v2beta1 for thing"):
        resource(board)
