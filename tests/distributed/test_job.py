"""Jobs of two ranks from end to end: the examples before a real Prometheus that only knows a folder, and ranks that stop or die.

Two jobs, `examples/ddp.py` and `examples/fsdp2.py`, train at once with one slow rank each, linger until Prometheus has seen their
end, and the tests ask it afterwards. In a third job an exporter is missing, fails or comes late, or a rank is stopped or killed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import pickle
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import Perceptron
from tests.support.ranks import FORKED, joined, start_ranks
from tests.support.real_prometheus import Prometheus
from tests.support.scrape import errors
from tests.support.servers import free_port
from tests.support.tools import PATIENCE, REPOSITORY, eventually, find, get
from torch_grad_exporter import start_exporter

pytestmark = pytest.mark.server

PAGE = (REPOSITORY / "docs" / "distributed.md").read_text(encoding="utf-8")
FOLDER = "/shared/torch-grad-exporter"
FILES = 1
"""The place of the configuration with files among those on the page."""


def blocks() -> list[Any]:
    """Return the configurations in docs/distributed.md."""
    return [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]


def rule(name: str) -> str:
    """Return a rule of docs/distributed.md with the rules it is made of, over the last values instead of rates."""
    rules = {one["record"]: one["expr"] for found in blocks() for group in found.get("groups", ()) for one in group["rules"]}
    text = str(rules[name])
    for other, expression in rules.items():
        text = text.replace(other, f"({expression})")
    return text.replace("rate(", "last_over_time(")


@dataclass(frozen=True)
class Watching:
    """A Prometheus that reads the folder of the ranks' files."""

    prometheus: Prometheus
    folder: Path

    def ups(self, example: str) -> dict[str, float]:
        """Return `up` of a job by rank."""
        return {labels["rank"]: float(value) for labels, value in self.prometheus.query(f'up{{example="{example}"}}')}

    def ranks_with_files(self) -> set[str]:
        """Return the ranks that have a file in the folder."""
        return {path.stem.rpartition("-")[2] for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watching]:
    """Run a Prometheus with the configuration of the page, which scrapes twice a second."""
    directory = tmp_path_factory.mktemp("watching")
    (folder := directory / "ranks").mkdir()
    text = yaml.safe_dump(blocks()[FILES] | {"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"}})
    assert FOLDER in text
    configuration = directory / "prometheus.yml"
    configuration.write_text(text.replace(FOLDER, str(folder)))
    port = free_port()
    options = [f"--config.file={configuration}", f"--storage.tsdb.path={directory}/data", f"--web.listen-address=127.0.0.1:{port}"]
    with subprocess.Popen([find("prometheus"), *options, "--log.level=error"]) as process:
        try:
            yield Watching(Prometheus(port), folder)
        finally:
            process.terminate()


# The examples

STEPS, SECONDS = 12, 0.3
SLOW = {"ddp": 1, "fsdp2": 0}
EXAMPLES = tuple(SLOW)
RUN_IDS = {"ddp": "none", "fsdp2": "a named run"}
"""What torchrun calls a run with and without `--rdzv-id`."""
LAYERS = ("0", "2", "4", "6")
RANGE = "[10m]"


@dataclass(frozen=True)
class Jobs:
    """Both jobs after their end, their runs by example, and the ranks whose files are left in the folder."""

    watching: Watching
    runs: dict[str, str]
    left: set[str]

    @property
    def prometheus(self) -> Prometheus:
        """Return what has scraped them."""
        return self.watching.prometheus

    def by(self, label: str, expression: str, example: str) -> dict[str, float]:
        """Return the values of an expression by one label; in it, `run` stands for the job's name."""
        text = expression.replace("$run", f'run="{self.runs[example]}"')
        found = self.prometheus.query(text)
        assert len({labels[label] for labels, _ in found}) == len(found)
        return {labels[label]: float(value) for labels, value in found}

    def ruled(self, name: str, example: str, by: str = "rank") -> dict[str, float]:
        """Return the last values of a rule of the page by one label."""
        found = self.prometheus.query(rule(name))
        return {labels[by]: float(value) for labels, value in found if labels["run"] == self.runs[example]}


