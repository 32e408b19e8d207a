"""On a GPU: the same numbers as anywhere, phases in its time, and the host never waits for it (`-m cuda`)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.matrix import REGIMES
from tests.matrix.harness import EVERYTHING, Way
from tests.support.models import Perceptron
from tests.support.record import Recorder, norm, wide
from tests.support.scrape import errors, value
from tests.support.tools import PATIENCE, eventually
from tests.support.torch_versions import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch_grad_exporter import Exporter, start_exporter

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # CUDA libraries warn of what is theirs
]

ON_A_GPU = [
    name
    for name in REGIMES
    # What is about the CPU alone: its gradient scaler, its compiler, its ranks.
    if torch.cuda.is_available()
    and REGIMES[name].body.__module__.rpartition(".")[2] not in ("precision", "compiled", "distributed", "optimizers")
]


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield
    torch.cuda.synchronize()


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """Raise where the block would wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def spin(cycles: int) -> None:
    """Keep the GPU busy."""
    torch.cuda._sleep(cycles)  # private: torch has no public way to do this


def settled(exporter: Exporter, steps: int) -> bool:
    """Return whether the samples of all steps have arrived."""
    torch.cuda.synchronize()
    return eventually(lambda: value(exporter, "torch_grad_exporter_captures_total") == steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_GPU)
def test_regime(name: str) -> None:
    """The regimes of the matrix hold on a GPU."""
    REGIMES[name].run(Way.EVERYTHING)


@pytest.mark.parametrize("options", [{}, {"moments": True, "weights": True}], ids=["default", "all"])
@pytest.mark.parametrize("clip", [False, True])
def test_nothing_waits_for_the_device(clip: bool, options: dict[str, bool]) -> None:
    """A loop that samples every round never waits, also with clipping by a tensor and an observed loss."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True, capturable=True)
    inputs = torch.randn(4, 3, 8, 8)
    with start_exporter(model, port=None, every=1, **options) as exporter:
        model(inputs).square().mean().backward()  # libraries initialise themselves, and that waits
        optimizer.step()
        with nothing_waits():
            for _ in range(30):
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                loss.backward()
                if clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                exporter.observe(loss=loss)
                optimizer.step()
        assert eventually(lambda: value(exporter, "torch_train_loss") is not None)
        assert errors(exporter) == {}
        torch.cuda.synchronize()
        assert eventually(lambda: (value(exporter, "torch_grad_exporter_captures_total") or 0) > 2)


def test_values_arrive_from_a_busy_gpu() -> None:
    """Values that the GPU has not computed yet are not shown and not waited for; they arrive without a further step."""
    with start_exporter(Perceptron(), port=None) as exporter:
        exporter.observe(loss=torch.tensor(0.25))  # the first buffer is allocated, which may wait
        assert eventually(lambda: value(exporter, "torch_train_loss") == 0.25)
        with nothing_waits():
            numbers = torch.full((40,), torch.nan)
            spin(500_000_000)  # a few tenths of a second
            for number in numbers:
                exporter.observe(loss=number)
            assert value(exporter, "torch_train_loss_nonfinite_total") in (None, 0)
        assert eventually(lambda: (value(exporter, "torch_train_loss_nonfinite_total") or 0) >= 8)
        torch.cuda.synchronize()
        exporter.observe(loss=torch.tensor(0.5))
        assert eventually(lambda: value(exporter, "torch_train_loss") == 0.5)
        assert errors(exporter) == {}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize("unscale", [True, False])
def test_grad_scaler(fused: bool, unscale: bool) -> None:
    """Under a gradient scaler norms are unscaled and an overflow is a skipped step, with a fused optimizer too."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=not fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
    with start_exporter(model, port=None, every=1, grad_scaler=scaler) as exporter:
        for step in range(12):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(5, 6)).float().square().mean() * (torch.inf if step == 6 else 1.0)
            scale = scaler.get_scale()
            scaler.scale(loss).backward()
            expected = norm(wide(p.grad) / scale for p in model.parameters())
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert settled(exporter, step + 1)
            if step != 6:
                assert value(exporter, "torch_grad_global_norm") == pytest.approx(expected, rel=1e-5)
                assert value(exporter, "torch_grad_clip_coefficient") == pytest.approx(1.0, rel=1e-5)
        outcomes = {o: value(exporter, "torch_grad_nonfinite_steps_total", outcome=o) for o in ("stepped", "skipped", "unknown")}
        assert sum(v or 0 for v in outcomes.values()) == 1
        assert value(exporter, "torch_grad_clipped_steps_total") == 0
        assert errors(exporter) == {}


