"""Model, optimizer and random numbers are the same after `explain`."""

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.scrape import errors
from tests.support.torch_hooks import all_hooks
from torch_grad_exporter import explain, start_exporter


class Busy(nn.Module):
    """A model that changes all that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("cache", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.norm(self.linear(x)))
        self.mean = self.mean * 0.9 + h.detach().mean()
        self.cache = h.detach()
        return self.head(h)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return all that may differ, with the identities of what an optimizer and a graph refer to."""
    return {
        "values": copy.deepcopy(model.state_dict()),
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "trained": [p.requires_grad for p in model.parameters()],
        "training": [module.training for module in model.modules()],
        "identities": [id(one) for one in (*model.parameters(), *model.buffers())],
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "groups": [(id(group), id(group["params"])) for group in optimizer.param_groups],  # LBFGS refers to the list
        "tensors": [id(v) for held in optimizer.state.values() for v in held.values()],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()),  # noqa: NPY002 - the one that users seed
    }


def same(one: object, other: object) -> bool:
    """Return whether two states are the same, bit by bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def trained(steps: int = 2, **options: object) -> tuple[Busy, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """Return a model in the middle of a training, its optimizer and its step."""
    torch.manual_seed(0)
    model = Busy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), **options)

    def forward() -> torch.Tensor:
        return model(torch.randn(5, 4)).square().mean() * random.random() * np.random.rand()  # noqa: NPY002 - as users do

    for _ in range(steps):
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()
    return model, optimizer, forward


def whole(model: nn.Module, optimizer: torch.optim.Optimizer, forward: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Return a step that changes everything."""

    def step() -> None:
        optimizer.zero_grad()
        forward().backward()
        model.eval()
        model.head.requires_grad_(False)
        optimizer.step()
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.param_groups[0]["other"] = 1

    return step


@pytest.mark.parametrize(("kind", "steps", "given"), [("forward", 2, True), ("whole", 0, True), ("whole", 2, False)])
def test_a_step_leaves_nothing(kind: str, steps: int, given: bool) -> None:
    """Weights, buffers, gradients, modes, the optimizer and random numbers are as before, bit by bit."""
    model, optimizer, forward = trained(steps)
    step = forward if kind == "forward" else whole(model, optimizer, forward)
    hooks, before = all_hooks(model, optimizer), state(model, optimizer)
    found = explain(step, model, optimizer if given else ())
    after = state(model, optimizer)
    assert all_hooks(model, optimizer) == hooks
    assert {key for key in before if not same(before[key], after[key])} == set()
    assert {str(row.verdict) for row in found.rows} == {"ok"}


def test_the_training_continues_with_the_same_bits() -> None:
    """Steps with an `explain` between every two, beside an exporter, end in the same bits as steps without."""

    def run(*, watched: bool) -> dict[str, torch.Tensor]:
        model, optimizer, forward = trained(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - the one that users seed
        step = whole(model, optimizer, forward)
        with start_exporter(model, port=None, every=1) as exporter:
            for _ in range(6):
                if watched:
                    explain(step, model, optimizer)
                    explain(forward, model)
                optimizer.zero_grad()
                forward().backward()
                optimizer.step()
            assert errors(exporter) == {}
        return model.state_dict()

    assert same(run(watched=False), run(watched=True))


def test_an_exception_of_the_function_passes() -> None:
    """The user's exception arrives from the middle of a step, and the state is that before it."""
    model, optimizer, forward = trained()

    def step() -> None:
        whole(model, optimizer, forward)()
        raise LookupError("mine")

    before = state(model, optimizer)
    with pytest.raises(LookupError, match="mine"):
        explain(step, model, optimizer)
    assert same(before, state(model, optimizer))
    assert all_hooks(model, optimizer) == []


def test_an_optimizer_within_the_backward_is_restored() -> None:
    """Hooks that step within the backward leave no trace, also with a reentrant checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = copy.deepcopy(model.state_dict())

    def step() -> torch.Tensor:
        x = torch.ones(2, 3, requires_grad=True)
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).sum()

    found = explain(step, model)
    assert {str(row.verdict) for row in found.rows} == {"ok"}
    assert same(before, dict(model.state_dict()))
    assert not any(optimizer.state for optimizer in optimizers.values())
    assert all(parameter.grad is None for parameter in model.parameters())
