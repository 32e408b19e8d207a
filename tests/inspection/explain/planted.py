"""Steps with planted reasons for a gradient that is missing, each with the verdicts and the place that are to be found.

The line that ends in `# cut` is the place. A step returns its loss.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[], Any]


@dataclass
class Planted:
    """What a case makes: `expected` has verdicts by the begin of parameters' names, all others are `ok`.

    `module`: in which the cut is said to be, `note`: a part of the notes of the parameters that are not `ok`.
    """

    step: Step
    model: nn.Module
    expected: Mapping[str, str]
    module: str | None = None
    note: str = ""
    optimizers: Any = ()


CASES: dict[str, Callable[[], Planted]] = {}


def case(make: Callable[[], Planted]) -> Callable[[], Planted]:
    """Adds a case under the function's name."""
    CASES[make.__name__] = make
    return make


def cut_line(make: Callable[[], Planted]) -> int | None:
    """The number of the line that is marked in a case, `None` if none is."""
    lines, first = inspect.getsourcelines(make)
    return next((first + number for number, line in enumerate(lines) if line.rstrip().endswith("# cut")), None)


class Two(nn.Module):
    """An encoder and a head, with something done between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head, self.between = nn.Linear(4, 6), nn.Linear(6, 3), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.encoder(x)))


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0, 1])


def classified(model: nn.Module) -> Step:
    """A step by cross entropy."""
    return lambda: F.cross_entropy(model(X), Y)


def between(operation: Callable[[torch.Tensor], torch.Tensor], verdict: str, note: str) -> Planted:
    """The encoder is cut off by an operation before the head."""
    model = Two(operation)
    return Planted(classified(model), model, {"encoder": verdict}, "Two", note)


@case
def all_well() -> Planted:
    """All well."""
    model = Two()
    return Planted(classified(model), model, {})


@case
def detach() -> Planted:
    """Detach."""
    return between(lambda h: h.detach(), "detached_at", ".detach()")  # cut


@case
def detach_in_place() -> Planted:
    """Detach in place."""
    return between(lambda h: (h * 1).detach_(), "detached_at", ".detach_()")  # cut


@case
def data() -> Planted:
    """Data."""
    return between(lambda h: h.data, "detached_at", ".data")  # cut


@case
def numpy_round_trip_in_shared_memory() -> Planted:
    """Numpy round trip in shared memory."""
    return between(lambda h: torch.from_numpy(h.detach().numpy()), "detached_at", ".detach()")  # cut


@case
def array_copied_into_a_new_tensor() -> Planted:
    """Array copied into a new tensor."""
    return between(lambda h: torch.tensor(h.detach().numpy()[:, :]), "detached_at", ".detach()")  # cut


@case
def overwritten_after_a_detach() -> Planted:
    """Overwritten after a detach: the loss does not depend on the encoder at all."""
    model = nn.ModuleDict({"encoder": nn.Linear(4, 6), "other": nn.Linear(4, 6), "head": nn.Linear(6, 3)})

    def step() -> torch.Tensor:
        h = model["encoder"](X).detach()
        h.copy_(model["other"](X))
        return F.cross_entropy(model["head"](h), Y)

    return Planted(step, model, {"encoder": "not_in_graph"}, None, "used here")


@case
def copied_into_a_new_tensor() -> Planted:
    """Copied into a new tensor."""
    return between(lambda h: torch.tensor(h.tolist()), "detached_at", ".tolist()")  # cut


@case
def no_grad_block_of_an_inner_module() -> Planted:
    """No grad block of an inner module."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = x * 2
                return self.linear(x)  # cut

    model = nn.Sequential(Frozen(), nn.Linear(4, 3))
    return Planted(classified(model), model, {"0.": "detached_at"}, "0.linear", "torch.no_grad()")


@case
def no_grad_decorator() -> Planted:
    """No grad decorator."""
    model = Two()
    encode = torch.no_grad()(model.encoder.forward)
    return Planted(lambda: F.cross_entropy(model.head(encode(X)), Y), model, {"encoder": "detached_at"}, None, "torch.no_grad()")


@case
def inference_mode() -> Planted:
    """Inference mode."""
    model = Two()

    def step() -> torch.Tensor:
        with torch.inference_mode():
            h = model.encoder(X)  # cut
        return F.cross_entropy(model.head(h.clone()), Y)

    return Planted(step, model, {"encoder": "detached_at"}, "encoder", "torch.inference_mode()")


@case
def detach_in_the_loss_function() -> Planted:
    """Detach in the loss function."""
    model = nn.ModuleDict({"student": nn.Linear(4, 3), "teacher": nn.Linear(4, 3)})

    def loss_function(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(student, teacher.detach())  # cut

    def step() -> torch.Tensor:
        return loss_function(model["student"](X), model["teacher"](X))

    return Planted(step, model, {"teacher": "detached_at"}, "", ".detach()")


@case
def loss_made_anew_from_a_number() -> Planted:
    """Loss made anew from a number."""
    model = Two()

    def step() -> torch.Tensor:
        number = F.cross_entropy(model(X), Y).item()  # cut
        return torch.tensor(number, requires_grad=True)

    return Planted(step, model, {"": "detached_at"}, "", ".item()")


@case
def loss_that_gradients_are_switched_on_for() -> Planted:
    """Loss that gradients are switched on for."""
    model = Two()

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(X), Y)
        return loss.detach().requires_grad_()  # cut

    return Planted(step, model, {"": "detached_at"}, "", ".detach()")


