"""The scrapes of a real job of two ranks, recorded for `benchmarks.fleet`, which shows them as those of a thousand.

Under DDP rank 0 is recorded for itself and rank 1 for all the others. Under FSDP2 every rank shows its part of each layer's
gradient, so rank 0 stands for all. Between two scrapes the job trains on, so that all that changes in a scrape does change.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks import record
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

RUN = "fleet"
PLACE = "@RANK@"
"""The rank in what is recorded; the server puts a rank there."""

WARM_UP = 25
"""Steps before the first scrape: from 20 samples on, z-scores and dead ratios are there as well."""

STEPS_BETWEEN = 2
WIDTH = 16
LATE_SECONDS = 5.0
DEADLINE = 300.0
"""Seconds after which a job that is not done is ended."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Scrapes in OpenMetrics, the oldest first, and the series that each family has in the last one."""

    bodies: tuple[bytes, ...]
    series: dict[str, int]

    @property
    def total(self) -> int:
        """The series of a scrape."""
        return sum(self.series.values())


class Model(torch.nn.Module):
    """This many small layers; each adds to what it gets, so that every gradient is an ordinary number."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The sum of what all layers add."""
        found = inputs
        for block in self.blocks:
            found = found + block(found).tanh() / len(self.blocks)
        return found


def recordings(layers: int, scrapes: int, *, sharded: bool) -> tuple[Recording, Recording]:
    """What rank 0 and what each other rank shows, from a job of two processes. Raises RuntimeError if the job fails."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [folder, str(layers), str(scrapes), *(["--sharded"] if sharded else [])]
        command = [sys.executable, "-m", "benchmarks.fleet_job", *arguments]
        ranks = [subprocess.Popen(command, cwd=record.ROOT, env=_environment(rank)) for rank in range(2)]  # noqa: S603 - ourselves
        try:
            failed = [status for rank in ranks if (status := rank.wait(DEADLINE))]
        finally:
            for rank in ranks:
                rank.kill()
        if failed:
            raise RuntimeError(f"the recorded job failed with status {failed}")
        first, other = (_read(Path(folder, str(rank))) for rank in range(2))
    return first, first if sharded else other


def _environment(rank: int) -> dict[str, str]:
    named = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
    return {**os.environ, **{name: str(value) for name, value in named.items()}}


def _read(folder: Path) -> Recording:
    bodies = [(folder / str(number)).read_bytes() for number in range(len(list(folder.glob("[0-9]*"))))]
    return Recording(tuple(bodies), json.loads((folder / "series").read_text(encoding="utf-8")))


def train(folder: Path, layers: int, scrapes: int, *, sharded: bool) -> None:
    """One rank of the job: trains, and writes each scrape down."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Model(layers)
    if sharded:
        fully_shard(model)  # of the model itself
    watched = model if sharded else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(watched.parameters())
    place = folder / str(rank)
    place.mkdir()
    with start_exporter(watched, port=None, every=1, run=RUN, max_layers=max(layers, 1)) as exporter:
        for step in range(WARM_UP):
            _step(watched, optimizer, exporter, step)
        _wait_for(exporter, "torch_host_cpu_ratio")
        for number in range(scrapes):
            for step in range(STEPS_BETWEEN):
                _step(watched, optimizer, exporter, WARM_UP + STEPS_BETWEEN * number + step)
            families = exporter.collect()
            (place / str(number)).write_bytes(Renderer({"run": RUN, "rank": PLACE}).render(families, Format.OPENMETRICS))
    series = {family.spec.name: 0 for family in families}
    for family in families:
        series[family.spec.name] += family.series
    (place / "series").write_text(json.dumps(series), encoding="utf-8")
    dist.destroy_process_group()


def _wait_for(exporter: Exporter, late: str) -> None:
    """Waits for the value that comes last: it is over the time between two scrapes. Where there is none, not for long."""
    give_up_at = time.monotonic() + LATE_SECONDS
    while time.monotonic() < give_up_at:
        if any(family.series for family in exporter.collect() if family.spec.name == late):
            return
        time.sleep(0.1)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, exporter: Exporter, number: int) -> None:
    """A step as loops have it: clipped, observed; on other data each time and on each rank."""
    chance = torch.Generator().manual_seed(2 * number + dist.get_rank())
    inputs = torch.randn(8, WIDTH, generator=chance)
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    exporter.observe(loss=loss, tokens=8, grad_norm=norm.full_tensor() if isinstance(norm, DTensor) else norm)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one rank, as which one the environment says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_job", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("layers", type=int)
    parser.add_argument("scrapes", type=int)
    parser.add_argument("--sharded", action="store_true", help="FSDP2 instead of DDP")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("torch_grad_exporter").setLevel(logging.ERROR)
    train(chosen.folder, chosen.layers, chosen.scrapes, sharded=chosen.sharded)


if __name__ == "__main__":
    main()