def example_main(rank: int, example: str, folder: str, port: int) -> None:
    """Run one rank of an example, with the variables that torchrun sets."""
    os.environ.update({
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": RUN_IDS[example],
        "TORCH_GRAD_EXPORTER_ADDR": "127.0.0.1", "TORCH_GRAD_EXPORTER_LINGER": "600", "TORCH_GRAD_EXPORTER_EVERY": "1",
        "TORCH_GRAD_EXPORTER_LABELS": f"example={example}", "CUDA_VISIBLE_DEVICES": "",
    })  # fmt: skip
    script = str(REPOSITORY / "examples" / f"{example}.py")
    sys.argv = [script, f"--sd-dir={folder}", f"--steps={STEPS}", f"--seconds={SECONDS}", f"--slow-rank={SLOW[example]}"]
    runpy.run_path(script, run_name="__main__")


@pytest.fixture(scope="module")
def jobs(watching: Watching) -> Jobs:
    """Run both examples to their end."""
    running = [start_ranks(example_main, example, str(watching.folder), free_port()) for example in EXAMPLES]
    assert [joined(job) for job in running] == [True, True]
    info = watching.prometheus.query(f'last_over_time(torch_train_info{{example=~".+"}}{RANGE})')
    runs = {labels["example"]: labels["run"] for labels, _ in info}
    return Jobs(watching, runs, watching.ranks_with_files())


@functools.cache
def reference(example: str) -> tuple[dict[str, float], float]:
    """Return each layer's root mean square and the last global norm of one process with the data of both ranks, in float64."""
    names = runpy.run_path(str(REPOSITORY / "examples" / f"{example}.py"))
    torch.manual_seed(0)
    model = names["build"]().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = argparse.Namespace(steps=STEPS, slow_rank=None)
    corpus = names["read_corpus"]()
    squares, norm = dict.fromkeys(LAYERS, 0.0), 0.0
    for parts in zip(*(names["batches"](corpus, rank, chosen) for rank in range(2)), strict=True):
        text = torch.cat(parts)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(text[:, :-1]), text[:, -1]).backward()
        for layer in LAYERS:
            gradients = [parameter.grad for parameter in model[int(layer)].parameters()]
            squares[layer] += sum(float(gradient.square().sum()) for gradient in gradients if gradient is not None)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
    return {layer: (square / STEPS) ** 0.5 for layer, square in squares.items()}, norm


