"""Steps with planted reasons for a gradient that is missing, each with the verdicts and the place to find.

A step returns its loss. The cut is the line that ends in `# cut`, or the line of an operation of `BETWEEN`.
"""

# ruff: noqa: D103 - the name of a case says what is planted.

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Operation = Callable[[torch.Tensor], torch.Tensor]
Step = Callable[[], Any]


@dataclasses.dataclass
class Planted:
    """A planted case: `expected` has verdicts by the begin of parameters' names, all others are `ok`.

    `module`: where the cut is reported, `note`: a part of the notes of the parameters that are not `ok`, `line`: of the cut.
    """

    step: Step
    model: nn.Module
    expected: Mapping[str, str]
    module: str | None = None
    note: str = ""
    optimizers: Any = ()
    line: int | None = None


CASES: dict[str, Callable[[], Planted]] = {}


def case(make: Callable[[], Planted]) -> Callable[[], Planted]:
    """Add a case under the function's name."""
    lines, first = inspect.getsourcelines(make)
    marked = next((first + number for number, line in enumerate(lines) if line.rstrip().endswith("# cut")), None)
    CASES[make.__name__] = lambda: dataclasses.replace(make(), line=marked)
    return make


class Two(nn.Module):
    """An encoder and a head with an operation between them."""

    def __init__(self, between: Operation = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head, self.between = nn.Linear(4, 6), nn.Linear(6, 3), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.encoder(x)))


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0, 1])


def classified(model: nn.Module) -> Step:
    """Return a step by cross entropy."""
    return lambda: F.cross_entropy(model(X), Y)


Context = torch.autograd.function.FunctionCtx


class Silent(torch.autograd.Function):
    """An autograd function whose backward returns nothing."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> None:
        return None


Normal = functools.partial(torch.distributions.Normal, validate_args=False)

BETWEEN: dict[str, tuple[Operation, str, str]] = {
    "detach": (lambda h: h.detach(), "detached_at", ".detach()"),
    "data": (lambda h: h.data, "detached_at", ".data"),
    "numpy": (lambda h: torch.from_numpy(h.detach().numpy()), "unknown", "its value left PyTorch"),
    "sampled_from_a_distribution": (lambda h: Normal(h, 1.0).sample(), "detached_at", "torch.no_grad()"),
    "comparison": (lambda h: (h > 0).float(), "non_differentiable", "gt"),
    "cast_to_integers": (lambda h: h.long().float(), "non_differentiable", "long"),
    "rounded": (torch.round, "non_differentiable", "round"),
    "looked_up_by_argmax": (lambda h: F.one_hot(h.argmax(1), 6).float(), "non_differentiable", "argmax"),
    "written_into_a_buffer": (lambda h: torch.zeros(5, 6).index_add(0, torch.arange(5), h.detach()), "detached_at", ".detach()"),
    "function_without_a_gradient": (Silent.apply, "non_differentiable", "Silent"),
    "all_well": (torch.relu, "ok", ""),
}


def between(operation: Operation, verdict: str, note: str) -> Planted:
    """Make a case whose encoder is cut off by an operation before the head."""
    model = Two(operation)
    line = operation.__code__.co_firstlineno if isinstance(operation, types.FunctionType) else None
    return Planted(classified(model), model, {"encoder": verdict}, "Two", note, line=line)


CASES.update({name: functools.partial(between, *row) for name, row in BETWEEN.items()})


@case
def inference_mode() -> Planted:
    model = Two()

    def step() -> torch.Tensor:
        with torch.inference_mode():
            h = model.encoder(X)  # cut
        return F.cross_entropy(model.head(h.clone()), Y)

    return Planted(step, model, {"encoder": "detached_at"}, "encoder", "torch.inference_mode()")


@case
def loss_made_from_a_number() -> Planted:
    model = Two()

    def step() -> torch.Tensor:
        number = F.cross_entropy(model(X), Y).item()  # cut
        return torch.tensor(number, requires_grad=True)

    return Planted(step, model, {"": "detached_at"}, "", ".item()")


@case
def penalty_without_create_graph() -> Planted:
    model = nn.ModuleDict({"critic": nn.Linear(4, 1), "other": nn.Linear(4, 1)})

    def step() -> torch.Tensor:
        x = X.clone().requires_grad_()
        out = model["critic"](x).exp().sum()
        (gradient,) = torch.autograd.grad(out, x)  # cut
        return gradient.norm() + model["other"](X).sum()

    return Planted(step, model, {"critic": "detached_at"}, "", "create_graph")


@case
def unused_head() -> Planted:
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 3), "spare": nn.Linear(4, 3)})
    expected = {"spare": "not_in_graph"}
    return Planted(lambda: F.cross_entropy(model["head"](model["body"](X)), Y), model, expected, None, "not used")


@case
def head_whose_output_is_dropped() -> Planted:
    model = nn.ModuleDict({"head": nn.Linear(4, 3), "aux": nn.Linear(4, 3)})

    def step() -> torch.Tensor:
        model["aux"](X)  # cut
        return F.cross_entropy(model["head"](X), Y)

    return Planted(step, model, {"aux": "not_in_graph"}, "aux", "used here")


@case
def head_that_is_only_logged() -> Planted:
    model = nn.ModuleDict({"head": nn.Linear(4, 3), "aux": nn.Linear(4, 1)})

    def step() -> torch.Tensor:
        logging.getLogger("training").debug("%f", model["aux"](X).mean().item())  # cut
        return F.cross_entropy(model["head"](X), Y)

    return Planted(step, model, {"aux": "unknown"}, "", "cannot be seen")


@case
def frozen_body() -> Planted:
    model = Two()
    model.encoder.requires_grad_(False)
    return Planted(classified(model), model, {"encoder": "frozen"})


@case
def two_optimizers_forget_the_head() -> Planted:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    optimizers = {"a": torch.optim.SGD(model[0].parameters(), 0.1), "b": torch.optim.Adam(model[1].parameters())}
    return Planted(classified(model), model, {"2.": "optimizer_missing"}, None, "no optimizer", optimizers)


class Checkpointed(nn.Module):
    """A model whose inner part is computed twice."""

    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor], *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.head, self.reentrant = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 3), reentrant
        self.side, self.after = nn.Linear(4, 6), after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return self.head(checkpoint(lambda v: self.inner(v) + self.after(self.side(v)), x, use_reentrant=self.reentrant))


@case
def detached_in_a_checkpoint() -> Planted:
    model = Checkpointed(lambda h: h.detach(), reentrant=False)  # cut
    return Planted(classified(model), model, {"side": "detached_at"}, "Checkpointed", ".detach()")


HEALTHY: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "embedding_of_integers": lambda: (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)), Y),
    "in_place_relu": lambda: (nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), X),
    "shared_module": lambda: (nn.Sequential(shared := nn.Linear(4, 4), shared, nn.Linear(4, 3)), X),
    "checkpointed": lambda: (Checkpointed(torch.tanh, reentrant=False), X),
    "reentrant_checkpoint": lambda: (Checkpointed(torch.tanh, reentrant=True), X),
}


def healthy(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> Planted:
    """Make a case in which all is well."""
    model, x = make()
    return Planted(lambda: F.cross_entropy(model(x), Y), model, {})


CASES.update({name: functools.partial(healthy, make) for name, make in HEALTHY.items()})
