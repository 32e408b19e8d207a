"""FSDP2: a small language model whose parameters are sharded over several processes; the whole norm is observed.

torchrun --nproc-per-node=2 examples/fsdp2.py --sd-dir /tmp/ranks
torchrun --nproc-per-node=2 examples/fsdp2.py --sd-dir /tmp/ranks --slow-rank 1 --seconds 0.05
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_grad_exporter import start_exporter

CONTEXT, WIDTH, BATCH = 32, 256, 64


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Train on the source of Python's standard library.")
    parser.add_argument("--sd-dir", default="ranks", help="the folder that Prometheus watches (default: ranks)")
    parser.add_argument("--steps", type=int, default=1000, help="(default: 1000)")
    parser.add_argument("--slow-rank", type=int, metavar="RANK", help="a rank whose data comes late")
    parser.add_argument("--seconds", type=float, default=0.05, help="by which it comes late, each time (default: 0.05)")
    return parser.parse_args()


def read_corpus() -> Tensor:
    """The bytes of the standard library's modules, as uint8."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(module.read_bytes() for module in modules)), dtype=torch.uint8)


def build() -> nn.Module:
    """Predicts a byte of text from those before it: from int64 (batch, CONTEXT) to logits (batch, 256)."""
    return nn.Sequential(
        nn.Embedding(256, WIDTH // 8), nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH // 8, WIDTH), nn.GELU(),
        nn.Linear(WIDTH, WIDTH), nn.GELU(),
        nn.Linear(WIDTH, 256),
    )  # fmt: skip


def batches(corpus: Tensor, rank: int, chosen: argparse.Namespace) -> Iterator[Tensor]:
    """Excerpts, others on each rank: int64 of shape (BATCH, CONTEXT + 1)."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(chosen.steps):
        if rank == chosen.slow_rank:
            time.sleep(chosen.seconds)
        starts = torch.randint(len(corpus) - CONTEXT, (BATCH, 1), generator=generator)
        yield corpus[starts + torch.arange(CONTEXT + 1)].long()


def main() -> None:
    """One rank, from its start to its end."""
    chosen = options()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")

    torch.manual_seed(0)  # the same on all ranks: fully_shard takes a part of what each of them has
    model = build().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    # On every rank alike. Prometheus finds all of them in the folder, and their files are gone when the run has ended.
    with start_exporter(model, sd_dir=chosen.sd_dir) as exporter:
        print(f"rank {dist.get_rank()}: {exporter.url}", flush=True)
        for text in exporter.watch_loader(batches(read_corpus(), dist.get_rank(), chosen)):
            excerpt = text.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(excerpt[:, :-1]), excerpt[:, -1])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            # No rank alone knows the norm of all parts; clipping has just computed it.
            exporter.observe(loss=loss, samples=len(excerpt), grad_norm=norm.full_tensor())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