@pytest.mark.parametrize("example", EXAMPLES)
def test_all_ranks_are_found_under_their_own_names(example: str, jobs: Jobs) -> None:
    """Each rank was up with the labels that its own series have, of which none is renamed, and the run has one name."""
    place = ("run", "rank", "local_rank", "host")
    ups = jobs.prometheus.query(f'max_over_time(up{{example="{example}"}}{RANGE})')
    infos = jobs.prometheus.query(f'last_over_time(torch_train_info{{example="{example}"}}{RANGE})')
    assert [value for _, value in ups] == ["1", "1"]
    told, own = (sorted(tuple(labels[name] for name in place) for labels, _ in found) for found in (ups, infos))
    assert told == own == [(jobs.runs[example], rank, rank, socket.gethostname()) for rank in ("0", "1")]
    assert jobs.runs["fsdp2"] == "a named run"
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", jobs.runs["ddp"])
    assert jobs.by("rank", f"last_over_time(torch_train_world_size{{$run}}{RANGE})", example) == {"0": 2, "1": 2}
    names = jobs.prometheus.get("/api/v1/labels")
    assert {"run", "rank", "layer"} < set(names)
    assert [name for name in names if name.startswith("exported_")] == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_norms_are_those_of_one_process(example: str, jobs: Jobs) -> None:
    """The rule for the root mean square and the last global norm are the reference's to 1e-5."""
    layers, norm = reference(example)
    captures = jobs.by("layer", f"max by (layer) (last_over_time(torch_grad_captures_total{{$run}}{RANGE}))", example)
    assert captures == dict.fromkeys(LAYERS, STEPS)
    found = jobs.ruled("run_layer:torch_grad_norm:rms5m", example, by="layer")
    assert found == {layer: pytest.approx(value, rel=1e-5) for layer, value in layers.items()}
    last = jobs.by("rank", f"last_over_time(torch_grad_global_norm{{$run}}{RANGE})", example)
    assert last == {rank: pytest.approx(norm, rel=1e-5) for rank in ("0", "1")}


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_slow_rank_waits_for_its_data(example: str, jobs: Jobs) -> None:
    """Both ranks take as long for a step; the phase `data` and, under DDP, the ranks' own times tell which one is slow."""
    slow, other = str(SLOW[example]), str(1 - SLOW[example])
    steps = jobs.by("rank", f"last_over_time(torch_train_step_duration_seconds_sum{{$run}}{RANGE})", example)
    assert steps[other] == pytest.approx(steps[slow], rel=0.2)
    data = jobs.ruled("rank:torch_train_data_seconds:mean5m", example)
    assert data[slow] >= 0.9 * SECONDS  # the share is that of all time, with the start
    assert data[other] < SECONDS / 2
    if example == "ddp":
        own = jobs.ruled("rank:torch_train_own_seconds:mean5m", example)
        assert own[slow] - own[other] > SECONDS / 2
        ratio = jobs.ruled("rank:torch_train_own_seconds:ratio_fastest", example)
        assert ratio == {other: pytest.approx(1), slow: pytest.approx(own[slow] / own[other])}


def test_the_end_is_seen_and_then_the_ranks_are_gone(jobs: Jobs) -> None:
    """The last scrape has the state `finished`; the folder is empty, and Prometheus forgets the targets."""
    for example in EXAMPLES:
        ended = jobs.by("rank", f'last_over_time(torch_train_state{{$run,state="finished"}}{RANGE})', example)
        assert ended == {"0": 1, "1": 1}
        assert eventually(lambda example=example: jobs.watching.ups(example) == {})  # type: ignore[misc]
    assert jobs.left == set()


# Scenes: an exporter on some ranks only, and ranks that stop or die

BATCHES = 18
MIDDLE, LATE = 6, 12
"""Steps at which something happens."""

Options = dict[str, Any]
PLAIN: Options = {}
SCENES: dict[str, tuple[Options | None, Options | None]] = {
    "neither": (None, None),
    "the second only": (None, PLAIN),
    "failing on the second": (PLAIN, {"port": "9100"}),
    "late on the first": ({"at": MIDDLE}, PLAIN),
    "late while the first is stopped": ({"stops": MIDDLE}, {"at": MIDDLE}),
    "stopped and killed": (PLAIN, {"waits": (MIDDLE, LATE)}),
}
"""For each rank, whether it has an exporter and what is special about it."""

UNDISTURBED = [name for name in SCENES if "stopped" not in name]


@dataclass
class Finding:
    """What a rank found in a scene. `starting`: seconds that start_exporter took; `alone`: whether the peer was stopped by then."""

    losses: list[float] = field(default_factory=list)
    starting: float = 0.0
    alone: bool = False
    raised: str = ""
    error: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    collectives: int = 0


