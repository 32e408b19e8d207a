"""The fleet of `benchmarks.fleet`, small: every rank of it is a target of a real Prometheus, with the series that it serves."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from benchmarks.fleet_job import PLACE, RUN, Recording, recordings
from benchmarks.fleet_prometheus import HTTP, prometheus, seconds_until
from benchmarks.fleet_run import Case, Outcome, measure, one_each
from benchmarks.fleet_server import TARGETS, Fleet
from benchmarks.fleet_tables import complaints, tables
from tests.support.tools import PATIENCE, eventually

pytestmark = pytest.mark.full  # what a benchmark simulates, not the package

RANKS, LAYERS, SCRAPES = 20, 5, 3
OWN_SERIES = 5  # that Prometheus adds to each target


@functools.cache
def recorded(*, sharded: bool) -> tuple[Recording, Recording]:
    """Return what rank 0 and another rank of a real job show; run once for all tests."""
    return recordings(LAYERS, SCRAPES, sharded=sharded)


@pytest.fixture
def replicated() -> tuple[Recording, Recording]:
    """Return what rank 0 and another rank of a real job under DDP show."""
    return recorded(sharded=False)


@pytest.fixture
def sharded() -> Recording:
    """Return what each rank of a real job under FSDP2 shows."""
    return recorded(sharded=True)[0]


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """Return a small fleet before a real Prometheus, once every scrape has come in time."""
    found: list[Outcome] = []

    def is_in_time() -> bool:
        case = Case(RANKS, LAYERS, sharded=False)
        found.append(measure(case, one_each, seconds=3, interval=0.5, recorded=recorded(sharded=False)))
        return complaints(found[-1:]) == [] and found[-1].durations[1] < 0.5 and found[-1].served < 1

    eventually(is_in_time)
    return found[-1]


def samples(recording: Recording, name: str) -> dict[str, list[float]]:
    """Return a metric's values in the recorded scrapes by layer, as another parser reads them."""
    found: dict[str, list[float]] = {}
    for body in recording.bodies:
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                if sample.name == name:
                    assert sample.labels["run"] == RUN
                    assert sample.labels["rank"] == PLACE
                    found.setdefault(sample.labels.get("layer", ""), []).append(sample.value)
    return found


@pytest.mark.server
def test_every_rank_is_up_with_its_series(outcome: Outcome) -> None:
    """A Prometheus that knows a folder scrapes 20 ranks, and holds each series that they serve and five for each of them."""
    assert complaints([outcome]) == []
    assert outcome.least_up == RANKS
    assert outcome.series == outcome.expected > LAYERS * 20 + RANKS * 100
    assert outcome.end.series == outcome.series + OWN_SERIES * RANKS
    assert outcome.end.samples_since(outcome.settled) == pytest.approx(outcome.end.series / 0.5, rel=0.4)
    assert outcome.found.reads >= RANKS
    assert 0 < outcome.served < 1
    assert outcome.durations[0] <= outcome.durations[1] < 0.5
    assert outcome.end.resident > outcome.empty.resident


def test_problems_of_a_fleet_are_named(outcome: Outcome) -> None:
    """A rank that was down for a moment and a series that did not arrive are named; the tables are made all the same."""
    wrong = replace(outcome, least_up=RANKS - 1, series=outcome.expected - 1)
    assert [text.split(": ")[1].split()[0] for text in complaints([wrong])] == ["at", str(outcome.expected - 1)]
    made = tables([wrong, outcome, replace(outcome, case=Case(2, LAYERS, sharded=True))], [outcome.found], 0.5)
    assert [row[3] for row in made[1]["rows"]] == [RANKS - 1, RANKS, RANKS]


def test_only_rank_0_shows_replicated_layers(replicated: tuple[Recording, Recording]) -> None:
    """Rank 0 has all layers, each with a histogram of 16 series; another rank shows the rest and no layer."""
    first, other = replicated
    assert len(samples(first, "torch_grad_norm")) == LAYERS
    assert len(samples(first, "torch_grad_norm_distribution_count")) == LAYERS
    assert first.series["torch_grad_norm_distribution"] == 16 * LAYERS
    assert b"layer=" not in other.bodies[-1]
    assert other.total == sum(not line.startswith(b"#") for line in other.bodies[-1].splitlines())
    assert first.total - other.total == pytest.approx(30 * LAYERS, abs=3 * LAYERS)


def test_each_rank_shows_its_part_of_sharded_layers(sharded: Recording) -> None:
    """A rank shows the norm of its part under its own name, and its square in the counter."""
    assert len(samples(sharded, "torch_grad_shard_norm")) == LAYERS
    assert samples(sharded, "torch_grad_norm") == {}
    norms, squares = (samples(sharded, name) for name in ("torch_grad_shard_norm", "torch_grad_norm_squared"))
    for layer, values in norms.items():
        assert [value**2 for value in values] == pytest.approx(squares[layer])


@pytest.mark.server
def test_each_rank_is_itself(tmp_path: Path, sharded: Recording) -> None:
    """Found by http_sd, each target has its own rank, place and host on all series, and no label is renamed."""
    with Fleet(sharded, sharded, 17) as fleet:
        listed = {target["labels"]["rank"]: target for target in json.loads(fleet.listed())}
        address = f"http://{fleet.targets[3].address}{TARGETS.decode()}"
        with prometheus(tmp_path / "prometheus", HTTP.format(address), 0.5) as server:
            seconds_until(lambda: server.up() == 17, patience=PATIENCE)
            assert server.value('count(count by (rank, host, local_rank) (torch_grad_shard_norm{run="fleet"}))') == 17
            assert server.value('torch_train_world_size{rank="16",host="host-0002",local_rank="0"}') == 2
            assert server.value('count({__name__=~"torch_.+",exported_rank!=""})') == 0
            assert server.value(f'up{{instance="{listed["9"]["targets"][0]}",rank="9",host="host-0001",local_rank="1"}}') == 1
