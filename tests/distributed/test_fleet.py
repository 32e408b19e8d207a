"""The fleet of `benchmarks.fleet`, small: every rank of it is a target of a real Prometheus, with the series that it serves."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from benchmarks.fleet_job import Recording, recordings
from benchmarks.fleet_prometheus import HTTP, prometheus, seconds_until
from benchmarks.fleet_run import Case, Outcome, measure, one_each
from benchmarks.fleet_server import TARGETS, Fleet
from benchmarks.fleet_tables import complaints
from tests.support.tools import PATIENCE, eventually

pytestmark = pytest.mark.full  # what a benchmark simulates, not the package

RANKS, LAYERS, SCRAPES = 20, 5, 3
OWN_SERIES = 5  # that Prometheus adds to each target


@functools.cache
def recorded(*, sharded: bool) -> tuple[Recording, Recording]:
    """Return what rank 0 and another rank of a real job show; run once for all tests."""
    return recordings(LAYERS, SCRAPES, sharded=sharded)


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


@pytest.mark.server
def test_each_rank_is_itself(tmp_path: Path) -> None:
    """Found by http_sd, each target has its own rank, place and host on all series, and no label is renamed."""
    sharded = recorded(sharded=True)[0]
    with Fleet(sharded, sharded, 17) as fleet:
        listed = {target["labels"]["rank"]: target for target in json.loads(fleet.listed())}
        address = f"http://{fleet.targets[3].address}{TARGETS.decode()}"
        with prometheus(tmp_path / "prometheus", HTTP.format(address), 0.5) as server:
            seconds_until(lambda: server.up() == 17, patience=PATIENCE)
            assert server.value('count(count by (rank, host, local_rank) (torch_grad_shard_norm{run="fleet"}))') == 17
            assert server.value('torch_train_world_size{rank="16",host="host-0002",local_rank="0"}') == 2
            assert server.value('count({__name__=~"torch_.+",exported_rank!=""})') == 0
            assert server.value(f'up{{instance="{listed["9"]["targets"][0]}",rank="9",host="host-0001",local_rank="1"}}') == 1
