"""What `docs/scaling.md` says: its configurations pass promtool and do what is written beside them, and its series are counted."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import fleet_prometheus
from benchmarks.fleet_job import Recording, recordings
from benchmarks.fleet_run import one_each
from benchmarks.fleet_server import RANKS_PER_HOST, Fleet
from tests.support.catalogue import CATALOGUE
from tests.support.tools import PATIENCE, REPOSITORY, eventually, find

PAGE = (REPOSITORY / "docs" / "scaling.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
RANKS, LAYERS, SCRAPES = 12, 5, 3
FOLDER = "/shared/torch-grad-exporter/"


def block(mark: str) -> str:
    """The first configuration on the page that has this in it."""
    return next(text for text in BLOCKS if mark in text)


def promtool(*arguments: object) -> str:
    """What promtool answers; its complaint fails the test."""
    done = subprocess.run([find("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def series_per_layer(recording: Recording) -> dict[str, int]:
    """Those that a layer has, by metric."""
    found = {name: count for name, count in recording.series.items() if "layer" in CATALOGUE[name].labels}
    assert all(count % LAYERS == 0 for count in found.values())
    return {name: count // LAYERS for name, count in found.items() if count}


@pytest.fixture(scope="module")
def replicated() -> Recording:
    """What rank 0 of a real job under DDP shows."""
    return recordings(LAYERS, SCRAPES, sharded=False)[0]


@pytest.fixture(scope="module")
def sharded() -> Recording:
    """What a rank of a real job under FSDP2 shows."""
    return recordings(LAYERS, SCRAPES, sharded=True)[0]


@pytest.mark.server
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_promtool_takes_every_configuration(number: int, tmp_path: Path) -> None:
    """As a configuration, as rules, as that of an agent, or as what a Collector's receiver gets."""
    text = BLOCKS[number]
    keys = yaml.safe_load(text)
    if "receivers" in keys:
        text = yaml.safe_dump(keys["receivers"]["prometheus"]["config"])
    (file := tmp_path / "file.yml").write_text(text, encoding="utf-8")
    agent = ["--agent"] if text.startswith("# agent") else []
    told = promtool("check", "rules", file) if "groups" in keys else promtool("check", "config", *agent, file)
    assert "SUCCESS" in told


def test_every_scrape_keeps_the_labels_of_the_exporter() -> None:
    """Each scrape configuration on the page sets `honor_labels`, so that no label is renamed."""
    found = [job for text in BLOCKS for job in yaml.safe_load(text).get("scrape_configs", [])]
    assert len(found) >= 7
    assert all(job["honor_labels"] is True for job in found)


