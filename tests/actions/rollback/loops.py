"""Training loops that go back to a copy, and the same loops restarted from that step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.scrape import value
from tests.support.tools import eventually
from torch_grad_exporter import Exporter
from torch_grad_exporter.actions import Rollback

DONE, GOOD, BACK = "torch_train_rollbacks_total", "torch_train_rollback_good_step", "torch_train_rollback_step"
KINDS = ("adamw", "amsgrad", "fused", "scheduled", "groups", "lbfgs", "scaler", "two", "two scaled")


class Net(nn.Module):
    """A small net with a buffer that each forward changes, one that it replaces, and one whose elements share their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("ones", torch.ones(1, 4).expand(3, 4), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs, which depend on all buffers."""
        self.seen = self.seen + 1
        result: torch.Tensor = self.second(self.norm(self.first(inputs * self.ones)).tanh()) + 0.01 * self.seen
        return result


class Counting(torch.optim.SGD):
    """SGD that keeps a number in its group, as optimizers without a schedule do, and divides the learning rate by it."""

    def __init__(self, parameters: Any) -> None:  # noqa: ANN401 - as `SGD`
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["k"] = 0

    def step(self, closure: Any = None) -> None:  # noqa: ANN401 - as `SGD`
        """Step with a smaller learning rate each time."""
        self.param_groups[0]["k"] += 1
        self.param_groups[0]["lr"] = 0.1 / self.param_groups[0]["k"]
        super().step(closure)


def made(kind: str, net: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a kind of loop."""
    if kind == "lbfgs":
        return [torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2, history_size=3)]
    if kind == "groups":
        return [Counting(net.parameters())]
    if kind.startswith("two"):
        halves = [*net.parameters()][::2], [*net.parameters()][1::2]
        return [torch.optim.AdamW(half, lr=0.01) for half in halves]
    return [torch.optim.AdamW(net.parameters(), lr=0.01, amsgrad=kind == "amsgrad", fused=kind == "fused")]


class Loop:
    """A loop of a kind, on seeded batches by their number; `wrap` makes the module that is called."""

    def __init__(self, kind: str = "adamw", wrap: Callable[[Net], nn.Module] = lambda net: net) -> None:
        torch.manual_seed(0)
        self.kind, self.wrap, self.net = kind, wrap, wrap(Net())
        self.optimizers = made(kind, self.net)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=7, enabled=kind in ("scaler", "two scaled"))

    def step(self, number: int, rank: int = 0, *, only_first: bool = False) -> None:
        """Train on the batch of this number. `only_first`: the second optimizer does not step."""
        batch = torch.randn(3, 4, generator=torch.Generator("cpu").manual_seed(2 * number + rank), device="cpu")
        batch = batch.to(next(self.net.parameters()).device, non_blocking=True)

        def backward() -> torch.Tensor:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = self.net(batch).square().mean()
            self.scaler.scale(loss).backward()
            return loss

        if self.kind == "lbfgs":
            self.optimizers[0].step(backward)
            return
        backward()
        if self.kind == "scheduled":
            self.optimizers[0].param_groups[0]["lr"] = 0.01 / number  # of the data's step
        for optimizer in self.optimizers[: 1 if only_first else None]:
            self.scaler.step(optimizer)
        self.scaler.update()

    def kept(self) -> list[Any]:
        """Return what a checkpoint would hold."""
        return copy.deepcopy([
            self.net.state_dict(),
            [optimizer.state_dict() for optimizer in self.optimizers],
            self.scaler.state_dict(),
        ])  # fmt: skip

    def resumed(self, kept: list[Any]) -> Loop:
        """Return a new loop that goes on from there."""
        loop = Loop(self.kind, self.wrap)
        net, optimizers, scaler = copy.deepcopy(kept)
        loop.net.load_state_dict(net)
        for optimizer, saved in zip(loop.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(saved)
        loop.scaler.load_state_dict(scaler)
        return loop


def went_back(exporter: Exporter, loop: Loop, rollback: Rollback, rank: int = 0, pause: Callable[[], object] = lambda: None) -> int:
    """Train until a copy is good, then let the training go back; return the number of the last batch."""
    number, wanted = 0, False

    def done() -> bool:
        nonlocal number, wanted
        number += 1
        loop.step(number, rank)
        pause()
        wanted = wanted or (rank == 0 and value(exporter, GOOD) is not None)
        return value(exporter, DONE, reason="condition") == 1

    exporter.on(lambda m: wanted, rollback)
    assert eventually(done)
    return number


def flat(kept: Any) -> list[Any]:  # noqa: ANN401 - a tree
    """Return the leaves of a checkpoint, tensors as lists of their numbers; of a sharded one, those of this rank."""
    if isinstance(kept, dict):
        return [leaf for key in kept for leaf in (key, *flat(kept[key]))]
    if isinstance(kept, list | tuple):
        return [leaf for each in kept for leaf in flat(each)]
    if isinstance(kept, DTensor):
        kept = kept.to_local()
    return [kept.tolist()] if isinstance(kept, torch.Tensor) else [kept]
