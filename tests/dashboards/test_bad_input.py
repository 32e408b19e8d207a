"""The dashboards on a Prometheus with little data: no query fails, no number is a false zero, and empty panels say why."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.grafana import ALL, EVERYTHING, dashboards, each_panel, interpolated, is_sentence, sentence
from tests.support.real_prometheus import Prometheus, running
from tests.support.scrape import Key, key, values
from tests.support.tools import PATIENCE, eventually, find
from torch_grad_exporter import start_exporter

pytestmark = [pytest.mark.server, pytest.mark.slow]

Json = dict[str, Any]

CONFIGURATION = "global: {scrape_interval: 1h}\n"
SCRAPES = 30
SEVERAL, ONCE, ENDED, NEVER = "several", "once", "ended", "never"
"""A run scraped each second for half a minute, a run scraped once, one whose target is gone, and an unknown run.

All on a CPU, with one rank and no rules.
"""
PANELS = [(board["title"], panel) for board in dashboards().values() for panel in each_panel(board)]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Start a Prometheus with the samples of a real exporter as its data."""
    directory = tmp_path_factory.mktemp("little")
    file = directory / "scrapes.txt"
    file.write_text("\n".join([*scrapes(), "# EOF\n"]), encoding="utf-8")
    command = [find("promtool"), "tsdb", "create-blocks-from", "openmetrics", file, directory / "data"]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    with running(directory / "data", CONFIGURATION) as started:
        assert eventually(lambda: answers(started, "count(up)"))
        yield started


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Start a Prometheus without data."""
    with running(tmp_path_factory.mktemp("nothing"), CONFIGURATION) as started:
        assert eventually(lambda: answers(started, "vector(1)"))
        yield started


def answers(prometheus: Prometheus, expression: str) -> bool:
    """Return whether Prometheus is ready and an expression yields data."""
    try:
        return prometheus.query(expression) != []
    except OSError:
        return False


def scrapes() -> Iterator[str]:
    """Yield the samples of an exporter after each step, a second apart until now, and after the first step only."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    last = time.time() - 1.0
    with start_exporter(model, None, every=1, run="real", rank=0, collectors={"gpu": False, "cuda_memory": False}) as exporter:
        for number in range(SCRAPES):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            exporter.observe(loss=float(loss.detach()))
            if number in {0, SCRAPES - 1}:
                yield from one_scrape(ONCE if number == 0 else SEVERAL, values(exporter), last)
            if number == SCRAPES - 1:
                yield from one_scrape(ENDED, values(exporter), last - 600.0)
            if number == SCRAPES - 2:  # what the processors do is known once some time has passed
                assert eventually(lambda: key("torch_host_cpu_ratio") in values(exporter))
            if number < SCRAPES - 1:
                yield from one_scrape(SEVERAL, values(exporter), last - SCRAPES + 1 + number)


def one_scrape(run: str, found: dict[Key, float], at: float) -> Iterator[str]:
    """Yield one scrape as OpenMetrics samples, with the series that Prometheus adds."""
    own = {"job": "training", "instance": f"{run}:9100", "run": run, "rank": "0"}
    for (name, labels), value in {**found, key("up"): 1.0, key("scrape_duration_seconds"): 0.01}.items():
        written = ",".join(f'{label}="{text}"' for label, text in (own | dict(labels)).items())
        yield f"{name}{{{written}}} {value} {at:.3f}"


def answer(prometheus: Prometheus, target: Json, run: str = ALL) -> list[tuple[dict[str, str], list[float]]]:
    """Return the series of a query, of the last minute or of now."""
    asked = interpolated(target["expr"], EVERYTHING | {"run": run}, "4s", span="60s")
    if target.get("instant"):
        return [(labels, [float(value)]) for labels, value in prometheus.query(asked)]
    return [(labels, [float(value) for _, value in values]) for labels, values in prometheus.series(asked, 60.0)]


def shown(prometheus: Prometheus, panel: Json, run: str = ALL) -> list[float]:
    """Return all numbers of a panel, of the last minute or of now."""
    found = [series for target in panel["targets"] for series in answer(prometheus, target, run)]
    return [value for labels, values in found if not is_sentence(labels, values) for value in values]


def sentences(prometheus: Prometheus, panel: Json, run: str = ALL) -> set[str]:
    """Return the sentences of a panel's rows."""
    found = answer(prometheus, panel["targets"][0], run)
    return {text for labels, values in found if is_sentence(labels, values) for text in labels.values()}


