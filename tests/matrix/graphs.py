"""Autograd's features: which graphs there are, what passes through them and who writes the gradients."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.matrix.harness import CUMULATIVE as EARLIER
from tests.matrix.harness import Run, regime
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import lost, mode

CUMULATIVE = (*EARLIER, "torch_grad_clipped_steps_total", "torch_train_backward_passes_total")
"""Metrics that depend on rounds which were not seen, before the exporter found how to see them."""


def rung(run: Run) -> str | None:
    """Return where gradients are read in the end; `None` without an exporter."""
    return None if run.exporter is None else mode(run.exporter)


def parameters_but(model: nn.Module, *used: str) -> list[str]:
    """The names of the parameters that begin with none of the given ones."""
    return [name for name, _ in model.named_parameters() if not name.startswith(used)]


# Checkpointing


class Blocks(nn.Module):
    """An embedding layer, blocks with dropout, and a head. `around`: how a block is called."""

    def __init__(self, around: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3))
        self.head = nn.Linear(8, 2)
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.around(block, x)
        return self.head(x)


def _reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=True)


def _recomputed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


def _nested_reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own, of the inner one's first forward, which is without gradients
        return _reentrant(lambda y: _reentrant(block[1:], _reentrant(block[0], y)), x)


@regime(around=[_reentrant, _recomputed, _nested_reentrant])
def checkpointed_blocks(run: Run, around: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    """Checkpointed blocks, whose backward runs forwards or whole backwards inside, with accumulation and clipping."""
    model = Blocks(around)
    for _ in run.rounds(model, 5):
        for _ in range(2):
            run.backward(model(batch()).square().mean())
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@regime(reentrant=[True, False])
def checkpointed_root(run: Run, reentrant: bool) -> None:
    """A root that is itself called through a checkpoint, so that its forward, or its whole backward, runs within a backward."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    # no output is seen outside of the backward: another rung is taken after the first rounds
    for _ in run.rounds(model, 8, since=5, without=CUMULATIVE):
        run.backward(checkpoint(model, batch().requires_grad_(), use_reentrant=reentrant).square().mean())


# Second derivatives