@case
def penalty_without_create_graph() -> Planted:
    """Penalty without create graph."""
    model = nn.ModuleDict({"critic": nn.Linear(4, 1), "other": nn.Linear(4, 1)})

    def step() -> torch.Tensor:
        x = X.clone().requires_grad_()
        out = model["critic"](x).exp().sum()
        (gradient,) = torch.autograd.grad(out, x)  # cut
        return gradient.norm() + model["other"](X).sum()

    return Planted(step, model, {"critic": "detached_at"}, "", "create_graph")


@case
def number_that_is_computed_with() -> Planted:
    """Number that is computed with."""
    model = Two()

    def step() -> torch.Tensor:
        penalty = model.head.weight.square().sum().item() * 0.1  # cut
        return model.encoder(X).sum() + penalty

    return Planted(step, model, {"head.weight": "unknown", "head.bias": "not_in_graph"}, None, "")


@case
def argmax() -> Planted:
    """Argmax."""
    model = nn.Sequential(nn.Linear(4, 7), Embedded(), nn.Linear(2, 3))
    return Planted(classified(model), model, {"0.": "non_differentiable"}, "1", "argmax")


class Embedded(nn.Module):
    """Looks up the largest of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.argmax(1))


@case
def comparison() -> Planted:
    """Comparison."""
    return between(lambda h: (h > 0).float(), "non_differentiable", "gt")  # cut


@case
def cast_to_integers() -> Planted:
    """Cast to integers."""
    return between(lambda h: h.long().float(), "non_differentiable", "long")  # cut


@case
def cast_by_to() -> Planted:
    """Cast by to."""
    return between(lambda h: h.to(torch.int32).float(), "non_differentiable", "int32")  # cut


@case
def rounded() -> Planted:
    """Rounded."""
    return between(torch.round, "non_differentiable", "round")


@case
def rounded_in_the_module() -> Planted:
    """Rounded in the module."""
    return between(lambda h: torch.floor(h * 3), "non_differentiable", "floor")  # cut


@case
def signs() -> Planted:
    """Signs."""
    return between(lambda h: h.sign(), "non_differentiable", "sign")  # cut


@case
def sampled_from_a_distribution() -> Planted:
    """Sampled from a distribution."""
    normal = torch.distributions.Normal
    return between(lambda h: normal(h, 1.0, validate_args=False).sample(), "detached_at", "torch.no_grad()")  # cut


@case
def drawn() -> Planted:
    """Drawn."""
    return between(lambda h: torch.multinomial(h.softmax(1), 6).float(), "non_differentiable", "multinomial")  # cut


Context = torch.autograd.function.FunctionCtx


class Marked(torch.autograd.Function):
    """An autograd function that says that its result has no gradient."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Silent(torch.autograd.Function):
    """An autograd function whose backward returns nothing."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> None:
        return None


class ByArrays(torch.autograd.Function):
    """An autograd function that computes with NumPy."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@case
def function_marked_non_differentiable() -> Planted:
    """Function marked non differentiable."""
    return between(lambda h: Marked.apply(h * 1), "non_differentiable", "Marked")  # cut


@case
def function_without_a_gradient() -> Planted:
    """Function without a gradient."""
    return between(Silent.apply, "non_differentiable", "Silent")


@case
def function_by_arrays_with_a_gradient() -> Planted:
    """Function by arrays with a gradient."""
    model = Two(ByArrays.apply)
    return Planted(classified(model), model, {})


@case
def unused_head() -> Planted:
    """Unused head."""
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 3), "spare": nn.Linear(4, 3)})
    expected = {"spare": "not_in_graph"}
    return Planted(lambda: F.cross_entropy(model["head"](model["body"](X)), Y), model, expected, None, "not used")


@case
def head_whose_output_is_dropped() -> Planted:
    """Head whose output is dropped."""
    model = nn.ModuleDict({"head": nn.Linear(4, 3), "aux": nn.Linear(4, 3)})

    def step() -> torch.Tensor:
        model["aux"](X)  # cut
        return F.cross_entropy(model["head"](X), Y)

    return Planted(step, model, {"aux": "not_in_graph"}, "aux", "used here")


@case
def head_that_is_only_logged() -> Planted:
    """Head that is only logged."""
    model = nn.ModuleDict({"head": nn.Linear(4, 3), "aux": nn.Linear(4, 1)})

    def step() -> torch.Tensor:
        logging.getLogger("training").debug("%f", model["aux"](X).mean().item())  # cut
        return F.cross_entropy(model["head"](X), Y)

    return Planted(step, model, {"aux": "unknown"}, "", "cannot be seen")


