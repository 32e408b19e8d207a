"""Each panel shows nine kinds of runs correctly, under a real Prometheus with the shipped rules."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support import nine_runs
from tests.support.grafana import ALL, EVERYTHING, dashboards, each_panel, interpolated, is_sentence
from tests.support.nine_runs import ENDED, EXPLODING_STEPS, LAYERS, NAN_STEPS, RUNS, Scene
from tests.support.tools import eventually, machine_of_its_own

pytestmark = [pytest.mark.full, pytest.mark.server, pytest.mark.timeout(1200)]

Json = dict[str, Any]
Labels = dict[str, str]
Series = tuple[Labels, list[float]]

RATE_INTERVAL = "4s"
"""What Grafana takes at a scrape interval of 1 s: max(interval + scrape, 4 x scrape)."""

EVERY = frozenset(RUNS)
NONE_STALLED = "every run"
"""What stands for the runs where none is stalled."""
LIVE = EVERY - set(ENDED)
RANKED = frozenset(name for name in RUNS if RUNS[name].ranks > 1)
GPU = frozenset({"gpu"})
HEALTHY = frozenset({"healthy"})
LOGS = HEALTHY | GPU
TOLD = frozenset({"nan", "explodes", "dead-layer", "raises", "raises-lingers", "killed", "gpu", *RANKED})
"""Runs for which an alert fires."""
SLOW = 30
"""Seconds on a busy machine for what takes milliseconds on an idle one."""
NO_RUN = frozenset({""})
"""The label of a query that aggregates all runs."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel and the Prometheus that it queries."""

    scene: Scene
    json: Json

    @property
    def title(self) -> str:
        return str(self.json["title"])

    def refs(self) -> list[str]:
        return [target["refId"] for target in self.json["targets"]]

    def points(self, ref: str, step: float = 1.0, **chosen: str) -> list[tuple[Labels, list[tuple[float, float]]]]:
        """Return times and values of a query by series, over the whole scene or of now, without the rows of `sentences`."""
        return [(labels, values) for labels, values in self.answer(ref, step, **chosen) if not _is_sentence(labels, values)]

    def sentences(self, ref: str, **chosen: str) -> set[str]:
        """Return what a query says where there is nothing."""
        return {text for labels, values in self.answer(ref, **chosen) if _is_sentence(labels, values) for text in labels.values()}

    def answer(self, ref: str, step: float = 1.0, **chosen: str) -> list[tuple[Labels, list[tuple[float, float]]]]:
        """Return the whole answer to a query."""
        (target,) = (target for target in self.json["targets"] if target["refId"] == ref)
        span = max(60.0, self.scene.seconds())
        asked = interpolated(target["expr"], EVERYTHING | chosen, RATE_INTERVAL, span=f"{span:.0f}s")
        if target.get("instant"):
            return [(labels, [(0.0, float(value))]) for labels, value in self.scene.prometheus.query(asked)]
        answer = self.scene.prometheus.series(asked, span, step)
        return [(labels, [(at, float(value)) for at, value in values]) for labels, values in answer]

    def ask(self, ref: str, step: float = 1.0, **chosen: str) -> list[Series]:
        """Return the values of a query by series."""
        return [(labels, [value for _, value in values]) for labels, values in self.points(ref, step, **chosen)]

    def all(self, step: float = 1.0, **chosen: str) -> list[Series]:
        """Return the values of all queries by series."""
        return [series for ref in self.refs() for series in self.ask(ref, step, **chosen)]

    def legend(self, ref: str, labels: Labels) -> str:
        """Return the name of a series in Grafana's legend."""
        (target,) = (target for target in self.json["targets"] if target["refId"] == ref)
        return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), target["legendFormat"])

    def word(self, number: float) -> str:
        """Return the panel's text for a number."""
        mappings = self.json["fieldConfig"]["defaults"]["mappings"]
        words = {value: to["text"] for found in mappings if found["type"] == "value" for value, to in found["options"].items()}
        return str(words.get(f"{number:g}", number))


def _is_sentence(labels: Labels, values: list[tuple[float, float]]) -> bool:
    return is_sentence(labels, (value for _, value in values))


def runs_of(found: list[Series]) -> frozenset[str]:
    """Return the runs of some series."""
    return frozenset(labels.get("run", "") for labels, _ in found)


