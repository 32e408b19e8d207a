"""Runs that together show every metric: one with all options, two ranks under DDP and FSDP2, two models, and one on a fake GPU.

The last trains on the CPU; its collectors of GPUs, CUDA memory and the container read fake hardware.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing as mp
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.made_hardware import Hardware, installed
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import AGC, Freeze, Log, MaxNorm, Rollback
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.context import CollectorContext
from torch_grad_exporter.collectors.registry import Declaration
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.rules import RULES, Finding, Rule, RuleContext

PACE = 0.1
GPU_RUN = "fake-gpu"
"""The run with fake hardware."""
POLICY = {
    "reward": 0.5, "reward_std": 0.2, "eval_reward": 0.4, "kl": 0.1, "entropy": 0.01, "clip_ratio": 0.1, "response_length": 200.0,
    "frac_reward_zero_std": 0.1, "rollout_corr/rollout_is_eff_sample_size": 0.9, "rollout_corr/kl": 0.01,
}  # fmt: skip
"""What the training of a policy logs that has lost its entropy."""


class Net(torch.nn.Module):
    """A perceptron with ReLU, of which one unit is dead and one parameter never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)
        self.unused = torch.nn.Parameter(torch.ones(3))
        with torch.no_grad():
            self.first.bias[0] = -1e4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Attend(torch.nn.Module):
    """Attention of four parts of each example to each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.view(-1, 1, 4, 4)
        return torch.nn.functional.scaled_dot_product_attention(parts, parts, parts).reshape(-1, 16)


def train(model: torch.nn.Module, exporter: Exporter, scaler: torch.amp.GradScaler | None = None, *, clips: bool = True) -> None:
    """Train forever with clipping and observations; some steps go wrong. `clips`: the loop clips, not the exporter."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for step, x in enumerate(exporter.watch_loader(batches())):
        optimizer.zero_grad()
        target = 3.0 if step % 80 < 40 else -3.0  # never reached, so that the noise scale stays known
        loss = (exporter.watch("output", model(x), max_norm=1e6) - target).square().mean() * (1e3 if step % 40 == 39 else 1.0)
        scaler.scale(loss * (float("nan") if step % 50 == 49 else 1.0)).backward()
        scaler.unscale_(optimizer)
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if step % 50 != 49:
            scaler.step(optimizer)
        scaler.update()
        exporter.log(POLICY | {"eval/score": float("nan") if step % 50 == 49 else 0.5})
        exporter.observe(loss=loss.detach(), samples=len(x), tokens=16 * len(x), epoch=step // 100)


def batches() -> Iterator[torch.Tensor]:
    """Yield random batches slowly."""
    while True:
        time.sleep(PACE)
        yield torch.randn(8, 16)


def usual(folder: str, run: str) -> dict[str, Any]:
    """Return the options of all runs."""
    return {"every": 1, "dead_window": 25, "addr": "127.0.0.1", "sd_dir": folder, "run": run}


class Unsteady:
    """A user's collector that fails six times in twelve: scrapes, rules and the history take turns in asking it."""

    def __init__(self, _context: CollectorContext) -> None:
        self._calls = itertools.count()

    def collect(self) -> Iterator[Family]:
        """Yield nothing, or fail."""
        if next(self._calls) % 12 < 6:
            raise OSError("no server there")
        yield from ()


def now_and_then(context: RuleContext) -> Iterator[Finding]:
    """Find a problem for two seconds in four, each time with another severity."""
    if context.now % 4 < 2:
        yield Finding(("critical", "warning", "info")[int(context.now / 4) % 3], "It is so.")


NOW_AND_THEN = Rule(name="NowAndThen", states=frozenset({"training"}), judge=now_and_then)


def alone(folder: str) -> None:
    """Train in one process with every option, a collector that fails at times, and a rule that flaps."""
    REGISTRY.register(Declaration("unsteady", (), Unsteady))
    RULES.register(NOW_AND_THEN)
    model = Net()
    options = usual(folder, "alone") | {"moments": True, "weights": True, "max_layers": 2, "alerts": [Log()]}
    options |= {"activations": True, "layer_times": True, "nan_origin": "always"}
    options |= {"clip": MaxNorm(0.1), "dry_run": [MaxNorm(0.01), AGC()], "flops_per_step": 1e6, "peak_flops": 1e9}
    state = {"run": "alone", "state_dir": Path(folder).parent / "state"}
    with start_exporter(model, None, **state):  # an earlier process of the run
        short = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in itertools.islice(batches(), 20):
            short.zero_grad()
            model(x).square().mean().backward()
            short.step()
    exporter = start_exporter(model, 0, **(options | state))
    exporter.resume(5)
    exporter.on(lambda m: m.last("torch_train_loss") > 0, print, name="tells", cooldown=2)
    train(model, exporter, clips=False)


def replicas(folder: str) -> None:
    """Train two ranks under DDP, which freeze a layer together, and a buffer that each has its own of."""
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    model.module.register_buffer("own", torch.tensor(float(dist.get_rank())))
    torch.manual_seed(dist.get_rank())  # ranks with equal batches have no gradient noise
    exporter = start_exporter(model, 0, local_norm=True, replicas=True, **usual(folder, "replicas"))
    exporter.on(lambda m: m.last("torch_train_loss") > 0, Freeze(layers=r"^second$"))
    train(model, exporter)


def shards(folder: str) -> None:
    """Train two ranks under FSDP2."""
    model = Net()
    del model.unused
    fully_shard(model)
    exporter = start_exporter(model, 0, **usual(folder, "shards"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in batches():
        optimizer.zero_grad()
        (model(x) - 1.0).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        exporter.observe(grad_norm=norm.full_tensor())  # type: ignore[attr-defined]


def adversaries(folder: str) -> None:
    """Train two models in turn, each with its own Adam, one with attention, and with a loss below 0; tokens go to experts.

    From time to time both go back to a copy.
    """
    generator = torch.nn.Sequential(torch.nn.Linear(16, 16), Attend())
    models: dict[str, torch.nn.Module] = {"generator": generator, "discriminator": torch.nn.Linear(16, 1)}
    optimizers = {name: torch.optim.Adam(model.parameters(), lr=0.001) for name, model in models.items()}
    options = usual(folder, "adversaries") | {"optimizer_state": True, "attention": True}
    exporter = start_exporter(models, 0, optimizers=optimizers, **options)
    exporter.on(lambda _: time.monotonic() % 8 < 4, Rollback(every=5, most=1_000_000))
    for x in batches():
        exporter.router("experts", x.argmax(dim=1), experts=16)
        for name, sign in (("discriminator", 1.0), ("generator", -1.0)):
            optimizers[name].zero_grad()
            made = models["generator"](x)
            real, fake = models["discriminator"](x), models["discriminator"](made if name == "generator" else made.detach())
            deceived = torch.nn.functional.softplus(fake).mean()
            (sign * deceived + torch.nn.functional.softplus(-real).mean()).backward()
            optimizers[name].step()
        exporter.observe(loss=-deceived.detach())


def on_a_fake_gpu(folder: str) -> None:
    """Train in one process with fake hardware, a GPU that is throttled for a twentieth of the time."""
    model, scaler = Net(), torch.amp.GradScaler("cpu")
    options = usual(folder, GPU_RUN) | {"every": "auto", "overhead_budget": 0.9}
    with installed() as hardware:
        threading.Thread(target=strain, args=(hardware,), daemon=True).start()
        train(model, start_exporter(model, 0, grad_scaler=scaler, **options), scaler)


def strain(hardware: Hardware) -> None:
    """Throttle the GPU for a twentieth of the time, for each reason, and let an allocation fail now and then."""
    while True:
        time.sleep(0.2)
        hardware.gpu.nanoseconds = {policy: held + 10_000_000 for policy, held in hardware.gpu.nanoseconds.items()}
        hardware.memory = replace(hardware.memory, ooms=int(time.monotonic()))


CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch_grad_exporter", __name__])


def _main(kind: Callable[[str], None], folder: str, store: str, rank: int, ranks: int) -> None:
    """Run one process; several ranks have a process group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if ranks > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    kind(folder)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[int]:
    """Run all and yield the number of targets. `folder`: where Prometheus discovers them."""
    processes = []
    with tempfile.TemporaryDirectory() as stores:
        for kind, ranks in ((alone, 1), (replicas, 2), (shards, 2), (adversaries, 1), (on_a_fake_gpu, 1)):
            for rank in range(ranks):
                arguments = (kind, str(folder), f"{stores}/{kind.__name__}", rank, ranks)
                processes.append(CONTEXT.Process(target=_main, args=arguments, daemon=True))
        try:
            for process in processes:
                process.start()
            yield len(processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