@pytest.mark.full
def test_series_per_layer_are_those_of_real_jobs(replicated: Recording, sharded: Recording) -> None:
    """Each row of the page's table is what a layer has on rank 0 under DDP and on each rank under FSDP2, and none is missing."""
    rows = re.findall(r"^\| `(torch_\w+)` \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    for column, recording in ((1, replicated), (2, sharded)):
        counted = series_per_layer(recording)
        assert {row[0]: int(row[column]) for row in rows if row[column] != "0"} == counted
        assert int(re.findall(r"^\| all \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)[0][column - 1]) == sum(counted.values())


@pytest.mark.full
def test_series_of_runs_follow_the_formulas(replicated: Recording, sharded: Recording) -> None:
    """The page's sums for 100 to 10,000 ranks are those of its formulas, and 240 series of a rank are right to a tenth."""
    per_layer = [sum(series_per_layer(one).values()) for one in (replicated, sharded)]
    for recording, count in zip((replicated, sharded), per_layer, strict=True):
        assert recording.total - LAYERS * count == pytest.approx(240, rel=0.1)
    rows = re.findall(r"^\| (1[0,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        ranks, ddp, few, many = (int(cell.replace(",", "")) for cell in row)
        assert (ddp, few, many) == (
            240 * ranks + per_layer[0] * 300,
            (240 + per_layer[1] * 50) * ranks,
            (240 + per_layer[1] * 300) * ranks,
        )


@pytest.mark.full
@pytest.mark.server
def test_only_the_dropped_series_are_gone(tmp_path: Path, sharded: Recording) -> None:
    """A real Prometheus keeps six series of each layer and rank, the host's from local rank 0 alone, and all of the training's."""
    (job,) = yaml.safe_load(block("metric_relabel_configs"))["scrape_configs"]
    (folder := tmp_path / "ranks").mkdir()
    discovery = yaml.safe_dump(
        {"file_sd_configs": [{"files": [f"{folder}/*.json"]}], "metric_relabel_configs": job["metric_relabel_configs"]},
        default_flow_style=True,
        width=10_000,
    ).strip()[1:-1]
    indented = discovery.replace(", metric_relabel_configs", "\n    metric_relabel_configs", 1)
    with Fleet(sharded, sharded, RANKS) as fleet:
        one_each(fleet, folder)
        with fleet_prometheus.prometheus(tmp_path / "prometheus", indented, 0.5) as server:
            assert eventually(lambda: server.up() == RANKS)
            left = {
                found["metric"]["__name__"]
                for found in server.get("query", query='count by (__name__) ({run!="",layer!=""})')["result"]
            }
            of_ranks = server.value('count({run!="",layer="",__name__!~"up|scrape_.+"})')
            hosts = server.value("count(torch_host_cpu_ratio)")
            counts = [
                server.value(f"count({{{match}}})")
                for match in ('layer!=""', '__name__=~"torch_train_.+"', '__name__="python_gc_collections_total"')
            ]
    assert left == {
        "torch_grad_shard_norm", "torch_grad_norm_squared_accumulated_total", "torch_grad_captures_total",
        "torch_grad_dead_ratio", "torch_grad_nonfinite_elements_total",
    }  # fmt: skip
    assert of_ranks / RANKS == pytest.approx(125, rel=0.1)
    assert hosts == -(-RANKS // RANKS_PER_HOST)
    training = sum(count for name, count in sharded.series.items() if name.startswith("torch_train_"))
    assert counts == [6 * LAYERS * RANKS, training * RANKS, 0]


@pytest.mark.full
@pytest.mark.server
def test_shards_have_every_rank_once(tmp_path: Path, sharded: Recording) -> None:
    """By the page's hash and its four numbers promtool finds each of 40 ranks in one shard, and those of a host in the same."""
    text = block("hashmod").replace(FOLDER, f"{tmp_path}/")
    with Fleet(sharded, sharded, 40) as fleet:
        one_each(fleet, tmp_path)
    with ThreadPoolExecutor() as pool:  # promtool waits for its whole time
        shards = list(pool.map(lambda number: _ranks_of(text, number, tmp_path), range(4)))
    assert sorted(itertools.chain(*shards)) == list(range(40))
    for shard in shards:
        assert {rank // RANKS_PER_HOST * RANKS_PER_HOST for rank in shard} == {rank for rank in shard if rank % RANKS_PER_HOST == 0}
    assert sum(bool(shard) for shard in shards) > 1


def _ranks_of(text: str, number: int, folder: Path) -> list[int]:
    (file := folder / f"shard-{number}.yml").write_text(text.replace('regex: "0"', f'regex: "{number}"'), encoding="utf-8")
    found = json.loads(promtool("check", "service-discovery", "--timeout=5s", file, "training"))
    return [int(target["labels"]["rank"]) for target in found if target.get("labels")]


@pytest.mark.server
def test_the_rules_give_the_norm_of_all_parts(tmp_path: Path) -> None:
    """Parts of norms 3 and 4, sampled 10 and 5 times a minute, are a layer of norm 5, in one Prometheus and out of two shards."""
    one, above = (yaml.safe_load(block(mark)) for mark in ("run_layer:torch_grad_norm:rms5m", "all_layer:"))
    parts = {
        'torch_grad_norm_squared_accumulated_total{run="r",rank="0",layer="a"}': "0+90x20",
        'torch_grad_norm_squared_accumulated_total{run="r",rank="1",layer="a"}': "0+80x20",
        'torch_grad_captures_total{run="r",rank="0",layer="a"}': "0+10x20",
        'torch_grad_captures_total{run="r",rank="1",layer="a"}': "0+5x20",
    }
    shards = {
        f'run_layer:torch_grad_norm_squared:mean5m{{run="r",layer="a",shard="{shard}"}}': f"{squared}x20"
        for shard, squared in enumerate((9, 16))
    }
    _rules_give(tmp_path, one, parts, 'run_layer:torch_grad_norm:rms5m{run="r", layer="a"}')
    _rules_give(tmp_path, above, shards, 'all_layer:torch_grad_norm:rms5m{run="r", layer="a"}')


def _rules_give(folder: Path, rules: Mapping[str, Any], series: Mapping[str, str], labels: str) -> None:
    """The rules make a series of the value 5 of these, to ten digits."""
    (folder / "rules.yml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    name = labels.partition("{")[0]
    test = {
        "rule_files": ["rules.yml"],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": key, "values": values} for key, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f"round({name} * 1e10) / 1e10",
                        "eval_time": "15m",
                        "exp_samples": [{"labels": labels.removeprefix(name), "value": 5}],
                    }
                ],
            }
        ],
    }
    (folder / "test.yml").write_text(yaml.safe_dump(test), encoding="utf-8")
    promtool("test", "rules", folder / "test.yml")
