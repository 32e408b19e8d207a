"""Nine kinds of training under a real Prometheus with the shipped rules: a healthy one, and one with each fault.

All train normally at first; then the faults begin. The `for` of each alert is a sixtieth of the shipped one; expressions and
thresholds are the shipped ones.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing as mp
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event as Begin
from pathlib import Path
from typing import Any

import psutil
import pynvml
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.made_hardware import Hardware, installed
from tests.support.real_prometheus import Prometheus
from tests.support.real_prometheus import running as a_prometheus
from tests.support.tools import PATIENCE, REPOSITORY, eventually
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import AGC, Event, Freeze, Log, MaxNorm, Measurements, ScaleLearningRate

PACE = 0.12
"""Seconds that a forward pass sleeps."""
LOADING = 0.015
"""Seconds that each batch takes."""
BATCH, WIDTH = 16, 16
CLIP = 0.5
WARM_SAMPLES = 30
"""Samples before the faults: a baseline of norms needs 20."""
DEAD_WINDOW = 20
NAN_STEPS, EXPLODING_STEPS = 7, 5
"""Steps with NaN gradients, and with gradients 10,000 times as large."""
LAYERS = 292
SLOWER = 2
"""Time of a step of the straggler over that of the other ranks."""

CONFIGURATION = """
global: {{scrape_interval: {scrape}s, scrape_timeout: {scrape}s, evaluation_interval: 1s}}
rule_files: [{rules}/*.yml]
scrape_configs:
  - job_name: training
    honor_labels: true
    file_sd_configs: [{{files: ["{folder}/*.json"], refresh_interval: 1s}}]
"""


class Perceptron(torch.nn.Module):
    """A slow model of three layers, the second with a residual connection, so that it can die alone."""

    def __init__(self, pace: float) -> None:
        super().__init__()
        self.pace = pace
        self.first, self.second, self.third = torch.nn.Linear(WIDTH, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pace)
        hidden = self.first(x).relu()
        return self.third(hidden + self.second(hidden).relu())


class Deep(torch.nn.Module):
    """A model of 292 layers whose gradient falls by five decades from the last to the first."""

    def __init__(self, pace: float) -> None:
        super().__init__()
        self.pace = pace
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS - 1))
        with torch.no_grad():
            for block in self.blocks:
                block.weight.copy_(0.96 * torch.eye(WIDTH) + 0.005 * torch.randn(WIDTH, WIDTH))
        self.blocks.append(torch.nn.Linear(WIDTH, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pace)
        for block in self.blocks:
            x = block(x)
        return x


class Training:
    """The training of a rank, one step at a time; faults change its attributes."""

    def __init__(self, name: str, rank: int, folder: str, hardware: Hardware | None) -> None:
        torch.manual_seed(rank)
        kind = RUNS[name]
        self.hardware = hardware
        slow = kind.ranks > 1 and rank == kind.ranks - 1
        self.model = kind.model(SLOWER * (kind.pace + LOADING) - LOADING if slow else kind.pace)
        wrapped = DistributedDataParallel(self.model) if kind.ranks > 1 else self.model
        self.wrapped: Callable[[torch.Tensor], torch.Tensor] = wrapped
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.8)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=200, enabled=hardware is not None)
        collectors = {} if hardware else {"gpu": False, "cuda_memory": False}
        usual = {"every": 1, "dead_window": DEAD_WINDOW, "addr": "127.0.0.1", "run": name, "rank": rank, "sd_dir": folder}
        options = usual | {"collectors": collectors, "grad_scaler": self.scaler if hardware else None} | kind.options
        if hardware:
            options |= {"flops_per_step": 1e6, "peak_flops": 1e9, "state_dir": Path(folder) / "state"}
            self._before(name, rank, options["state_dir"])
        self.exporter: Exporter = start_exporter(wrapped, 0, **options)
        if hardware:
            self.exporter.resume(2)
        self.clipped = "clip" in kind.options
        self.looks_inside = "activations" in kind.options
        self.logs = kind.logs
        for rule, action in kind.acts:
            self.exporter.on(rule, action)
        self.loader = iter(self.exporter.watch_loader(_batches()))
        self.teacher = torch.randn(WIDTH, 4, generator=torch.Generator().manual_seed(7)) / 4
        self.factor = 1.0
        """Factor of each gradient."""
        self.collapsing = 0
        """Steps since the policy whose values are logged has begun to collapse."""
        for parameter in self.model.parameters():
            parameter.register_hook(lambda gradient: gradient * self.factor)
        self.steps = 0

    def _before(self, name: str, rank: int, state: Path) -> None:
        """Be an earlier process of the run, which has made five steps."""
        collectors = {"gpu": False, "cuda_memory": False}  # it is the next one that has the fake GPU
        with start_exporter(self.model, None, run=name, rank=rank, state_dir=state, collectors=collectors):
            for _ in range(5):
                self.optimizer.zero_grad()
                self.model(next(_batches())).square().mean().backward()
                self.optimizer.step()

    def step(self, *, loss: float | None = None) -> None:
        """Make a step; observe `loss` instead of the real loss."""
        rate = 0.05 * min(1.0, (self.steps + 1) / 60) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, self.steps / 900)))
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad()
        x = next(self.loader)
        y = self.wrapped(x)
        if self.looks_inside:
            y = self.exporter.watch("output", y)
        found = (y - x @ self.teacher).square().mean()
        self.scaler.scale(found).backward()
        self.scaler.unscale_(self.optimizer)
        if not all(torch.isfinite(parameter.grad).all() for parameter in self.model.parameters() if parameter.grad is not None):
            for parameter in self.model.parameters():
                parameter.grad.nan_to_num_(0.0)  # type: ignore[union-attr]  # the exporter has seen it; the run goes on
        if not self.clipped:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        value = float(found.detach()) if loss is None else loss
        self.exporter.observe(loss=value, samples=len(x), tokens=32 * len(x), epoch=self.steps // 100)
        if self.logs:
            self.exporter.log(policy(self))
        self.steps += 1
        self.collapsing += self.collapsing > 0


def policy(training: Training) -> dict[str, float]:
    """Return values like those that TRL and verl log of a policy, which learns at first, and may collapse within 40 steps."""
    learnt, lost, wave = training.steps / (training.steps + 100), min(1.0, training.collapsing / 40), math.sin(training.steps / 7)
    return {
        "reward": learnt + 0.05 * wave + lost,
        "reward_std": 0.25 * (1 - lost) + 0.01,
        "eval_reward": 0.9 * learnt - 0.5 * lost,
        "kl": 0.05 * learnt + 0.01 * (1 + wave) + 40 * lost,
        "entropy": 1.2 * (1 - 0.3 * learnt) * (1 - lost) + 0.01,
        "clip_ratio/region_mean": 0.05 + 0.02 * wave + 0.6 * lost,
        "completions/mean_length": 180 + 60 * learnt + 5 * wave + 300 * lost,
        "frac_reward_zero_std": 0.1 + 0.05 * wave + 0.8 * lost,
        "rollout_corr/rollout_is_eff_sample_size": 0.9 - 0.7 * lost,
        "rollout_corr/kl": 0.001 + 0.0002 * wave + 0.5 * lost,
        "loss/auxiliary": math.nan if 0 < training.collapsing <= NAN_STEPS else 0.5,
    }


def _batches() -> Iterator[torch.Tensor]:
    while True:
        time.sleep(LOADING)
        yield torch.randn(BATCH, WIDTH)


# Faults: each continues forever or ends the run.


def well(training: Training) -> None:
    """Train without a fault."""
    while True:
        training.step()


def nan_gradients(training: Training) -> None:
    """Make some steps with NaN gradients and losses."""
    training.factor = math.nan
    for _ in range(NAN_STEPS):
        training.step(loss=math.nan)
    training.factor = 1.0
    well(training)


def exploding(training: Training) -> None:
    """Make five fast steps with gradients 10,000 times as large, which clipping keeps from the weights."""
    pace, training.model.pace = training.model.pace, 0.01  # type: ignore[assignment]
    training.factor = 1e4
    for _ in range(EXPLODING_STEPS):
        training.step()
    training.factor = 1.0
    training.model.pace = pace
    well(training)


def dead(training: Training) -> None:
    """Kill all units of the second layer."""
    with torch.no_grad():
        training.model.get_parameter("second.bias").fill_(-1e4)
    well(training)


def failing(training: Training) -> None:
    """Fail with an exception."""
    training.step()
    raise RuntimeError


def finishing(training: Training) -> None:
    """Finish after a step."""
    training.step()


def warming_up(training: Training) -> None:
    """Train on a fake GPU with changing values, throttled by heat for a tenth of the time; the policy that it logs collapses."""
    training.collapsing = 1
    while True:
        training.step()
        weather(training)


def weather(training: Training) -> None:
    """Change the values of the fake GPU after a step."""
    assert training.hardware is not None
    gpu, wave = training.hardware.gpu, math.sin(training.steps / 25)
    gpu.utilization, gpu.celsius = int(80 + 15 * wave), int(68 + 8 * wave)
    gpu.milliwatts = int(420_000 + 90_000 * wave)
    gpu.millijoules += int(gpu.milliwatts * (PACE + LOADING))
    gpu.nanoseconds[pynvml.NVML_PERF_POLICY_THERMAL] += int(1e8 * (PACE + LOADING))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of run: its fault, ranks, model, pace and the exporter's options.

    `acts`: pairs of rule or condition and action. `unseen`: no scrape sees its end. `logs`: it logs the values of a policy.
    """

    then: Callable[[Training], None] = well
    ranks: int = 1
    model: Callable[[float], torch.nn.Module] = Perceptron
    pace: float = PACE
    options: Mapping[str, Any] = field(default_factory=dict)
    hardware: bool = False
    acts: tuple[tuple[Any, Any], ...] = ()
    unseen: bool = False
    logs: bool = False


def exploded(m: Measurements) -> bool:
    """Return whether a norm spiked."""
    return m.last("torch_grad_global_norm_spikes_total") > 0


def broken(event: Event) -> None:
    """Fail as an action."""
    raise OSError(event.name)


ANSWERS = (
    ("GradientExploding", ScaleLearningRate(0.5)),
    ("GradientExploding", broken),
    (exploded, Freeze(layers=r"^second$", revive=None)),
)
LOCAL = {"local_norm": True}
RUNS: Mapping[str, Kind] = {
    "healthy": Kind(
        options={
            "moments": True,
            "weights": True,
            "activations": True,
            "layer_times": True,
            "clip": MaxNorm(CLIP),
            "dry_run": [MaxNorm(CLIP / 10), AGC()],
        },
        logs=True,
    ),
    "nan": Kind(nan_gradients, options={"alerts": [Log()]}),
    "explodes": Kind(exploding, acts=ANSWERS),
    "dead-layer": Kind(dead),
    "two-ranks": Kind(ranks=2, options=LOCAL),
    "four-ranks": Kind(ranks=4, options=LOCAL),
    "raises": Kind(failing, unseen=True),
    "raises-lingers": Kind(failing, options={"linger": PATIENCE}),
    "killed": Kind(),
    "ends": Kind(finishing, unseen=True),
    "deep": Kind(model=Deep, pace=0.6),
    "gpu": Kind(warming_up, hardware=True, options={"every": "auto", "overhead_budget": 0.05}, logs=True),
}
"""The runs by name. The last of several ranks is slow."""
PROCESSES = sum(kind.ranks for kind in RUNS.values())
ENDED = ("raises", "raises-lingers", "killed", "ends")
"""Runs that end when the faults begin."""

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "torch_grad_exporter", "tests.support.nine_runs"])


def _main(name: str, rank: int, folder: str, begin: Begin) -> None:
    """Run the process of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    kind = RUNS[name]
    if kind.ranks > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(kind.ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(kind.ranks))
        dist.init_process_group("gloo", init_method=f"file://{folder}/.{name}", rank=rank, world_size=kind.ranks)
    with contextlib.ExitStack() as stack, contextlib.suppress(RuntimeError):  # which is how a run fails
        training = Training(name, rank, folder, stack.enter_context(installed()) if kind.hardware else None)
        with training.exporter:
            while not begin.is_set():
                training.step()
                if training.hardware is not None:
                    weather(training)
            try:
                kind.then(training)
            finally:
                if kind.unseen:
                    hide(training.exporter.port)


def hide(port: int | None) -> None:
    """Shut the server's sockets, so that no scrape sees the end of the run."""
    for state in (psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED):  # in this order: a connection may come until the listener is shut
        for connection in psutil.Process().net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == state:
                with socket.socket(fileno=os.dup(connection.fd)) as copy, contextlib.suppress(OSError):
                    copy.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class Scene:
    """Prometheus, and the Unix times at which the runs started and their faults began."""

    prometheus: Prometheus
    started: float
    began: float
    scrape: int = 1

    def seconds(self) -> float:
        """Return the seconds since the runs started."""
        return time.time() - self.started


@contextlib.contextmanager
def running(directory: Path, scrape: int = 1) -> Iterator[Scene]:
    """Start all runs, wait until their faults have begun and Prometheus has seen the ended ones, and yield the scene.

    `scrape`: seconds between scrapes. An exporter collects about once a second, so faster scrapes show nothing new.
    """
    folder, rules = directory / "sd", directory / "rules"
    folder.mkdir()
    rules.mkdir()
    for file in sorted((REPOSITORY / "dashboards" / "prometheus").glob("*.yml")):
        if file.name.endswith((".rules.yml", ".alerts.yml")):
            (rules / file.name).write_text(quickened(file.read_text(encoding="utf-8")), encoding="utf-8")
    with contextlib.ExitStack() as stack:
        prometheus = stack.enter_context(a_prometheus(directory, CONFIGURATION.format(rules=rules, folder=folder, scrape=scrape)))
        begin, started = CONTEXT.Event(), time.time()
        processes = {(name, rank): _start(stack, name, rank, folder, begin) for name in RUNS for rank in range(RUNS[name].ranks)}
        warm = f"count(torch_grad_exporter_captures_total >= {WARM_SAMPLES})"
        assert eventually(slowly(lambda: count(prometheus, warm) == PROCESSES), 5 * PATIENCE), "not all runs train"
        assert eventually(
            lambda: 0 < time.time() - prometheus.value('timestamp(up{run="explodes"})') < 0.2
        )  # five steps until the next
        begin.set()
        processes["killed", 0].kill()
        scene = Scene(prometheus, started, time.time(), scrape)
        ends = 'up{run=~"raises|killed|ends"}'  # what ends well leaves no `up` of 0 where its target goes before the next scrape
        gone = f"count(max_over_time({ends}[1h]) unless on (run) max_over_time({ends}[5s]) == 1)"
        assert eventually(slowly(lambda: count(prometheus, gone) == 3), 3 * PATIENCE), "not all have ended that should"
        yield scene


def slowly(condition: Callable[[], bool]) -> Callable[[], bool]:
    """Return the condition with a pause after a failed check, for conditions that a server evaluates."""

    def is_true() -> bool:
        if condition():
            return True
        time.sleep(0.2)
        return False

    return is_true


def quickened(text: str) -> str:
    """Return a rule file evaluated each second, with a second for each minute of `for`."""
    text = re.sub(r"\binterval: \w+", "interval: 1s", text)
    return re.sub(r"^( +for: \d+)m$", r"\1s", text, flags=re.MULTILINE)


def count(prometheus: Prometheus, expression: str) -> int:
    """Return the value of an expression without labels; 0 without a series or an answer."""
    with contextlib.suppress(OSError):
        return sum(int(value) for _, value in prometheus.query(expression))
    return 0


def _start(stack: contextlib.ExitStack, name: str, rank: int, folder: Path, begin: Begin) -> mp.context.ForkServerProcess:
    process = CONTEXT.Process(target=_main, args=(name, rank, str(folder), begin), daemon=True)
    process.start()

    def end() -> None:
        process.kill()
        process.join(PATIENCE)

    stack.callback(end)
    return process