@case
def frozen_body() -> Planted:
    """Frozen body."""
    model = Two()
    model.encoder.requires_grad_(False)
    return Planted(classified(model), model, {"encoder": "frozen"})


@case
def frozen_batch_norm() -> Planted:
    """Frozen batch norm."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).requires_grad_(False).eval(), nn.Linear(6, 3))
    return Planted(classified(model), model, {"1.": "frozen"})


@case
def two_optimizers_forget_the_head() -> Planted:
    """Two optimizers forget the head."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    optimizers = {"a": torch.optim.SGD(model[0].parameters(), 0.1), "b": torch.optim.Adam(model[1].parameters())}
    return Planted(classified(model), model, {"2.": "optimizer_missing"}, None, "no optimizer", optimizers)


@case
def two_optimizers_own_all() -> Planted:
    """Two optimizers own all."""
    model = Two()
    optimizers = [torch.optim.SGD(model.encoder.parameters(), 0.1), torch.optim.Adam(model.head.parameters())]
    return Planted(classified(model), model, {}, optimizers=optimizers)


@case
def optimizer_made_before_a_layer_was_replaced() -> Planted:
    """Optimizer made before a layer was replaced."""
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.head = nn.Linear(6, 3)
    return Planted(classified(model), model, {"head": "optimizer_missing"}, optimizers=optimizer)


@case
def tied_weights() -> Planted:
    """Tied weights."""
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    return Planted(lambda: F.cross_entropy(model(Y), Y), model, {})


@case
def embedding_of_integers() -> Planted:
    """Embedding of integers."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    return Planted(lambda: F.cross_entropy(model(Y), Y), model, {})


@case
def mask_from_a_comparison() -> Planted:
    """Mask from a comparison."""
    model = Two(lambda h: h * (h > 0))
    return Planted(classified(model), model, {})


@case
def shared_module_called_twice() -> Planted:
    """Shared module called twice."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a
            self.head = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.b(self.a(x).detach()))

    model = Twice()
    return Planted(classified(model), model, {})


@case
def in_place_relu() -> Planted:
    """In place relu."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
    return Planted(classified(model), model, {})


@case
def written_into_a_buffer_without_a_graph() -> Planted:
    """Written into a buffer without a graph."""
    model = Two()

    def step() -> torch.Tensor:
        h = torch.zeros(5, 6)
        h[:, :3] = model.encoder(X)[:, :3].detach()  # cut
        return F.cross_entropy(model.head(h), Y)

    return Planted(step, model, {"encoder": "detached_at"}, "", ".detach()")


@case
def written_into_a_buffer_with_its_graph() -> Planted:
    """Written into a buffer with its graph."""
    model = Two()

    def step() -> torch.Tensor:
        h = torch.zeros(5, 6)
        h[:, :3] = model.encoder(X)[:, :3]
        return F.cross_entropy(model.head(h), Y)

    return Planted(step, model, {})


class Checkpointed(nn.Module):
    """Its encoder is computed twice, with something done after it."""

    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor], *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.head, self.reentrant = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 3), reentrant
        self.side, self.after = nn.Linear(4, 6), after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return self.head(checkpoint(lambda v: self.inner(v) + self.after(self.side(v)), x, use_reentrant=self.reentrant))


@case
def checkpointed() -> Planted:
    """Checkpointed."""
    model = Checkpointed(torch.tanh, reentrant=False)
    return Planted(classified(model), model, {})


@case
def detached_in_a_checkpoint() -> Planted:
    """Detached in a checkpoint."""
    model = Checkpointed(lambda h: h.detach(), reentrant=False)  # cut
    return Planted(classified(model), model, {"side": "detached_at"}, "Checkpointed", ".detach()")


@case
def reentrant_checkpoint() -> Planted:
    """Reentrant checkpoint."""
    model = Checkpointed(torch.tanh, reentrant=True)
    return Planted(classified(model), model, {})


@case
def detached_in_a_reentrant_checkpoint() -> Planted:
    """Detached in a reentrant checkpoint."""
    model = Checkpointed(lambda h: h.detach(), reentrant=True)
    return Planted(classified(model), model, {"side": "unknown"}, None, "use_reentrant=False")


@case
def autocast() -> Planted:
    """Autocast."""
    model = Two(lambda h: h.detach())  # cut

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(X), Y)

    return Planted(step, model, {"encoder": "detached_at"}, "Two", ".detach()")


@case
def detached_inside_of_a_nested_module() -> Planted:
    """Detached inside of a nested module."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.value = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = self.query(x).softmax(-1).detach()  # cut
            return self.value(x) * weights

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Block()), nn.Linear(4, 3))
    return Planted(classified(model), model, {"0.1.query": "detached_at"}, "0.1", ".detach()")


@case
def lstm_and_attention() -> Planted:
    """Lstm and attention."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.attention = nn.LSTM(4, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, _ = self.lstm(x[None])
            return self.attention(h, h, h)[0][0, :, :3]

    model = Mixed()
    return Planted(classified(model), model, {})