class Rank:
    """One of the two ranks."""

    def __init__(self, rank: int, folder: Path, ranks: Path, peer: int) -> None:
        self.rank = rank
        self.folder = folder
        self.ranks = ranks
        self.peer = peer

    def scene(self, name: str) -> Finding:
        """Train one model, with an exporter or without."""
        options = SCENES[name][self.rank]
        found = Finding()
        torch.manual_seed(0)
        model = DistributedDataParallel(Perceptron())
        dist.barrier()
        group: Any = dist.group.WORLD
        before = group._get_sequence_number_for_group()  # private: no public count
        with contextlib.ExitStack() as stack:
            if options is not None and "at" not in options:
                self.start(model, name, found, stack)
            self.train(model, name, found, stack)
        found.collectives = group._get_sequence_number_for_group() - before
        return found

    def start(self, model: torch.nn.Module, name: str, found: Finding, stack: contextlib.ExitStack) -> None:
        """Start the exporter as the scene says; the run has the name that the ranks agree on."""
        port = (SCENES[name][self.rank] or {}).get("port", 0)
        began = time.monotonic()
        try:
            options = {"addr": "127.0.0.1", "sd_dir": self.ranks, "labels": {"example": "scenes"}}
            exporter = stack.enter_context(start_exporter(model, port, every=1, **options))
        except TypeError as error:
            found.raised = str(error)
        else:
            stack.callback(lambda: found.errors.update(errors(exporter)))
            (self.folder / f"url-{self.rank}").write_text(str(exporter.url))
        found.starting = time.monotonic() - began

    def train(self, model: torch.nn.Module, name: str, found: Finding, stack: contextlib.ExitStack) -> None:
        """Train, with what happens in the scene."""
        options = SCENES[name][self.rank] or {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(self.rank)
        for step in range(BATCHES):
            if step == options.get("stops"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if step == options.get("at"):
                self.start_late(model, name, found, stack)
            if step in options.get("waits", ()):
                assert eventually((self.folder / f"go-{step}").exists)
                os.kill(os.getpid(), signal.SIGSTOP if step == MIDDLE else signal.SIGKILL)
            optimizer.zero_grad()
            loss = model(torch.randn(5, 6, generator=generator)).square().mean()
            try:
                loss.backward()
            except RuntimeError as error:  # the other one is dead; lives on, as one that saves a checkpoint does
                found.error = str(error)
                assert eventually((self.folder / "end").exists)
                return
            optimizer.step()
            found.losses.append(loss.item())

    def start_late(self, model: torch.nn.Module, name: str, found: Finding, stack: contextlib.ExitStack) -> None:
        """Start the exporter amid the training, in one scene while the peer, which hosts the store, is stopped."""
        peer = psutil.Process(self.peer)
        assert "stopped" not in name or eventually(lambda: peer.status() == psutil.STATUS_STOPPED)
        self.start(model, name, found, stack)
        found.alone = peer.status() == psutil.STATUS_STOPPED
        peer.send_signal(signal.SIGCONT)


def rank_main(rank: int, folder: Path, ranks: Path, port: int) -> None:
    """Run one rank of two, whose job's store is at rank 0."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    one = Rank(rank, folder, ranks, pids[1 - rank])
    with (folder / f"report-{rank}").open("wb", buffering=0) as report:
        for name in SCENES:
            report.write(pickle.dumps(one.scene(name)))
    os._exit(0)  # the group has lost its other rank, and would wait for it


@dataclass
class Scenes:
    """What both ranks found by scene, both exits, and by moment of the last scene `up`, and the ranks with files and answers."""

    found: list[dict[str, Finding]] = field(default_factory=list)
    exits: list[int | None] = field(default_factory=list)
    ups: dict[str, dict[str, float]] = field(default_factory=dict)
    files: dict[str, set[str]] = field(default_factory=dict)
    scraped: dict[str, bool] = field(default_factory=dict)


def read(path: Path) -> list[Finding]:
    """Return what a rank wrote, as far as it came."""
    found = []
    with path.open("rb") as report, contextlib.suppress(EOFError):
        while True:
            found.append(pickle.load(report))  # noqa: S301 - written by the process that was started here
    return found


def scraped(folder: Path) -> bool:
    """Return whether rank 0 answers a new scrape."""
    time.sleep(1.0)  # for which an answer is shared
    return "torch_train_steps_total" in get((folder / "url-0").read_text())


def watch(watching: Watching, folder: Path, scenes: Scenes) -> None:
    """Have rank 1 stop, go on and die, and look at both."""
    second = psutil.Process(int((folder / "pid-1").read_text()))

    def comes(moment: str, expected: dict[str, float]) -> None:
        def up() -> bool:
            scenes.ups[moment] = watching.ups("scenes")
            return scenes.ups[moment] == expected  # other scenes' ranks, which have ended, have no value

        assert eventually(up), (moment, scenes.ups)
        scenes.files[moment] = watching.ranks_with_files()

    comes("before", {"0": 1, "1": 1})
    (folder / f"go-{MIDDLE}").touch()
    assert eventually(lambda: second.status() == psutil.STATUS_STOPPED)
    scenes.scraped["stopped"] = scraped(folder)
    comes("stopped", {"0": 1, "1": 0})
    second.send_signal(signal.SIGCONT)
    comes("going on", {"0": 1, "1": 1})
    (folder / f"go-{LATE}").touch()
    assert eventually(lambda: not second.is_running() or second.status() == psutil.STATUS_ZOMBIE)
    scenes.scraped["killed"] = scraped(folder)
    comes("killed", {"0": 1, "1": 0})
    (folder / "end").touch()


@pytest.fixture(scope="module")
def scenes(watching: Watching, tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """Play all scenes."""
    directory, scenes = tmp_path_factory.mktemp("scenes"), Scenes()
    arguments = (directory, watching.folder, free_port())
    processes = [FORKED.Process(target=rank_main, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    last = len(SCENES) - 1
    reports = [directory / f"report-{rank}" for rank in range(2)]
    try:
        assert eventually(lambda: all(path.exists() and len(read(path)) == last for path in reports))
        watch(watching, directory, scenes)
        processes[0].join(PATIENCE)
    finally:
        for process in processes:
            process.kill()
            process.join()
    scenes.files["end"] = watching.ranks_with_files()
    scenes.found = [dict(zip(SCENES, read(path), strict=False)) for path in reports]
    scenes.exits = [process.exitcode for process in processes]
    return scenes


@pytest.mark.parametrize("name", UNDISTURBED[1:])
def test_no_rank_waits_for_a_missing_exporter(name: str, scenes: Scenes) -> None:
    """With an exporter missing, failing or late on a rank, losses and collectives of both ranks are those without any."""
    for mine in scenes.found:
        plain, found = mine["neither"], mine[name]
        assert len(found.losses) == BATCHES
        assert found.losses == plain.losses
        assert found.collectives == plain.collectives >= BATCHES
        assert found.errors == {}
    assert [bool(mine[name].raised) for mine in scenes.found] == [False, name == "failing on the second"]


def test_a_stopped_store_delays_a_start_by_its_limit(scenes: Scenes) -> None:
    """A rank that starts its exporter while the store's host is stopped goes on after 5 seconds, and the training is the same."""
    name = "late while the first is stopped"
    found = scenes.found[1][name]
    assert (found.starting > 4, found.alone) == (True, True)
    for mine in scenes.found:
        assert mine[name].losses == mine["neither"].losses
        assert mine[name].collectives == mine["neither"].collectives


def test_a_stopped_rank_is_down_and_comes_back(scenes: Scenes) -> None:
    """`up` is 0 while a rank is stopped; the other one is scraped meanwhile, and then both go on."""
    ups = scenes.ups
    assert [ups[moment] for moment in ("before", "stopped", "going on")] == [{"0": 1, "1": 1}, {"0": 1, "1": 0}, {"0": 1, "1": 1}]
    assert scenes.scraped["stopped"]
    losses = scenes.found[0]["stopped and killed"].losses
    assert losses == scenes.found[0]["neither"].losses[:LATE]


def test_a_killed_rank_stays_down(scenes: Scenes) -> None:
    """The other rank's training fails as without an exporter; it is still scraped, ends by itself and removes its own file."""
    assert scenes.ups["killed"] == {"0": 1, "1": 0}
    assert scenes.scraped["killed"]
    found = scenes.found[0]["stopped and killed"]
    assert "losed" in found.error or "reset" in found.error
    assert found.errors == {}
    assert scenes.exits == [0, -signal.SIGKILL]
    assert scenes.files["killed"] == {"0", "1"}
    assert scenes.files["end"] == {"1"}
