"""DeepSpeed on the CPU: engines of each stage in one process and in two, next to float64 records of the same gradients."""

from __future__ import annotations

import csv
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from tests.support.pages import blocks
from tests.support.ranks import run_ranks
from tests.support.scrape import errors, value, values
from tests.support.servers import free_port
from tests.support.tools import REPOSITORY
from torch_grad_exporter import start_exporter
from torch_grad_exporter.integrations.deepspeed import watch_engine
from torch_grad_exporter.integrations.session import running_exporter

ROUND = 2
"""Batches of a step."""

LIMIT = 0.05
"""Of the global norm. All steps are above it."""

BROKEN = 3
"""The step whose loss is infinite, where one is."""


def network() -> torch.nn.Sequential:
    """Return two layers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))


def batch(number: int, rank: int = 0) -> torch.Tensor:
    """Return the inputs of a rank, which are their own targets."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + rank))


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """Join a process group of one for all tests of a file."""
    before = dict(os.environ)
    joined(0, 1, free_port())
    yield
    dist.destroy_process_group()
    importlib.reload(deepspeed.utils.groups)  # DeepSpeed would go on with the group that is gone
    deepspeed.comm.comm.cdb = None
    os.environ.clear()
    os.environ.update(before)


def joined(rank: int, ranks: int, port: int) -> None:
    """Join a process group as this rank."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # would be compiled first, for a minute; without it there is gloo
    )
    at = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in at.items()})
    deepspeed.init_distributed("gloo", verbose=False)


def engine_of(model: torch.nn.Module, stage: int, *, bf16: bool = False, **more: Any) -> Any:
    """Return an engine with the script's own optimizer."""
    configuration = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": ROUND, "steps_per_print": None,
        "zero_optimization": {"stage": stage}, "gradient_clipping": LIMIT, "bf16": {"enabled": bf16},
        "zero_force_ds_cpu_optimizer": False, **more,
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.05), config=configuration)[0]


def gradients(model: torch.nn.Module, numbers: list[int], ranks: int = 1) -> dict[str, torch.Tensor]:
    """Return the float64 gradients of a round: the mean over its batches and over the ranks."""
    copy = network().double()
    copy.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    for number in numbers:
        for rank in range(ranks):
            inputs = batch(number, rank).double()
            (mse_loss(copy(inputs), inputs) / len(numbers) / ranks).backward()
    return {name: parameter.grad for name, parameter in copy.named_parameters() if parameter.grad is not None}


def norm(tensors: Any) -> float:
    """Return the L2 norm."""
    return float(sum(tensor.square().sum() for tensor in tensors) ** 0.5)


def layer(found: dict[str, torch.Tensor], name: str) -> float:
    """Return the norm of a layer."""
    return norm([tensor for parameter, tensor in found.items() if parameter.startswith(f"{name}.")])


def train(engine: Any, look: Any = None, *, steps: int = 6, broken: bool = False, rank: int = 0, ranks: int = 1) -> list[float]:
    """Train and return the losses; `look` gets each step's number, losses and float64 gradients."""
    told: list[float] = []
    kind = next(engine.module.parameters()).dtype
    for step in range(1, steps + 1):
        numbers = [ROUND * step + one for one in range(ROUND)]
        right = gradients(engine.module, numbers, ranks) if look is not None else {}
        for number in numbers:
            inputs = batch(number, rank).to(kind)
            loss = mse_loss(engine(inputs), inputs)
            engine.backward(loss * torch.inf if broken and step == BROKEN else loss)
            engine.step()
            told.append(loss.item())
        if look is not None:
            look(step, told[-ROUND:], right)
    return told


def state(engine: Any) -> list[torch.Tensor]:
    """Return copies of the model's tensors."""
    return [tensor.clone() for tensor in engine.module.state_dict().values()]


@pytest.mark.parametrize("stage", [0, 1])
def test_engines_with_layers(stage: int) -> None:
    """Without ZeRO and at stage 1 layers, norm, steps and loss are right, and training ends in the same bits."""
    plain = engine_of(network(), stage)
    losses, expected = train(plain), state(plain)

    def look(step: int, losses: list[float], right: dict[str, torch.Tensor]) -> None:
        assert value(exporter, "torch_grad_norm", layer="0") == pytest.approx(layer(right, "0"), rel=1e-5)
        assert value(exporter, "torch_grad_norm", layer="2") == pytest.approx(layer(right, "2"), rel=1e-5)
        assert value(exporter, "torch_grad_global_norm") == pytest.approx(norm(right.values()), rel=1e-5)
        if stage == 0:
            coefficient = value(exporter, "torch_grad_clip_coefficient")  # known once several steps were clipped alike
            assert (
                coefficient == pytest.approx(LIMIT / norm(right.values()), rel=1e-5)
                if step > 4
                else coefficient is None or step > 1
            )
            assert value(exporter, "torch_train_learning_rate", optimizer="AdamW", group="0") == 0.05
        assert value(exporter, "torch_train_loss") == pytest.approx(sum(losses) / ROUND, rel=1e-6)
        assert value(exporter, "torch_grad_sample_step") == step
        assert value(exporter, "torch_train_samples_total") == 4 * ROUND * step

    engine = engine_of(network(), stage)
    with watch_engine(engine, port=None, every=1) as exporter:
        assert train(engine, look) == losses
        assert value(exporter, "torch_train_backward_passes_total") == 6 * ROUND
        assert errors(exporter) == {}
    assert "step" not in engine.__dict__
    assert all(map(torch.equal, state(engine), expected))


