"""Causes of NaN and Inf that are planted in models, each with the place that is to be named."""

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
    """Layers before and after, with other modules between that look alike."""
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
    """Enters a function that makes a model."""

    def enter(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        CAUSES.append(Cause(make.__name__, make, place, kind, **more))
        return make

    return enter


def function(name: str, call: Forward, place: tuple[str, str] = ("3", "forward"), kind: str = "") -> None:
    """Enters a function in the middle of a model as a cause."""
    CAUSES.append(Cause(name, lambda: around(Function(call)), place, kind))


BACK = ("3", "backward")
function("division_by_zero", lambda x: x / (x - x.detach()), kind="inf")
function("zero_by_zero", lambda x: (x * 0) / (x * 0), kind="nan")
function("log_of_zero", lambda x: x.relu().log(), kind="inf")
function("sqrt_at_zero_in_the_backward", lambda x: (x * 0).sqrt(), BACK)
function("exp_overflow", lambda x: (x * 1e4).exp(), kind="inf")
function("overflow_in_fp16", lambda x: (x.half() * 3e4 * 3e4).float(), kind="inf")
function("overflow_in_bf16", lambda x: (x.bfloat16() * 1e38 * 1e38).float(), kind="inf")
function("zero_times_inf", lambda x: (x * 0) * torch.full_like(x, INF), kind="nan")
function("acos_at_one_in_the_backward", lambda x: (x * 0 + 1).acos(), BACK)
function("asin_at_one_in_the_backward", lambda x: (x * 0 + 1).asin(), BACK)
function("root_of_squares_at_zero_in_the_backward", lambda x: (x * 0).square().sum(-1, keepdim=True).sqrt() + x, BACK)
function("power_of_zero_in_the_backward", lambda x: (x * 0) ** 0.5, BACK)
function("root_of_a_negative", lambda x: x**0.5, kind="nan")
function("cumulative_product", lambda x: (x.abs() * 1e30).cumprod(-1), kind="inf")
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


@cause(("3.soft", "forward"), "nan")
def row_masked_by_a_module_of_its_own() -> nn.Module:
    """The scores of -inf are given by another module than the softmax."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = Function(lambda s: s.masked_fill(torch.arange(4)[:, None] == 1, -INF))
            self.soft = nn.Softmax(-1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.soft(self.mask(x @ x.T)) @ x

    return around(Attention())


def masked() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch with a mask of which one row is -inf."""
    mask = torch.tensor([0.0, -INF, -INF, 0.0]).repeat(4, 1)
    mask[1] = -INF
    return torch.randn(4, 8), mask


@cause(("3", "forward"), "nan", batch=masked)
def mask_in_the_batch() -> nn.Module:
    """A mask that the model is called with has a row of -inf."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, module in around(Function(lambda x: x)).named_children():
                self.add_module(name, module)

        def forward(self, data: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            for name, module in self.named_children():
                if name == "3":
                    module.function = lambda x: (x @ x.T + mask).softmax(-1) @ x
                data = module(data)
            return data

    return Named()


@cause(("batch", "batch"), "nan", batch=lambda: torch.randn(4, 8).index_fill(0, torch.tensor([1]), NAN))
def nan_in_the_batch() -> nn.Module:
    """One example."""
    return around()


@cause(("batch", "batch"), "inf", batch=lambda: torch.randn(4, 8).index_fill(0, torch.tensor([1]), -INF))
def logarithm_in_the_batch() -> nn.Module:
    """A spectrogram with the logarithm of zero."""
    return around()


@cause(("3", "parameter"), "nan")
def nan_in_a_parameter() -> nn.Module:
    """Before the training."""
    model = around(nn.Linear(8, 8))
    model[3].weight.data[2, 3] = NAN
    return model


@cause(("0", "parameter"), "nan", batch=lambda: torch.randint(0, 5, (4, 3)))
def row_of_an_embedding() -> nn.Module:
    """All rows but one are right."""
    model = nn.Sequential(nn.Embedding(5, 8), nn.Flatten(), nn.Linear(24, 1))
    model[0].weight.data[0] = NAN
    model[0].weight.data[1] = NAN
    model[0].weight.data[2] = NAN
    return model


@cause(("3", "buffer"))
def running_variance_of_a_frozen_batch_norm() -> nn.Module:
    """It is evaluated, as in fine-tuning."""
    model = around(nn.BatchNorm1d(8).eval())
    model[3].running_var.fill_(NAN)
    return model


class Broken(torch.autograd.Function):
    """A function of the user's own. `where`: 0 for a NaN in the forward, 1 for one in the backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, data: torch.Tensor, where: int) -> torch.Tensor:
        """With a NaN, or none."""
        ctx.where = where
        return data * NAN if where == 0 else data * 1

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """With a NaN, or none."""
        return gradient * NAN if ctx.where else gradient, None


function("custom_function_forward", lambda x: Broken.apply(x, 0), kind="nan")
function("custom_function_backward", lambda x: Broken.apply(x, 1), BACK, "nan")


@cause(("loss", "loss"), "inf", loss=lambda output: (output * 0).log().mean())
def loss_outside_of_any_module() -> nn.Module:
    """The logarithm of zero."""
    return around()


@cause(("loss", "loss"), loss=lambda output: (output * 0).square().sum().sqrt())
def gradient_of_the_loss() -> nn.Module:
    """The loss is finite, its gradient is not."""
    return around()


@cause(("1", "forward"), "inf", batch=lambda: torch.randn(4, 3, 8))
def lstm() -> nn.Module:
    """Its output is multiplied until it overflows."""

    class Last(nn.Module):
        def forward(self, given: tuple[torch.Tensor, Any]) -> torch.Tensor:
            return given[0][:, -1] * 1e38 * 1e38

    return nn.Sequential(nn.LSTM(8, 8, batch_first=True), Last(), nn.Linear(8, 1))


@cause(("Own", "forward"), "nan")
def the_models_own_code() -> nn.Module:
    """Between two modules."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two((self.one(x) - 100).log())

    return Own()


@cause(("twice", "forward"), "inf")
def second_call_of_a_module() -> nn.Module:
    """The first is right."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = Function(torch.exp)
            self.last = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.twice(self.twice(x) * 1e4))

    return Shared()


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
