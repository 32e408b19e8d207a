"""Causes of NaN and Inf that are planted in models, each with the place to name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Forward = Callable[[torch.Tensor], torch.Tensor]
NAN, INF = float("nan"), float("inf")


class Function(nn.Module):
    """A module that applies a function."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Applies it."""
        return self.function(data)


def around(*middle: nn.Module, width: int = 8) -> nn.Sequential:
    """Return layers before and after other modules."""
    return nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width), *middle, nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
    )


def square(output: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return output.float().square().mean()


@dataclass(frozen=True)
class Cause:
    """One cause. `make`: the model; `place`: the labels layer and pass; `kind`: "" for either. `batch`: what it is called with."""

    name: str
    make: Callable[[], nn.Module]
    place: tuple[str, str]
    kind: str = ""
    batch: Callable[[], Any] = lambda: torch.randn(4, 8)
    loss: Forward = square


CAUSES: list[Cause] = []


def cause(place: tuple[str, str], kind: str = "", **more: Any) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:  # noqa: ANN401 - fields of `Cause`
    """Enter a function that makes a model."""

    def enter(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        CAUSES.append(Cause(make.__name__, make, place, kind, **more))
        return make

    return enter


def function(name: str, call: Forward, place: tuple[str, str] = ("3", "forward"), kind: str = "") -> None:
    """Enter a function in the middle of a model as a cause."""
    CAUSES.append(Cause(name, lambda: around(Function(call)), place, kind))


BACK = ("3", "backward")
function("division_by_zero", lambda x: x / (x - x.detach()), kind="inf")
function("zero_by_zero", lambda x: (x * 0) / (x * 0), kind="nan")
function("log_of_zero", lambda x: x.relu().log(), kind="inf")
function("sqrt_at_zero_in_the_backward", lambda x: (x * 0).sqrt(), BACK)
function("exp_overflow", lambda x: (x * 1e4).exp(), kind="inf")
function("overflow_in_fp16", lambda x: (x.half() * 3e4 * 3e4).float(), kind="inf")
function("zero_times_inf", lambda x: (x * 0) * torch.full_like(x, INF), kind="nan")
function("acos_at_one_in_the_backward", lambda x: (x * 0 + 1).acos(), BACK)
function("power_of_zero_in_the_backward", lambda x: (x * 0) ** 0.5, BACK)
function("root_of_a_negative", lambda x: x**0.5, kind="nan")
function("variance_without_epsilon", lambda x: (x * 0 - (x * 0).mean(-1, keepdim=True)) / (x * 0).std(-1, keepdim=True), kind="nan")
function("division_in_the_backward_of_where", lambda x: torch.where(x > 1e9, (x * 0).sqrt(), x), BACK, "nan")


@cause(("3", "forward"), "nan")
def attention_row_fully_masked() -> nn.Module:
    """A row of the mask is -inf."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -INF)
            mask[2] = -INF
            self.register_buffer("mask", mask)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.T + self.mask).softmax(-1) @ x

    return around(Attention())


class Broken(torch.autograd.Function):
    """An autograd function whose backward makes a NaN."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, data: torch.Tensor) -> torch.Tensor:
        return data * 1

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * NAN


function("custom_function_backward", Broken.apply, BACK, "nan")


@cause(("0.inner.3", "backward"))
def below_checkpoints() -> nn.Module:
    """The forward runs again within the backward."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = around(Function(lambda x: (x * 0).sqrt()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    return nn.Sequential(Checkpointed())


def spoiled(model: nn.Module, name: str) -> nn.Module:
    """Fill a parameter or buffer with NaN."""
    model.state_dict()[name].fill_(NAN)
    return model


def own_code() -> nn.Module:
    """Return a model that makes a NaN between two modules."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two((self.one(x) - 100).log())

    return Own()


def twice_in_fp16() -> nn.Module:
    """Return a model in which two finite parts of a gradient have a sum that overflows."""

    def both(x: torch.Tensor) -> torch.Tensor:
        y = x.tanh().half()
        return (y * 4e4).float() + (y * 4e4).float()

    return nn.Sequential(nn.Linear(8, 8), Function(both))


def sequence(first: nn.Module) -> nn.Module:
    """Return a recurrent layer whose output overflows in the next module."""
    return nn.Sequential(first, Function(lambda given: given[0][:, -1] * 1e38 * 1e38), nn.Linear(8, 1))


CAUSES += [
    Cause("nan_in_the_batch", around, ("batch", "batch"), "nan", lambda: torch.randn(4, 8).index_fill(0, torch.tensor([1]), NAN)),
    Cause("nan_in_a_parameter", lambda: spoiled(around(nn.Linear(8, 8)), "3.weight"), ("3", "parameter"), "nan"),
    Cause("running_variance", lambda: spoiled(around(nn.BatchNorm1d(8).eval()), "3.running_var"), ("3", "buffer")),
    Cause("loss_outside_of_any_module", around, ("loss", "loss"), "inf", loss=lambda output: (output * 0).log().mean()),
    Cause("gradient_of_the_loss", around, ("loss", "loss"), loss=lambda output: (output * 0).square().sum().sqrt()),
    Cause("gradient_of_the_loss_moved", around, ("loss", "loss"), loss=lambda output: (output.view(-1) * 0).square().sum().sqrt()),
    Cause("lstm", lambda: sequence(nn.LSTM(8, 8, batch_first=True)), ("1", "forward"), "inf", lambda: torch.randn(4, 3, 8)),
    Cause("the_models_own_code", own_code, ("Own", "forward"), "nan"),
    Cause("sum_of_finite_parts", twice_in_fp16, ("unknown", "unknown"), "inf", loss=torch.sum),
]