@regime()
def gradient_penalty(run: Run) -> None:
    """`torch.autograd.grad(create_graph=True)` in the loop is no backward, and its graph is part of the one that follows."""
    model = Perceptron()
    for _ in run.rounds(model, 5):
        inputs = batch().requires_grad_()
        out = model(inputs)
        (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        run.backward(out.square().mean() + (slope.norm(dim=1) - 1).square().mean())


@regime(alone=[True, False])
def gradient_penalty_in_a_backward(run: Run, alone: bool) -> None:
    """A penalty with a backward of its own, alone or before or after that of the loss: alone it does not reach the last bias."""
    model = Perceptron()
    for step in run.rounds(model, 6):
        if not alone and step % 2 == 0:
            run.backward(model(batch()).square().mean())
        inputs = batch().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        run.backward((slope.norm(dim=1) - 1).square().mean())
        if not alone and step % 2:
            run.backward(model(batch()).square().mean())


@contextlib.contextmanager
def cycles() -> Iterator[None]:
    """Ignores torch's warning of a reference cycle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@regime(set_to_none=[True, False])
def double_backward(run: Run, set_to_none: bool) -> None:
    """A backward through the gradients of a backward: two backwards, of which the second adds to the first."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for _ in range(6):
            optimizer.zero_grad(set_to_none=set_to_none)
            inputs = batch().requires_grad_()
            with cycles():
                run.backward(model(inputs).square().mean(), create_graph=True)
            run.backward(inputs.grad.square().sum())
            run.step(optimizer)
            run.check()
            for parameter in model.parameters():
                parameter.grad = parameter.grad.detach()
        optimizer.zero_grad()


# Who starts a backward, and from where


@regime()
def backward_into_some(run: Run) -> None:
    """`backward(inputs=...)` writes the gradients of some parameters only; the old ones of the others do not count."""
    model = Perceptron()
    for step in run.rounds(model, 9, clear=False):
        chosen = (model, model.second, model.first)[step % 3]
        if step:
            chosen.zero_grad()
        loss = model(batch()).square().mean()
        run.losses.append(loss.detach().clone())
        loss.backward(inputs=list(chosen.parameters()))
        used = [name for name, p in model.named_parameters() if any(p is own for own in chosen.parameters())]
        run.passed(unused=parameters_but(model, *used))


class Outside(nn.Module):
    """A body, a head that the root calls, and an auxiliary one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@regime()
def submodules_called_directly(run: Run) -> None:
    """A loop that never calls the root is captured by another rung, right from then on."""
    model = Perceptron()
    for _ in run.rounds(model, 8, since=5, without=CUMULATIVE):  # the first rounds are not seen by the rung `output`
        run.backward(model.second(model.first(batch()).relu()).square().mean())
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert rung(run) in (None, "backward")


@regime(aux_first=[True, False])
def auxiliary_backward(run: Run, aux_first: bool) -> None:
    """A backward through submodules alone, before or after the one through the root, belongs to the sample."""
    model = Outside()
    for _ in run.rounds(model, 8, since=3, without=CUMULATIVE):  # the auxiliary backwards of the first rounds are not counted
        for auxiliary in (aux_first, not aux_first):
            out = model.aux(model.body(batch())) if auxiliary else model(batch())
            run.backward(out.square().mean())


@regime(changed=[1, 12])
def second_backward_around_the_root(run: Run, changed: int) -> None:
    """From some step on a second backward begins at submodules; it is counted and read from its first round on."""
    model = Perceptron()
    for step in run.rounds(model, changed + 8):
        run.backward(model(batch()).square().mean())
        if step >= changed:
            run.backward(model.second(torch.randn(5, 8)).square().mean() + model.first(batch()).square().mean())
    assert run.exporter is None or lost(run.exporter) == {}


@regime()
def accumulation_without_the_root(run: Run) -> None:
    """Accumulations and skipped steps are distinguished without the root's help too."""
    model = Perceptron()
    for step in run.rounds(model, 12, since=5, without=CUMULATIVE):  # as above
        for _ in range(3):
            run.backward(model.second(model.first(batch()).relu()).square().mean())
        if step > 5 and step % 4 == 1:
            run.skipped()
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@regime()
def unfrozen_without_the_root(run: Run) -> None:
    """Layers that are unfrozen, one after the other, in a loop that never calls the root."""
    model = nn.ModuleDict({"first": nn.Linear(6, 6), "second": nn.Linear(6, 6), "third": nn.Linear(6, 3)})
    for layer in ("first", "second"):
        model[layer].requires_grad_(False)
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(14):
            if step in (6, 10):
                model["second" if step == 6 else "first"].requires_grad_(True)
            optimizer.zero_grad()
            out = model["third"](model["second"](model["first"](batch()).tanh()).tanh())
            run.backward(out.square().mean())
            run.step(optimizer)
            # As above; and nodes that were hooked before a layer thawed say too little of that one round.
            if step >= 5 and step not in (6, 10):
                run.check(without=(*CUMULATIVE, "torch_grad_dead_ratio"))


@regime()
def lazy_modules_without_the_root(run: Run) -> None:
    """Lazy layers that are initialised by being called directly, in a loop that never calls the root."""
    model = nn.ModuleDict({"first": nn.LazyLinear(6), "second": nn.LazyLinear(3)})
    for _ in run.rounds(model, 8, since=5, without=CUMULATIVE):  # as above
        run.backward(model["second"](model["first"](batch()).relu()).square().mean())


# Gradients that no backward writes


@regime(mixed=[True, False])
def functional_call_with_replaced_parameters(run: Run, mixed: bool) -> None:
    """Gradients flow to the parameters through what stands in their place during a `functional_call`."""
    model = Perceptron()
    mask = {name: (torch.rand_like(p) > 0.4).float() for name, p in model.named_parameters()}
    for _ in run.rounds(model, 5):
        replaced = {name: p * mask[name] for name, p in model.named_parameters() if not mixed or name.startswith("first")}
        run.backward(torch.func.functional_call(model, replaced, (batch(),)).square().mean())


# Hooks of the user's own


@regime(replace=[True, False])
def post_accumulate_hook_that_changes(run: Run, replace: bool) -> None:
    """A user's post-accumulate hook that changes or replaces `.grad`: its result is what is shown."""
    model = Perceptron()

    def halve(parameter: torch.Tensor) -> None:
        if replace:
            parameter.grad = parameter.grad / 2
        else:
            parameter.grad.div_(2)

    for step in run.rounds(model, 6):
        for parameter in [] if step else model.second.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
        run.backward(model(batch()).square().mean())


@regime()
def tensor_hook_that_clears(run: Run) -> None:
    """A user's hook that drops the old gradient right before the new one, which may get its address, is written."""
    model = nn.Linear(6, 6, bias=False)
    for step in run.rounds(model, 12, clear=False):
        if step == 0:
            model.weight.register_hook(lambda _gradient: setattr(model.weight, "grad", None))
        run.backward(model(batch()).square().mean())


# Functions and forwards of all sorts


@regime()
def inplace_activations(run: Run) -> None:
    """In-place ReLUs, the last of them on the root's output, are untouched by the hooks."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3), nn.ReLU(inplace=True))
    for _ in run.rounds(model, 5):
        run.backward((model(batch()) - 1).square().mean())


@regime()
def output_is_a_view(run: Run) -> None:
    """A root whose output is a view, or several views of one tensor."""

    class Views(Perceptron):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return super().forward(x).t().unbind(0)

    model = Views()
    for step in run.rounds(model, 6):
        outs = model(batch())
        # Rows of the last layer that belong to outputs without a loss have a gradient of zero.
        run.backward(sum(out.square().mean() for out in outs[step % 3 :]))


@regime()
def siamese(run: Run) -> None:
    """A model that is called several times in a step has one gradient."""
    model = Perceptron()
    for step in run.rounds(model, 8):
        outs = [model(batch()) for _ in range(2 + step % 3)]
        run.backward((outs[0] - outs[1]).square().mean() + sum(out.mean() for out in outs[2:]))


# What a root returns


@dataclass
class Output:
    """An output as libraries have it."""

    loss: torch.Tensor
    logits: torch.Tensor


class Plain:
    """An output that is neither a mapping nor a dataclass."""

    def __init__(self, loss: torch.Tensor, logits: torch.Tensor) -> None:
        self.loss = loss
        self.logits = logits


def _as_dict(loss: torch.Tensor, out: torch.Tensor) -> object:
    return {"loss": loss, "more": {"logits": out}}


def _as_tuple(loss: torch.Tensor, out: torch.Tensor) -> object:
    return out, (loss, None)


def _as_list(loss: torch.Tensor, out: torch.Tensor) -> object:
    return [loss, out]


LOSS = {
    _as_dict: lambda o: o["loss"],
    _as_tuple: lambda o: o[1][0],
    _as_list: lambda o: o[0],
    Output: lambda o: o.loss,
    Plain: lambda o: o.loss,
}


@regime(shape=LOSS)
def output_structures(run: Run, shape: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    """The backward is found whatever the model returns, from the first step on, and a loss in it is shown."""

    class Model(Perceptron):
        def forward(self, x: torch.Tensor) -> object:
            out = super().forward(x)
            return shape(out.square().mean(), out)

    model = Model()
    for _ in run.rounds(model, 5):
        run.backward(LOSS[shape](model(batch())))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert rung(run) in (None, "backward")
    if shape in (_as_dict, Output, Plain):
        run.shows(float(run.losses[-1]), "torch_train_loss")


@regime()
def output_of_no_known_shape(run: Run) -> None:
    """An output whose tensors cannot be found, a closure, is captured by another rung."""

    class Model(Perceptron):
        def forward(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
            out = super().forward(x)
            return lambda: out

    model = Model()
    for _ in run.rounds(model, 8, since=5, without=CUMULATIVE):  # as above
        run.backward(model(batch())().square().mean())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