def test_nothing_is_shown_of_nothing(nothing: Prometheus) -> None:
    """Without data no query fails, and none returns a number."""
    assert [panel["title"] for _, panel in PANELS if shown(nothing, panel)] == []


def test_an_unknown_run_shows_nothing(prometheus: Prometheus) -> None:
    """A run without series shows nothing, beside others too."""
    of_runs = [panel for _, panel in PANELS if any("$run" in target["expr"] for target in panel["targets"])]
    assert [panel["title"] for panel in of_runs if shown(prometheus, panel, NEVER)] == []


ROWS = [panel for _, panel in PANELS if panel["type"] in {"table", "state-timeline", "heatmap"}]
"""Panels for which Grafana 12 draws an error or bare headers where they have no series."""


def test_rows_are_never_missing(prometheus: Prometheus, nothing: Prometheus) -> None:
    """A table, timeline or heatmap has a row: data or a sentence about them, of no run that there is none."""
    for panel in ROWS:
        none = "No run within the last hour" if panel["type"] == "table" else "No run in this time range"
        assert sentences(nothing, panel) == sentences(prometheus, panel, NEVER) == {none}, panel["title"]
        for run in (SEVERAL, ONCE):
            assert shown(prometheus, panel, run) or sentences(prometheus, panel, run) == {sentence(panel)}, panel["title"]
        ended = sentences(prometheus, panel, ENDED)
        assert ended == ({sentence(panel)} if panel["type"] == "table" else {none}) or shown(prometheus, panel, ENDED), panel[
            "title"
        ]


KNOWN_ZEROS = {"Stalled for", "Bad layers", "Longest without activity"}
"""Numbers that may be 0 after one scrape: the state of a run and its layers are known at once."""


def test_one_scrape_makes_no_zero(prometheus: Prometheus) -> None:
    """After one scrape no query fails, and a number that takes two scrapes is absent, not 0."""
    for board, panel in PANELS:
        found = shown(prometheus, panel, ONCE)
        if panel["type"] == "stat" and panel["title"] not in KNOWN_ZEROS:
            assert 0.0 not in found, (board, panel["title"])
        counts = all(re.search(r"\b(rate|increase)\(", target["expr"]) for target in panel["targets"])
        if counts and not any("_over_time(" in target["expr"] for target in panel["targets"]):
            assert found == [], (board, panel["title"])


def by_rules(expression: str) -> bool:
    """Return whether an expression reads series of rules only, apart from the size of the run."""
    names = set(re.findall(r"\b[a-z_]\w*(?::\w+)*(?=\{)", expression, re.IGNORECASE)) - {"torch_train_world_size"}
    return bool(names) and all(":" in name or name.startswith("ALERTS") for name in names)


def test_a_sentence_says_what_is_missing(prometheus: Prometheus) -> None:
    """The text of an empty panel is true of a present run, and names the rules or the device if only these are missing."""
    for board, panel in PANELS:
        text, expressions = sentence(panel), [target["expr"] for target in panel["targets"]]
        assert text not in ("", "No data"), (board, panel["title"])
        if text in ("No run in this time range", "No run is being scraped now"):
            assert all(shown(prometheus, panel, run) for run in (SEVERAL, ONCE)), (board, panel["title"])
        if all(map(by_rules, expressions)):
            assert "rules" in text, (board, panel["title"])
        if all(re.search(r"\btorch_(gpu|cuda)_", expression) for expression in expressions):
            assert re.search("GPU|CUDA", text), (board, panel["title"])


def test_a_run_without_ranks_gpus_and_rules_is_shown(prometheus: Prometheus) -> None:
    """Only panels about missing hardware, ranks, rules or events are empty."""
    empty = {panel["title"] for _, panel in PANELS if not shown(prometheus, panel, SEVERAL)}
    reasons = (
        "rules|GPU|CUDA|Needs|every gradient|No error|No step|No chosen layer|No layer is in|No layer was frozen|No collector|"
        "No problem was found|not sharded|one scrape|tokens="
    )
    named = {panel["title"] for _, panel in PANELS if re.search(reasons, sentence(panel))}
    assert empty <= named, empty - named
    assert {"State", "Loss", "Step time", "Norm of every layer", "Norm", "Overhead", "Processors of the host"}.isdisjoint(empty)
