"""Ray Train: an exporter in each of two workers of a real local cluster, next to a float64 record of the same gradients."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["RAY_TRAIN_V2_ENABLED"] = "1"

import pytest
import ray
import ray.cloudpickle
import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch.nn.functional import mse_loss

from torch_grad_exporter.integrations.ray import report, start_exporter

STEPS = 5


def batch(step: int, rank: int) -> torch.Tensor:
    """The inputs of a rank, which are their own targets."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def network() -> torch.nn.Sequential:
    """Two layers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))


def norms(model: torch.nn.Module, step: int, ranks: int) -> dict[str, float]:
    """Of the mean gradient over all ranks, in float64."""
    copy = network().double()
    copy.load_state_dict({name.removeprefix("module."): tensor.double() for name, tensor in model.state_dict().items()})
    for rank in range(ranks):
        inputs = batch(step, rank).double()
        (mse_loss(copy(inputs), inputs) / ranks).backward()
    found = {"torch_grad_global_norm": 0.0}
    for name, parameter in copy.named_parameters():
        assert parameter.grad is not None
        square = float(parameter.grad.square().sum())
        found["torch_grad_global_norm"] += square
        layer = f"torch_grad_norm/{name.partition('.')[0]}"
        found[layer] = found.get(layer, 0.0) + square
    return {name: square**0.5 for name, square in found.items()}


def trained(model: torch.nn.Module, exporter: Any, told: dict[str, Any]) -> None:
    """Trains; what the exporter shows after each step is kept next to the record."""
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        right = norms(model, step, ranks)
        inputs = batch(step, rank)
        loss = mse_loss(model(inputs), inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if exporter is not None:
            exporter.observe(loss=loss)
            told.setdefault("steps", []).append(
                [exporter.values("^torch_(grad_(global_)?norm(/|$)|train_loss|train_steps)"), right]
            )
            with tempfile.TemporaryDirectory() as folder:  # Ray keeps what is reported with a checkpoint
                kept = ray.train.Checkpoint.from_directory(folder) if step == STEPS - 1 and rank == 0 else None
                report({"loss": loss.item(), **exporter.values("^torch_grad_global_norm$")}, checkpoint=kept)
            assert exporter.values("^torch_train_value/") == {"torch_train_value/loss": loss.item()}
    told.setdefault("states", []).append([tensor.tolist() for tensor in model.state_dict().values()])


def train_func(config: dict[str, Any]) -> None:
    """In a worker: trains without an exporter and with one, then fails in the training of another model."""
    torch.set_num_threads(1)
    context = ray.train.get_context()
    told: dict[str, Any] = {"context": [context.get_world_rank(), context.get_local_rank()]}
    trained(ray.train.torch.prepare_model(network()), None, told)
    model = ray.train.torch.prepare_model(network())
    with start_exporter(model, config["port"], every=1, addr="127.0.0.1") as exporter:
        told |= {"run": exporter.run, "rank": exporter.rank, "port": exporter.port}
        trained(model, exporter, told)
        told["errors"] = sum(exporter.values("^torch_grad_exporter_errors_total").values())
    own = start_exporter(network(), None, run="mine")
    told["own"] = own.run
    try:
        with own:
            raise KeyError("broken")  # noqa: TRY301 - what a training function does
    except KeyError:
        path = Path(config["folder"], f"{exporter.rank}.saved.json")
        own.save(path)
        told["ended"] = json.loads(path.read_text())["status"]
    Path(config["folder"], f"{exporter.rank}.json").write_text(json.dumps(told))


def free_ports() -> int:
    """Return the first of two free ports in a row, below those that Ray's own connections are given."""
    for port in range(21_000 + os.getpid() % 5_000 * 2, 32_000, 2):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
            return port
    pytest.fail("no two ports in a row are free")


class Job:
    """One training by two workers: its result, and what each of them has told."""

    def __init__(self, folder: Path) -> None:
        self.port = free_ports()
        self.result = TorchTrainer(
            train_func,
            train_loop_config={"folder": str(folder), "port": self.port},
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(name="experiment", storage_path=str(folder / "ray")),
        ).fit()
        self.told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A cluster on this host, for one training."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        yield Job(tmp_path_factory.mktemp("ray"))
    finally:
        ray.shutdown()


def test_names(job: Job) -> None:
    """Run, rank and port follow from Ray's context; options of the script win."""
    for rank, told in enumerate(job.told):
        assert told["context"] == [rank, rank]
        assert (told["run"], told["rank"], told["port"]) == ("experiment", rank, job.port + rank)
        assert told["own"] == "mine"


def test_numbers(job: Job) -> None:
    """Norms are those of the gradients of both workers together; training is the same to the last bit."""
    for rank, told in enumerate(job.told):
        for number, (shown, right) in enumerate(told["steps"], 1):
            expected = right if rank == 0 else {"torch_grad_global_norm": right["torch_grad_global_norm"]}  # layers once a job
            assert {name: shown[name] for name in expected} == pytest.approx(expected, rel=1e-5)
            assert shown["torch_train_steps_total/AdamW"] == number
        assert len(told["steps"]) == STEPS
        assert told["states"][0] == told["states"][1]
        assert told["errors"] == 0


def test_values_are_reported(job: Job) -> None:
    """`ray.train.report` takes what `values()` gives."""
    assert job.result.metrics is not None
    last = job.told[0]["steps"][-1][0]
    assert job.result.metrics["torch_grad_global_norm"] == last["torch_grad_global_norm"]
    assert job.result.metrics["loss"] == pytest.approx(last["torch_train_loss"])


def test_failures(job: Job) -> None:
    """An exception within the `with` is what has ended the run."""
    for told in job.told:
        assert (told["ended"]["state"], told["ended"]["ended_by"]) == ("failed", "KeyError")


def test_outside_of_a_training_function() -> None:
    """Says where to call it."""
    with pytest.raises(RuntimeError, match="outside of a training function of Ray Train; call it in train_func"):
        start_exporter(torch.nn.Linear(1, 1))