def test_a_graph_is_captured_during_scrapes() -> None:
    """A step is captured as a CUDA graph and replayed while another thread scrapes."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    inputs = torch.randn(5, 6)
    over = threading.Event()
    with start_exporter(model, port=None, every=1) as exporter:
        scraping = threading.Thread(target=lambda: [exporter.collect() for _ in iter(over.is_set, True)])
        scraping.start()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(4):
                    optimizer.zero_grad()
                    model(inputs).square().mean().backward()
                    optimizer.step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            optimizer.zero_grad()
            with torch.cuda.graph(graph):
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
            graph.replay()  # its capture computes nothing
            before = loss.item()
            for _ in range(50):
                graph.replay()
            assert loss.item() < before
        finally:
            over.set()
            scraping.join()
        assert errors(exporter) == {}


@contextlib.contextmanager
def one_rank(backend: str, folder: Path) -> Iterator[None]:
    """Make a process group of this process alone."""
    os.environ["LOCAL_RANK"] = "0"
    torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        del os.environ["LOCAL_RANK"]


def test_ddp_over_nccl(tmp_path: Path) -> None:
    """DDP on NCCL shows the reduced gradients."""
    with one_rank("nccl", tmp_path):
        model = Perceptron()
        wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=1)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
        record = Recorder(model, optimizer, dead_window=3, moments=True)
        with start_exporter(wrapped, port=None, **{**EVERYTHING, "weights": False}) as exporter:
            for step in range(6):
                optimizer.zero_grad()
                record.backward(wrapped(torch.randn(5, 6)).square().mean())
                record.step(optimizer)
                assert settled(exporter, step + 1)
                record.check(exporter)


@pytest.mark.parametrize("offload", [False, True])
def test_fsdp_with_offload(tmp_path: Path, offload: bool) -> None:
    """FSDP2 on the GPU or offloaded to the CPU shows the part of this rank."""
    with one_rank("cpu:gloo,cuda:nccl", tmp_path):
        model = Perceptron()
        policy = CPUOffloadPolicy() if offload else OffloadPolicy()
        for layer in (model.first, model.second, model):
            fully_shard(layer, offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with start_exporter(model, port=None, every=1) as exporter:
            for step in range(6):
                optimizer.zero_grad()
                model(torch.randn(5, 6)).square().mean().backward()
                expected = norm(wide(p.grad) for p in model.first.parameters())
                optimizer.step()
                assert settled(exporter, step + 1)
                shown = value(exporter, "torch_grad_shard_norm", layer="first") or value(exporter, "torch_grad_norm", layer="first")
                assert shown == pytest.approx(expected, rel=1e-5)
            assert errors(exporter) == {}


FAILING = """
import torch
from torch_grad_exporter import start_exporter

model = torch.nn.Linear(4, 2, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exporter = start_exporter(model, port=None, every=1)
for factor in (1.0, float("nan")):
    optimizer.zero_grad()
    (model(torch.ones(3, 4, device="cuda")).mean() * factor).backward()
    if factor == 1.0:
        optimizer.step()
try:
    torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")].sum().item()
except RuntimeError:
    exporter.close()
    for family in exporter.collect():
        if family.spec.name == "torch_grad_nonfinite_steps_total":
            print("nonfinite", sum(family.values))
"""


def test_the_last_sample_survives_a_device_assert() -> None:
    """What arrived before the device failed is counted, though every further call to CUDA raises."""
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert "nonfinite 1.0" in done.stdout, done.stdout + done.stderr


# Phases in the time of the GPU

CYCLES = {"forward": 10_000_000, "backward": 20_000_000, "optimizer": 40_000_000}
"""What the GPU is made to spin in each phase: some milliseconds, far more than everything else in it."""

ROUNDS = 12


class Spins(torch.autograd.Function):
    """The identity, whose backward spins."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - autograd's own
        return x.clone()

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - autograd's own
        spin(CYCLES["backward"])
        return gradients[0]


class Slow(Perceptron):
    """A model that keeps the GPU busy in its forward and backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spin(CYCLES["forward"])
        return Spins.apply(super().forward(x))  # type: ignore[no-any-return,no-untyped-call]


def slow() -> tuple[Slow, torch.optim.Optimizer]:
    """Return the model, and an optimizer with a slow step."""
    model = Slow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    optimizer.register_step_pre_hook(lambda *_: spin(CYCLES["optimizer"]))
    return model, optimizer


def shown(exporter: Exporter) -> dict[str, float]:
    """Return the seconds of each phase."""
    phases = ("outside", "data", "forward", "backward", "optimizer")
    return {phase: value(exporter, "torch_train_phase_seconds_total", phase=phase) or 0.0 for phase in phases}


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Train one step."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("every", [1, 1000])
def test_phases_are_those_of_the_gpu(every: int) -> None:
    """Time that the GPU spins in the forward, backward and step is in these phases, in its proportion, and nothing waits."""
    model, optimizer = slow()
    x = torch.randn(5, 6)
    with start_exporter(model, None, every=every, overhead_budget=0.9) as exporter:
        for _ in range(3):
            step(model, optimizer, x)  # libraries initialise themselves
        torch.cuda.synchronize()
        step(model, optimizer, x)
        before = shown(exporter)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with nothing_waits():
            for _ in range(ROUNDS):
                step(model, optimizer, x)
        end.record()
        torch.cuda.synchronize()
        for _ in range(ROUNDS):  # each reads some of the rounds before it
            step(model, optimizer, x)
            torch.cuda.synchronize()
        after = shown(exporter)
        found = {phase: after[phase] - before[phase] for phase in after}
        assert found["backward"] / found["forward"] == pytest.approx(2.0, rel=0.1)
        assert found["optimizer"] / found["forward"] == pytest.approx(4.0, rel=0.1)
        assert found["data"] == 0
        if every == 1:  # else most rounds are only counted, and in no phase
            assert sum(found[phase] for phase in CYCLES) >= begin.elapsed_time(end) / 1000
        assert value(exporter, "torch_grad_exporter_untimed_steps_total", what="phases") == 0
        assert errors(exporter) == {}