@pytest.mark.parametrize(("stage", "bf16"), [(1, True), (2, False), (2, True)])
def test_engines_without_layers(stage: int, bf16: bool, caplog: pytest.LogCaptureFixture) -> None:
    """At stage 2 or in bfloat16 the engine's norm and exact step counts are shown, and no layer, which is logged."""
    plain = engine_of(network(), stage, bf16=bf16)
    expected, rel = (train(plain, broken=True), state(plain)), 0.02 if bf16 else 1e-5

    def look(step: int, losses: list[float], right: dict[str, torch.Tensor]) -> None:
        if step != BROKEN:
            assert value(exporter, "torch_grad_global_norm") == pytest.approx(norm(right.values()), rel=rel)
        assert value(exporter, "torch_train_steps_total", optimizer="manual") == step - (step >= BROKEN)
        assert value(exporter, "torch_train_skipped_steps_total") == (step >= BROKEN)
        if step != BROKEN:
            assert value(exporter, "torch_train_loss") == pytest.approx(sum(losses) / ROUND, rel=1e-6)

    engine = engine_of(network(), stage, bf16=bf16)
    with caplog.at_level("INFO", "torch_grad_exporter"), watch_engine(engine, port=None, every=1) as exporter:
        assert train(engine, look, broken=True) == expected[0]
        shown = {name for name, _ in values(exporter)}
        assert not shown & {"torch_grad_norm", "torch_grad_norm_squared", "torch_grad_zero_ratio"}
        assert value(exporter, "torch_grad_norm_distribution_count", layer="0") == 0
        assert "torch_grad_exporter_sampling_interval_steps" not in shown
        assert value(exporter, "torch_train_samples_total") == 6 * 4 * ROUND
        assert errors(exporter) == {}
    assert caplog.text.count("layers are not shown") == 1
    assert all(map(torch.equal, state(engine), expected[1]))


def in_two(rank: int, stage: int, port: int) -> None:
    """Compare a rank of two with the mean over both."""
    joined(rank, 2, port)
    engine = engine_of(network(), stage)

    def look(step: int, losses: list[float], right: dict[str, torch.Tensor]) -> None:
        shown = value(exporter, "torch_grad_global_norm")
        assert shown == pytest.approx(norm(right.values()), rel=1e-5) if stage > 0 else shown is None
        assert value(exporter, "torch_grad_norm", layer="0") is None
        steps = value(exporter, "torch_train_steps_total", optimizer="manual" if stage > 0 else "AdamW")
        assert steps == value(exporter, "torch_train_backward_passes_total") / ROUND == step

    with watch_engine(engine, port=None, every=1) as exporter:
        train(engine, look, rank=rank, ranks=2)
        assert errors(exporter) == {}
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_processes(stage: int) -> None:
    """With two ranks the norm is that of both together, and absent without ZeRO."""
    run_ranks(in_two, stage, free_port())


def test_the_users_exporter_and_a_resume(caplog: pytest.LogCaptureFixture) -> None:
    """Step numbers continue after a checkpoint; a second watch is logged; the user's exporter continues."""
    engine = engine_of(network(), 2)
    engine.global_steps = 10  # as load_checkpoint leaves it
    with start_exporter(engine.module, port=None) as exporter:
        assert watch_engine(engine) is exporter
        assert watch_engine(engine, exporter) is exporter
        assert "remove one of them" in caplog.text
        train(engine, steps=2)
        assert value(exporter, "torch_train_steps_total", optimizer="manual") == 2
        assert engine.global_steps == 12


def test_a_failing_engine() -> None:
    """A failure of the engine's methods is counted, and training continues."""
    engine = engine_of(network(), 2)

    def broken() -> float:
        raise ZeroDivisionError

    with watch_engine(engine, port=None) as exporter:
        engine.get_global_grad_norm = broken
        train(engine, steps=3)
        assert errors(exporter) == {"integration": 3}
    assert engine.global_steps == 3


@pytest.mark.parametrize("log", [True, "global_norm$"])
def test_the_engines_monitor(log: bool | str, tmp_path: Path) -> None:
    """With `log` the engine's monitor gets the values at its interval."""
    engine = engine_of(
        network(), 2, steps_per_print=2, csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    )
    norms: list[float] = []
    with watch_engine(engine, port=None, every=1, log=log) as exporter:
        train(engine, lambda *_: norms.append(float(engine.get_global_grad_norm())), steps=5)
        assert errors(exporter) == {}
    rows = list(csv.reader((tmp_path / "job" / "torch_grad_global_norm.csv").open()))
    assert rows[0] == ["step", "torch_grad_global_norm"]
    assert [int(row[0]) for row in rows[1:]] == [4 * ROUND * 2, 4 * ROUND * 4]
    assert [float(row[1]) for row in rows[1:]] == pytest.approx([norms[1], norms[3]], rel=1e-5)
    found = {path.stem for path in (tmp_path / "job").iterdir() if path.stem.startswith("torch_")}
    assert ("torch_train_skipped_steps_total" in found) == (log is True)


def test_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of DeepSpeed runs."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    engine, names = engine_of(network(), 1), {"loss_function": mse_loss, "loader": [batch(number) for number in range(8)]}
    exec(blocks(REPOSITORY / "docs" / "frameworks.md", "python", section="DeepSpeed")[0], names | {"engine": engine})  # noqa: S102 - what a user copies
    assert engine.global_steps == 4
    assert running_exporter(engine) is None


def test_wrong_arguments_raise() -> None:
    """A wrong engine or option raises."""
    with pytest.raises(TypeError, match=r"expected the engine that deepspeed.initialize returned"):
        watch_engine(network())
    with pytest.raises(TypeError, match=r"watch_engine\(prot=...\)"):
        watch_engine(engine_of(network(), 0), prot=9100)