def finite(found: list[Series]) -> list[float]:
    """Return all values of some series but NaN."""
    return [value for _, values in found for value in values if not math.isnan(value)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Start all runs and wait until their faults have begun."""
    with machine_of_its_own(), nine_runs.running(tmp_path_factory.mktemp("nine")) as started:
        yield started


@pytest.fixture
def panel(scene: Scene) -> Callable[..., Panel]:
    """Return a function that finds a panel by the titles of dashboard and panel."""

    def find(board: str, title: str) -> Panel:
        (found,) = (
            panel
            for json in dashboards().values()
            if json["title"] == board
            for panel in each_panel(json)
            if panel["title"] == title
        )
        return Panel(scene, found)

    return find


# The runs and the limits of each query of each panel.


@dataclass(frozen=True, slots=True)
class Shows:
    """A query yields series of exactly these runs, within these limits; none if `runs` is empty."""

    runs: frozenset[str]
    low: float = 0.0
    high: float = math.inf


WELL = Shows(LIVE)
BYTES = Shows(EVERY, 1e7, 1e11)
SHARE = Shows(EVERY, 0, 1)
NORM = Shows(EVERY, 1e-3, 1e6)
SOME_LAYERS = Shows(EVERY, 0, 1e6)
OPTIONAL = Shows(HEALTHY, -10, 10)
TIMES = Shows(HEALTHY, 0, 100)
OF_GPU = Shows(GPU, 0, 1)
NOTHING = Shows(frozenset())

OVERVIEW: dict[str, list[Shows]] = {
    "State": [NOTHING, Shows(NO_RUN, 1, 12)],
    "NaN and Inf": [Shows(NO_RUN, NAN_STEPS, NAN_STEPS), Shows(NO_RUN, 0, 0), Shows(NO_RUN, NAN_STEPS, NAN_STEPS)],
    "Stalled for": [Shows(frozenset({NONE_STALLED}), 0, 0)],
    "Spikes": [Shows(NO_RUN, 3, 20), Shows(NO_RUN, 0, 5), Shows(NO_RUN, 100, 1e6)],
    "Bad layers": [Shows(NO_RUN, 1, 1), Shows(NO_RUN, 0, 0), Shows(NO_RUN, 0, 0)],
    "Straggler": [Shows(RANKED, 0.2, 0.8), NOTHING],
    "Firing alerts": [Shows(TOLD, 2, 3), Shows(TOLD, 1e12, 1e14)],
    "Runs": [
        Shows(EVERY, 3, 9), Shows(EVERY, nine_runs.WARM_SAMPLES - 1, 1e5), Shows(LIVE, 0.5, 20), Shows(EVERY, 0, 1e3),
        Shows(EVERY, 1, 4), Shows(EVERY, 5, 1e4), Shows(EVERY, 0, 1),
    ],
    "Loss": [Shows(EVERY, 1e-4, 10), NOTHING],
    "Gradient norm before and after clipping": [NOTHING, NOTHING, NORM],
    "Learning rate": [Shows(EVERY, 1e-4, 0.05)],
    "Skipped steps and loss scale": [Shows(EVERY, 0, 0), Shows(GPU, 1024, 2**40)],
    "Step time": [Shows(EVERY, 0.05, 30), NOTHING, NOTHING],
    "Distribution of step times": [Shows(NO_RUN)],
    "Where a step's time goes": [Shows(NO_RUN, 0, 1)],
    "Throughput": [Shows(EVERY, 0, 1e3), Shows(EVERY, 0, 32e3)],
    "Memory at a glance": [OF_GPU, Shows(NO_RUN, 0, 1), Shows(NO_RUN, 0, 1)],
    "Slowest ranks": [Shows(RANKED, 0, 0.8)],
    "$value": [Shows(LOGS, -1, 1e3)],
    "NaN and Inf in logged values": [Shows(GPU, 1, NAN_STEPS)],
}  # fmt: skip

BY_LAYER: dict[str, list[Shows]] = {
    "Layers in trouble": [Shows(frozenset({"dead-layer", "nan"}), 1, 4)],
    "Norm of every layer": [Shows(EVERY, -12, 99)],
    "Deviation of every layer from its own baseline": [Shows(EVERY, -1e6, 1e7)],
    "Largest norms": [SOME_LAYERS, SOME_LAYERS],
    "Time of the layers in a step": [TIMES],
    "Slowest layers": [TIMES, TIMES, TIMES],
    "Furthest from their own baseline": [SOME_LAYERS],
    "Zero and dead units": [SHARE, SHARE, SHARE],
    "NaN, Inf and missing gradients": [Shows(frozenset({"nan"}), 1, 1e5)],
    "Where a NaN began": [NOTHING],
    "Distribution of the global norm": [Shows(NO_RUN)],
    "Clipping": [Shows(EVERY - HEALTHY, 0, 1), Shows(HEALTHY, 0, 1), Shows(EVERY, 0, 1.0001)],
    "Norm": [SOME_LAYERS],
    "Distribution of the norm": [Shows(NO_RUN)],
    "Largest element": [SOME_LAYERS],
    "Zero units": [SHARE],
    "Spikes": [Shows(EVERY, 1, 20)],
    "Norm of each rank's part": [NOTHING],
    "Update over weight": [Shows(HEALTHY, 1e-6, 0.1)],
    "Norm of the weights": [Shows(HEALTHY, 0.1, 100)],
    "Distribution of the weights": [Shows(NO_RUN)],
    "Balance of the models": [NOTHING],
    "Mean and standard deviation of the elements": [OPTIONAL, Shows(HEALTHY, 0, 10)],
    "Smallest and largest element, with sign": [Shows(HEALTHY, -10, 0), Shows(HEALTHY, 0, 10)],
    "Threshold of each policy": [Shows(HEALTHY, 0.09 * nine_runs.CLIP, 1.01 * nine_runs.CLIP), Shows(HEALTHY, 1e-6, 1)],
    "Would have been clipped": [Shows(HEALTHY, 0, 1), Shows(HEALTHY, 0, 1)],
    "Norm left by layer in the last sample": [Shows(HEALTHY, 0, 1)],
    "Samples clipped by layer": [Shows(HEALTHY, 0, 1)],
    "Frozen layers": [Shows(frozenset({"explodes"}), 0, 1)],
    "Gradient over second moment": [NOTHING],
    "Elements that updates leave": [Shows(HEALTHY, 0, 1)],
    "Largest attention logit": [NOTHING],
    "Entropy of attention": [NOTHING],
    "Experts in use": [NOTHING],
    "Replicas that differ": [NOTHING],
    "Size of every output": [Shows(HEALTHY, -4, 4)],
    "Dead units of every output": [Shows(HEALTHY, 0, 1)],
    "Gradient at the outputs": [Shows(HEALTHY, 1e-6, 10)],
    "Outliers among the units": [Shows(HEALTHY, 1, 100)],
    "NaN and Inf in sampled outputs": [Shows(HEALTHY, 0, 0)],
    "Gradients of watched tensors": [Shows(HEALTHY, 1e-6, 10)],
}

RESOURCES: dict[str, list[Shows]] = {
    "Devices": [OF_GPU, *[Shows(GPU, 5e10, 2e11)] * 4],
    "Memory that the allocator holds": [OF_GPU],
    "Memory that tensors occupy": [OF_GPU],
    "Fragmentation": [OF_GPU, OF_GPU],
    "Allocation retries and out of memory": [Shows(GPU, 0, 0), NOTHING],
    "Memory waiting for streams": [Shows(GPU, 1e8, 1e10)],
    "Utilisation": [Shows(GPU, 0.5, 1)],
    "Memory used by all processes": [Shows(GPU, 1e9, 1e10), Shows(NO_RUN, 1e9, 1e12)],
    "Power": [Shows(GPU, 100, 600)],
    "Temperature": [Shows(GPU, 55, 80)],
    "Clock of the multiprocessors": [Shows(GPU, 1.98e9, 1.98e9)],
    "Throttled": [Shows(GPU, 0, 2)],
    "Reasons for throttling": [Shows(GPU, 1, 2)],
    "Memory errors": [Shows(GPU, 0, 0)],
    "Energy per training example": [Shows(GPU, 1, 30)],
    "Processors in use": [Shows(EVERY, 0, 2), Shows(EVERY, 0, 0)],
    "Memory of process and children": [BYTES, Shows(EVERY, 0, 0)],
    "Threads and children": [Shows(EVERY, 1, 100), Shows(EVERY, 0, 0)],
    "Storage of the process": [Shows(EVERY, 0, 1e8), Shows(EVERY, 0, 1e8)],
    "Open files": [Shows(EVERY, 0, 0.5)],
    "Full garbage collections": [Shows(EVERY, 0, 10)],
    "Processors of the host": [Shows(NO_RUN, 0, 1)],
    "Memory of host and container": [Shows(NO_RUN, 0, 1), Shows(NO_RUN, 0, 1)],
    "Container and its limits": [Shows(NO_RUN, 1e6, 1e12), Shows(NO_RUN, 2**30, 2**40), Shows(NO_RUN, 1, 1e3), Shows(NO_RUN, 0, 0)],
    "Disks of the host": [Shows(NO_RUN, 0, 1e10), Shows(NO_RUN, 0, 1e10)],
    "Network of the host": [Shows(NO_RUN, 0, 1e10), Shows(NO_RUN, 0, 1e10)],
}

OF_RANKS: dict[str, list[Shows]] = {
    "Ranks": [Shows(NO_RUN, 8, 20), Shows(NO_RUN, 8, 20)],
    "Steps between first and last rank": [Shows(LIVE, 0, 100)],
    "Slowest rank": [Shows(RANKED, 1.33, 3)],
    "Longest without activity": [Shows(LIVE, 0, 30)],
    "State of each rank": [Shows(EVERY, 1, 6)],
    "Ranks side by side": [
        WELL, Shows(RANKED, 0.9, 3), Shows(LIVE, 0.05, SLOW), Shows(RANKED, 0.05, SLOW), Shows(LIVE, 0.01, SLOW),
        Shows(RANKED, 0, SLOW),
        Shows(LIVE, 0, 100), Shows(LIVE, 0, SLOW), Shows(EVERY, 0, 1e5),
    ],
    "Own time over that of the fastest rank": [Shows(RANKED, 1, 4)],
    "Waiting for other ranks": [Shows(RANKED, 0, SLOW)],
    "Data and host time of a step": [Shows(EVERY, 0.01, SLOW)],
    "Steps behind": [Shows(EVERY, 0, 100)],
    "Norm over all ranks": [NOTHING, NORM],
    "Norms of sharded layers": [NOTHING],
    "Steps with NaN or Inf by rank": [Shows(frozenset({"nan"}), 1, NAN_STEPS)],
    "Loss by rank": [Shows(EVERY, 1e-4, 10)],
    "Own norm of each rank": [Shows(RANKED, 1e-3, 100)],
    "Gradient noise scale": [Shows(RANKED)],
}  # fmt: skip

EXPORTER: dict[str, list[Shows]] = {
    "Overhead": [Shows(EVERY, 0, 1), Shows(NO_RUN, 0.05, 0.05)],
    "Cost of a sample": [Shows(EVERY, 0, SLOW)],
    "Sampling interval": [Shows(EVERY, 1, 1e3), Shows(EVERY, 1, 1e3)],
    "Samples": [Shows(EVERY, 0, 20), Shows(EVERY, 0, 5)],
    "Steps since the last sample": [Shows(EVERY, 0, 1e3)],
    "Capture mode": [Shows(EVERY, 1, 1)],
    "Collectors": [NOTHING],
    "Collectors' time": [Shows(EVERY, 0, SLOW)],
    "Errors": [Shows(frozenset({"explodes"}), 1, 5)],
    "Layers": [Shows(EVERY, 2, LAYERS), NOTHING],
    "Targets": [Shows(EVERY, 0, 1)],
    "Scrapes": [Shows(EVERY, 0, SLOW), Shows(EVERY, 50, 1e5)],
    "Series": [Shows(EVERY, 50, 2e4)],
    "Versions": [Shows(LIVE, 1, 1)],
    "Actions": [Shows(frozenset({"explodes"}), 1, 3)],
    "Notifications": [Shows(frozenset({"nan"}), 1, 10)],
    "Problems found by processes": [Shows(frozenset({"nan"}), 1, 3)],
    "Rollbacks": [NOTHING],
}
LEARNING: dict[str, list[Shows]] = {
    "Alerts about the policy": [Shows(GPU, 1, 2)],
    **{title: BY_LAYER[title] for title in ("Layers in trouble", "Norm of every layer")},
    **{title: OVERVIEW[title] for title in ("Gradient norm before and after clipping", "$value", "NaN and Inf in logged values")},
    "Reward": [Shows(LOGS, -0.1, 3), Shows(LOGS, -1, 1), NOTHING, NOTHING],
    "KL divergence from the reference": [Shows(LOGS, 0, 50)],
    "Entropy of the policy": [Shows(LOGS, 0.01, 1.3)],
    "Clipped": [Shows(LOGS, 0, 1)],
    "Groups without advantage": [Shows(LOGS, 0, 1)],
    "Spread of the reward": [Shows(LOGS, 0.01, 0.3)],
    "Length of the responses": [Shows(LOGS, 100, 600)],
    "Effective samples": [Shows(LOGS, 0, 1)],
    "KL divergence of inference from training": [Shows(LOGS, 0, 1)],
}
OF_TIME: dict[str, list[Shows]] = {
    "Goodput": [Shows(EVERY, 0, 1)],
    "Goodput since the start": [Shows(EVERY, 0, 1)],
    "Recomputed": [Shows(GPU, 0, 1)],
    "Restarts": [Shows(GPU, 1, 1)],
    "Time by cause": [Shows(NO_RUN, 0, 1)],
    "Goodput over time": [Shows(EVERY, 0, 1)],
    "Earlier processes": [Shows(GPU, 0, 1e4)],
    "MFU": [Shows(GPU, 0, 1)],
    "Model FLOPs": [Shows(GPU, 0, 1e9)],
}

EXPECTED: Mapping[str, Mapping[str, list[Shows]]] = {
    "Training overview": OVERVIEW, "Gradients by layer": BY_LAYER, "Resources": RESOURCES, "Ranks": OF_RANKS, "Exporter": EXPORTER,
    "Reinforcement learning": LEARNING, "Goodput": OF_TIME,
}  # fmt: skip
LARGEST = {
    "Largest norms", "Furthest from their own baseline", "Zero and dead units", "Norm", "Largest element", "Zero units", "Spikes",
    "Longest without activity", "Goodput", "Goodput since the start", "Steps between first and last rank",
}  # fmt: skip
"""Panels of the largest few series, whose runs depend on the values."""
EACH = [
    (board, title, place)
    for board, panels in EXPECTED.items()
    for title, queries in panels.items()
    for place in range(len(queries))
]


@pytest.mark.parametrize(("board", "title", "place"), EACH, ids=str)
def test_query_shows_its_runs_within_limits(panel: Callable[..., Panel], board: str, title: str, place: int) -> None:
    """A query shows exactly the runs that it should, with values within limits."""
    found, expected = panel(board, title), EXPECTED[board][title][place]
    target = found.json["targets"][place]
    asked: list[list[Series]] = []

    def wrong() -> list[float]:
        return [value for value in finite(asked[-1]) if not expected.low <= value <= expected.high]

    def is_there() -> bool:
        asked.append(found.ask(target["refId"], step=2.0))
        known = runs_of(asked[-1])
        about = known == expected.runs or (title in LARGEST and known != set() and known <= expected.runs)
        return about and not (target.get("instant") and wrong())  # the past will not change

    assert eventually(nine_runs.slowly(is_there)), (expected.runs ^ runs_of(asked[-1]), wrong()[:5], target["expr"])
    assert not wrong(), (expected, wrong()[:5])


def test_every_query_has_limits() -> None:
    """Each query of each panel has limits in the tables above."""
    there = {board["title"]: {p["title"]: len(p["targets"]) for p in each_panel(board)} for board in dashboards().values()}  # type: ignore[arg-type]
    assert there == {board: {title: len(queries) for title, queries in panels.items()} for board, panels in EXPECTED.items()}


# What a user reads from the panels.


STATES = {
    **dict.fromkeys(LIVE, "Training"), "raises": "Down", "raises-lingers": "Failed", "killed": "Down", "ends": "Gone, was training",
}  # fmt: skip


def test_each_run_has_its_state(panel: Callable[..., Panel]) -> None:
    """Each run has its state in the first row and in the table of runs."""
    for found in (panel("Training overview", "State"), panel("Training overview", "Runs")):

        def states(found: Panel = found) -> dict[str, str]:
            chosen = STATES if found.title == "State" else [ALL]
            return {labels["run"]: _words(found)[values[-1]] for run in chosen for labels, values in found.ask("A", run=run)}

        assert eventually(lambda states=states: states() == STATES), states()  # type: ignore[misc]


def _words(found: Panel) -> dict[float, str]:
    """Return the texts for values of a panel or of the first mapped column of a table."""
    overrides = [p["value"] for o in found.json["fieldConfig"]["overrides"] for p in o["properties"] if p["id"] == "mappings"]
    mappings = [m for m in (found.json["fieldConfig"]["defaults"].get("mappings") or overrides[0]) if m["type"] == "value"]
    return {float(value): to["text"] for mapping in mappings for value, to in mapping["options"].items()}


def test_steps_with_nan_are_counted(panel: Callable[..., Panel]) -> None:
    """Each step and loss with NaN is counted, and none of another run."""
    found = panel("Training overview", "NaN and Inf")
    for run, number in (("nan", NAN_STEPS), ("healthy", 0), ("explodes", 0)):
        assert [finite(found.ask(ref, run=run)) for ref in ("A", "B", "C")] == [[number], [0], [number]]
    elements = panel("Gradients by layer", "NaN, Inf and missing gradients").ask("A")
    assert {labels["layer"] for labels, _ in elements} == {"first", "second", "third"}


def test_five_steps_that_explode_are_seen(panel: Callable[..., Panel], scene: Scene) -> None:
    """Five exploding steps between two scrapes show in the global norm and as spikes."""
    found = panel("Training overview", "Gradient norm before and after clipping")
    usual = statistics.median(finite(found.ask("A", run="explodes")))
    largest = [target["refId"] for target in found.json["targets"] if "largest" in target["legendFormat"]]
    assert largest
    for ref in largest:
        assert max(finite(found.ask(ref, run="explodes"))) >= 100 * usual
        assert max(finite(found.ask(ref, run="healthy"))) < 50 * usual
    (spikes,) = finite(panel("Training overview", "Spikes").ask("A", run="explodes"))
    assert EXPLODING_STEPS - 1 <= spikes <= EXPLODING_STEPS + 1
    (large,) = finite(panel("Gradients by layer", "Largest norms").ask("B", run="explodes"))[:1]
    assert large >= 1


@pytest.mark.parametrize("run", sorted(EVERY))
def test_one_run_has_all_its_lines(panel: Callable[..., Panel], run: str) -> None:
    """Beside the largest layer a single run has its norm, and what clipping left of it; beside the median its longest steps."""
    norms, times = "Gradient norm before and after clipping", "Step time"
    for title, ref, low, high in (
        (norms, "A", 1e-3, 1e6), (norms, "B", 1e-3, 1.01 * nine_runs.CLIP), (times, "B", 0.05, 30), (times, "C", 0.05, 30),
    ):  # fmt: skip
        values = finite(panel("Training overview", title).ask(ref, run=run))
        assert values, title
        assert all(low <= value <= high for value in values), title


def test_a_dead_layer_is_called_dead(panel: Callable[..., Panel]) -> None:
    """A dead layer is shown as dead, not vanished, and no other layer is."""
    numbers, timeline = panel("Training overview", "Bad layers"), panel("Gradients by layer", "Layers in trouble")
    assert eventually(lambda: [finite(numbers.ask(ref, run="dead-layer")) for ref in ("A", "B", "C")] == [[1.0], [0.0], [0.0]])
    assert [finite(numbers.ask(ref, run="healthy")) for ref in ("A", "B", "C")] == [[0.0], [0.0], [0.0]]

    def lately() -> list[tuple[str, str]]:
        return [(labels["layer"], timeline.word(values[-1])) for labels, values in timeline.ask("A", run="dead-layer")]

    assert eventually(lambda: lately() == [("second", "Dead")]), lately()
    assert {timeline.word(value) for value in finite(timeline.ask("A", run="nan"))} == {"NaN or Inf"}
    units = panel("Gradients by layer", "Zero and dead units").ask("B", run="dead-layer")
    assert {labels["layer"]: values[-1] for labels, values in units} == {"first": 0.0, "second": 1.0, "third": 0.0}


@pytest.mark.parametrize("run", sorted(RANKED))
def test_the_slow_rank_is_named(panel: Callable[..., Panel], run: str) -> None:
    """The slow rank is named, with about half of each step as its cost."""
    slow = str(RUNS[run].ranks - 1)
    (lost,) = panel("Training overview", "Straggler").ask("A", run=run)
    assert lost[0]["rank"] == slow
    assert 0.25 < lost[1][-1] < 0.75  # half of it on an idle machine; on a busy one all steps take longer
    shares = {labels["rank"]: values[-1] for labels, values in panel("Training overview", "Slowest ranks").ask("A", run=run)}
    assert {rank for rank, share in shares.items() if share > 0.25} == {slow}
    ((labels, (ratio,)),) = panel("Ranks", "Slowest rank").ask("A", run=run)
    assert (labels["rank"], ratio) == (slow, pytest.approx(nine_runs.SLOWER, rel=0.33))
    waits = {labels["rank"]: values[-1] for labels, values in panel("Ranks", "Waiting for other ranks").ask("A", run=run)}
    assert min(waits, key=lambda rank: waits[rank]) == slow
    assert panel("Training overview", "Straggler").all(run="healthy") == [({"run": "healthy"}, [-1.0])]
    assert panel("Training overview", "Slowest ranks").all(run="healthy") == []


@pytest.mark.parametrize(
    ("board", "title", "run", "text"),
    [
        ("Training overview", "Firing alerts", "healthy", "No alert is firing, or no alert rules are loaded"),
        ("Gradients by layer", "Layers in trouble", "healthy", "No layer is in trouble"),
        ("Gradients by layer", "Where a NaN began", "healthy", "Needs start_exporter(nan_origin=True), and a NaN or Inf"),
        ("Gradients by layer", "Dead units of every output", "deep", "Needs start_exporter(activations=True)"),
        ("Exporter", "Collectors", "healthy", "No collector fails"),
    ],
)
def test_an_empty_panel_says_so(panel: Callable[..., Panel], board: str, title: str, run: str, text: str) -> None:
    """A table, timeline or heatmap of a run without such a series has a row that says so."""
    found = panel(board, title)
    assert found.ask("A", run=run) == []
    assert text in found.sentences("A", run=run)


@pytest.mark.parametrize(
    ("board", "title", "run"),
    [
        ("Gradients by layer", "Deviation of every layer from its own baseline", "healthy"),
        ("Gradients by layer", "Size of every output", "healthy"),
        ("Gradients by layer", "Distribution of the weights", "healthy"),
        ("Gradients by layer", "Frozen layers", "explodes"),
        ("Resources", "Throttled", "gpu"),
    ],
)
def test_no_sentence_stands_beside_data(panel: Callable[..., Panel], board: str, title: str, run: str) -> None:
    """A panel whose series begin after the run does not say beside them that there are none."""
    found = panel(board, title)
    assert eventually(nine_runs.slowly(lambda: found.ask("A", run=run) != []))
    assert found.sentences("A", run=run) == set()


def test_a_gpu_that_is_held_back_is_seen(panel: Callable[..., Panel]) -> None:
    """A throttled GPU shows for how long and for which reason."""
    found = panel("Resources", "Throttled")
    states = {found.word(value) for value in finite(found.ask("A"))}
    assert statistics.median(finite(found.ask("A"))) >= 1
    assert states <= {"Full speed", "Held back at times", "Throttled"}
    assert {labels["reason"] for labels, _ in panel("Resources", "Reasons for throttling").ask("A")} == {"thermal"}


def test_hosts_are_drawn_once(panel: Callable[..., Panel]) -> None:
    """A series of a host occurs once, for any number of runs and ranks."""
    hosts = 0
    for board in dashboards().values():
        for json in each_panel(board):
            found = panel(board["title"], json["title"])
            for target in found.json["targets"]:
                if "{{host}}" in target["legendFormat"] and "{{rank}}" not in target["legendFormat"]:
                    assert len(found.ask(target["refId"])) == 1, found.title
                    hosts += 1
    assert hosts > 5


def test_each_line_has_a_name_of_its_own(panel: Callable[..., Panel]) -> None:
    """No two series of a panel share a name at the same time."""
    for board in dashboards().values():
        for json in each_panel(board):
            found = panel(board["title"], json["title"])
            if found.json["type"] != "table":
                points = [
                    (found.legend(ref, labels), at)
                    for ref in found.refs()
                    for labels, values in found.points(ref)
                    for at, _ in values
                ]
                assert len(set(points)) == len(points), found.title


# Annotations, as Grafana's data source for Prometheus reads them.


def events(annotation: Json, answer: list[tuple[Labels, list[tuple[float, float]]]], step: float) -> list[tuple[Labels, int, int]]:
    """Return labels, begin and end of each mark, in milliseconds.

    Moments at most a step apart are one region. `useValueForTime`: the value is the moment, else the time of a value above 0.
    """
    found = []
    for labels, values in answer:
        moments = [
            math.floor(value if annotation.get("useValueForTime") else 1000 * at)
            for at, value in values
            if annotation.get("useValueForTime") or value > 0
        ]
        regions: list[list[int]] = []
        for moment in moments:
            if regions and moment <= regions[-1][1] + 1000 * step:
                regions[-1][1] = moment
            else:
                regions.append([moment, moment])
        found += [(labels, begin, end) for begin, end in regions]
    return found


def marks(scene: Scene, name: str) -> list[tuple[Labels, int, int]]:
    """Return the marks of an annotation, with steps of a second."""
    (annotation,) = (found for found in dashboards()["training.json"]["annotations"]["list"] if found["name"] == name)  # type: ignore[index, call-overload]
    asked = interpolated(annotation["expr"], EVERYTHING, RATE_INTERVAL)
    answer = scene.prometheus.series(asked, scene.seconds())
    return events(annotation, [(labels, [(at, float(value)) for at, value in values]) for labels, values in answer], 1.0)


def test_alerts_are_marked_once(scene: Scene) -> None:
    """Each onset of a critical alert is one mark, not a region, after the start."""
    critical = 'count by (run) (last_over_time(ALERTS{alertstate="firing", severity="critical"}[1h]))'
    assert eventually(lambda: {labels["run"] for labels, _, _ in marks(scene, "Alerts begin")} >= {"nan", "raises-lingers"})
    assert {labels["run"] for labels, _, _ in marks(scene, "Alerts begin")} == {
        labels["run"] for labels, _ in scene.prometheus.query(critical)
    }
    found = marks(scene, "Alerts begin")
    assert all(begin == end and 1000 * scene.started < begin for _, begin, end in found)
    onsets = [(tuple(sorted(labels.items())), begin) for labels, begin, _ in found]
    assert len(set(onsets)) == len(onsets)


def test_actions_are_marked_once(scene: Scene) -> None:
    """A completed action is one mark, not a region; a failed one has none."""
    assert eventually(lambda: len(marks(scene, "Actions")) >= 2)
    found = sorted(marks(scene, "Actions"), key=lambda mark: mark[0]["action"])
    assert [(labels["run"], labels["action"]) for labels, _, _ in found] == [
        ("explodes", "Freeze"), ("explodes", "ScaleLearningRate"),
    ]  # fmt: skip
    assert all(begin == end and abs(begin / 1000 - scene.began) < SLOW for _, begin, end in found)


def test_the_reward_of_one_run_has_a_band(panel: Callable[..., Panel]) -> None:
    """The rewards of a single run lie within a band of one standard deviation, that of several runs has none."""
    found = panel("Reinforcement learning", "Reward")
    mean, above, below = (finite(found.ask(ref, run="healthy"))[-10:] for ref in "ACD")
    assert len(mean) == 10
    assert all(high > middle > low for high, middle, low in zip(above, mean, below, strict=True))


def test_policies_are_named_with_their_thresholds(panel: Callable[..., Panel]) -> None:
    """The clipping policy and the global dry run have one threshold, AGC has one for each layer."""
    found = panel("Gradients by layer", "Threshold of each policy")
    whole = {labels["policy"]: values[-1] for labels, values in found.ask("A")}
    assert whole == {"MaxNorm(0.5)": pytest.approx(nine_runs.CLIP), "MaxNorm(0.05)": pytest.approx(nine_runs.CLIP / 10)}
    assert {(labels["policy"], labels["layer"]) for labels, _ in found.ask("B")} == {
        ("AGC()", layer) for layer in ("first", "second", "third")
    }
    tried = panel("Gradients by layer", "Would have been clipped").ask("A")
    assert {labels["policy"] for labels, _ in tried} == {"MaxNorm(0.05)", "AGC()"}


def test_what_actions_did_is_named(panel: Callable[..., Panel]) -> None:
    """Each action and notifier is shown with its result, and the worst problem with its severity."""
    actions = panel("Exporter", "Actions").ask("A", run="explodes")
    assert {(labels["action"], labels["result"]) for labels, _ in actions} == {
        ("ScaleLearningRate", "done"), ("Freeze", "done"), ("broken", "failed"),
    }  # fmt: skip
    assert [(labels["layer"], values[-1]) for labels, values in panel("Gradients by layer", "Frozen layers").ask("A")] == [
        ("second", 1)
    ]
    sent = panel("Exporter", "Notifications").ask("A", run="nan")
    assert {(labels["sink"], labels["result"]) for labels, _ in sent} == {("log", "sent")}
    found = panel("Exporter", "Problems found by processes")
    words = {labels["alert"]: found.word(max(values)) for labels, values in found.ask("A", run="nan")}
    assert words["TrainingNonFiniteGradients"] == "Critical"


def test_ends_are_marked_once(scene: Scene) -> None:
    """A scraped end is one mark at the last step of the run, not a region."""
    assert eventually(lambda: marks(scene, "Runs end") != [])
    ((labels, begin, end),) = marks(scene, "Runs end")
    assert (labels["run"], labels["state"]) == ("raises-lingers", "failed")
    assert begin == end
    assert begin / 1000 == pytest.approx(scene.began, abs=10)


# Links and variables.


def _links(panel: Mapping[str, Any], ref: str) -> list[Any]:
    """Return the links of a panel's query alone, the last ones of several."""
    links: list[Any] = []
    for override in panel["fieldConfig"].get("overrides", []):
        if override["matcher"] == {"id": "byFrameRefID", "options": ref}:
            links = next((each["value"] for each in override["properties"] if each["id"] == "links"), links)
    return links


def test_links_find_their_labels(panel: Callable[..., Panel]) -> None:
    """Each label that a link uses is set in each series of the panel."""
    linked = 0
    for board in dashboards().values():
        for json in each_panel(board):
            found = panel(board["title"], json["title"])
            whole = repr(found.json["fieldConfig"])
            for ref in found.refs():
                own = repr(_links(found.json, ref) or whole)
                names = set(re.findall(r"\$\{__(?:field\.labels|data\.fields)\.(\w+)\}", own))
                for labels, _ in found.ask(ref) if names else ():
                    missing = {name for name in names if not labels.get(name)}
                    assert not missing, (found.title, ref, labels)
                    linked += 1
    assert linked > 100


CHOICES: dict[str, dict[str, str]] = {
    "all": {},
    "one run": {"run": "four-ranks"},
    "one rank": {"run": "four-ranks", "rank": "3"},
    "one layer": {"run": "deep", "layer": r"blocks\\.7"},
    "a rank that is not there": {"run": "gpu", "rank": "7"},
}


OF_ALL_RANKS = {"Straggler", "Firing alerts", "Targets"}
"""Panels that name a rank and describe the run."""


@pytest.mark.parametrize("choice", CHOICES)
def test_no_choice_is_an_error(panel: Callable[..., Panel], choice: str) -> None:
    """No query fails, and no panel shows a run or rank that was not chosen."""
    chosen = CHOICES[choice]
    for board in dashboards().values():
        for json in each_panel(board):
            found = panel(board["title"], json["title"])
            answer = found.all(step=10.0, **chosen)
            if "run" in chosen:
                assert runs_of(answer) <= {chosen["run"], "", NONE_STALLED}, found.title
            if "rank" in chosen and found.title not in OF_ALL_RANKS:
                assert {labels.get("rank", chosen["rank"]) for labels, _ in answer} <= {chosen["rank"]}, found.title
