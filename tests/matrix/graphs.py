"""Autograd's features: which graphs there are, what passes through them and who writes the gradients."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.matrix.harness import AFTER, Run, regime
from tests.matrix.harness import CUMULATIVE as EARLIER
from tests.matrix.loops import written_by_hand
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


def _without_rng_state(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


def _nested(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return _recomputed(lambda y: _recomputed(block[1:], _recomputed(block[0], y)), x)


def _nested_reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own, of the inner one's first forward, which is without gradients
        return _reentrant(lambda y: _reentrant(block[1:], _reentrant(block[0], y)), x)


@regime(around=[_reentrant, _recomputed, _without_rng_state, _nested, _nested_reentrant])
def checkpointed_blocks(run: Run, around: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    """Checkpointed blocks, whose backward runs forwards or whole backwards inside, with accumulation and clipping."""
    model = Blocks(around)
    for _ in run.rounds(model, 5):
        for _ in range(2):
            run.backward(model(batch()).square().mean())
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@regime(reentrant=[True, False])
def checkpointed_sequence(run: Run, reentrant: bool) -> None:
    """`checkpoint_sequential` over the inner modules of the root."""

    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(6, 8)
            self.body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.body, 2, self.embed(x), use_reentrant=reentrant)

    model = Sequence()
    for _ in run.rounds(model, 5):
        run.backward(model(batch()).square().mean())


@regime(reentrant=[True, False])
def checkpointed_root(run: Run, reentrant: bool) -> None:
    """A root that is itself called through a checkpoint, so that its forward, or its whole backward, runs within a backward."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    # no output is seen outside of the backward: another rung is taken after the first rounds
    for _ in run.rounds(model, 8, since=5, without=CUMULATIVE):
        run.backward(checkpoint(model, batch().requires_grad_(), use_reentrant=reentrant).square().mean())


@regime(reentrant=[True, False])
def accumulation_beside_a_checkpointed_root(run: Run, reentrant: bool) -> None:
    """Of the backwards of one step some run through a checkpoint around the root and some do not."""
    model = Perceptron()
    for _ in run.rounds(model, 10, since=5, without=CUMULATIVE):  # as above
        run.backward(checkpoint(model, batch().requires_grad_(), use_reentrant=reentrant).square().mean())
        run.backward(model(batch()).square().mean())


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


@regime()
def gradient_penalty_over_parameters(run: Run) -> None:
    """A penalty on the gradient with respect to the parameters, by `autograd.grad` over all of them."""
    model = Perceptron()
    for _ in run.rounds(model, 5):
        loss = model(batch()).square().mean()
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        run.backward(loss + sum(slope.square().sum() for slope in slopes))


@contextlib.contextmanager
def cycles() -> Iterator[None]:
    """Ignores torch's warning of a reference cycle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@regime()
def backward_with_create_graph(run: Run) -> None:
    """`backward(create_graph=True)` gives gradients that carry a graph; they are measured all the same."""
    model = Perceptron()
    optimizer = sgd(model)
    for _ in run.rounds(model, 5, optimizer):
        with cycles():
            run.backward(model(batch()).square().mean(), create_graph=True)
    optimizer.zero_grad()


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


@regime()
def accumulation_with_create_graph(run: Run) -> None:
    """Gradients that are added up with a graph are new tensors each time, in an accumulation that begins after calm steps."""
    model = Perceptron()
    optimizer = sgd(model)
    for step in run.rounds(model, 12, optimizer):
        for _ in range(3):
            with cycles():
                run.backward(model(batch()).square().mean(), create_graph=step >= 4)
    optimizer.zero_grad()


@regime()
def retained_graph(run: Run) -> None:
    """The same loss twice, kept the first time: two backwards, and one sample of the doubled gradient."""
    model = Perceptron()
    for _ in run.rounds(model, 5):
        loss = model(batch()).square().mean()
        run.backward(loss, retain_graph=True)
        run.backward(loss)


@regime()
def gradients_only_asked_for(run: Run) -> None:
    """`torch.autograd.grad` over a model's parameters, for a report after the step, changes no number."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            run.backward(model(batch()).square().mean())
            run.step(optimizer)
            torch.autograd.grad(model(batch()).sum(), list(model.parameters()), retain_graph=step % 2 == 0)
            run.check()


# Who starts a backward, and from where


@regime()
def several_roots(run: Run) -> None:
    """`torch.autograd.backward` from several tensors with their own gradients is one backward."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 8)
            self.left, self.right = nn.Linear(8, 2), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.body(x).relu()
            return self.left(hidden), self.right(hidden)

    model = Heads()
    for step in run.rounds(model, 6):
        left, right = model(batch())
        if step % 3 == 2:
            torch.autograd.backward([left], [torch.randn_like(left)])
        else:
            torch.autograd.backward([left, right], [torch.randn_like(left), torch.randn_like(right)])
        run.passed()


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


@regime()
def backward_into_each_in_turn(run: Run) -> None:
    """Several backwards of one graph, each into one parameter, as memory-saving loops have it."""
    model = Perceptron()
    for _ in run.rounds(model, 5):
        loss = model(batch()).square().mean()
        names = dict(model.named_parameters())
        for position, parameter in enumerate(names.values()):
            loss.backward(inputs=[parameter], retain_graph=True)
            run.passed(unused=list(names)[position + 1 :])


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
def auxiliary_loss(run: Run) -> None:
    """A loss through the root and a loss through submodules alone in one backward."""
    model = Outside()
    for _ in run.rounds(model, 5):
        run.backward(model(batch()).square().mean() + model.aux(model.body(batch())).square().mean())


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


@regime()
def gradients_assigned_by_hand(run: Run) -> None:
    """Gradients from `torch.autograd.grad` that the loop assigns are read at the step."""
    model = Perceptron()
    # The exporter tries two other ways first, for two rounds each; a dead ratio takes three samples.
    for _ in run.rounds(model, 10, clear=False, since=7, without=(*CUMULATIVE, *AFTER)):
        written_by_hand(run, model, model(batch()).square().mean())
    assert rung(run) in (None, "optimizer")


@regime()
def gradients_of_unfrozen_parameters_by_hand(run: Run) -> None:
    """Assigned gradients where every parameter was frozen at the start."""
    model = Perceptron()
    model.requires_grad_(False)
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        model.requires_grad_(True)
        for step in range(10):
            parameters = list(model.parameters())
            loss = model(batch()).square().mean()
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
            run.passed()
            run.step(optimizer)
            if step >= 7:  # as above
                run.check(without=(*CUMULATIVE, *AFTER))


def _loss(model: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(model, parameters, (x,)).square().mean()


@regime(per_sample=[True, False])
def functional_gradients(run: Run, per_sample: bool) -> None:
    """`torch.func.grad`, alone or under `vmap` for each sample with clipping in between, and assigned gradients."""
    model = Perceptron()
    optimizer = sgd(model)
    gradient = torch.func.grad(lambda parameters, x: _loss(model, parameters, x))
    for _ in run.rounds(model, 10, optimizer, clear=False, since=7, without=(*CUMULATIVE, *AFTER)):  # as above
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        x = batch()
        if per_sample:
            each = torch.func.vmap(gradient, in_dims=(None, 0))(parameters, x.unsqueeze(1))
            lengths = sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt()
            factor = (0.2 / lengths).clamp(max=1)
            found = {name: torch.einsum("n,n...->...", factor, g) for name, g in each.items()}
        else:
            found = gradient(parameters, x)
        for name, parameter in model.named_parameters():
            parameter.grad = found[name]
        run.passed()


@regime()
def functional_call_with_own_parameters(run: Run) -> None:
    """`functional_call` with the model's own parameters is a forward like any other."""
    model = Perceptron()
    for _ in run.rounds(model, 5):
        run.backward(torch.func.functional_call(model, dict(model.named_parameters()), (batch(),)).square().mean())


@regime(mixed=[True, False])
def functional_call_with_replaced_parameters(run: Run, mixed: bool) -> None:
    """Gradients flow to the parameters through what stands in their place during a `functional_call`."""
    model = Perceptron()
    mask = {name: (torch.rand_like(p) > 0.4).float() for name, p in model.named_parameters()}
    for _ in run.rounds(model, 5):
        replaced = {name: p * mask[name] for name, p in model.named_parameters() if not mixed or name.startswith("first")}
        run.backward(torch.func.functional_call(model, replaced, (batch(),)).square().mean())


@regime()
def inner_steps(run: Run) -> None:
    """Meta-learning: inner steps by `autograd.grad` on copies, then one backward through them to the model."""
    model = Perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in run.rounds(model, 5, optimizer):
        for _ in range(2):
            fast = dict(model.named_parameters())
            for _ in range(2):
                slopes = torch.autograd.grad(_loss(model, fast, batch()), list(fast.values()), create_graph=True)
                fast = {name: p - 0.1 * slope for (name, p), slope in zip(fast.items(), slopes, strict=True)}
            run.backward(_loss(model, fast, batch()))


# Hooks of the user's own


@regime()
def tensor_hook_that_scales(run: Run) -> None:
    """What a user's hook on a parameter makes of a gradient is what is shown."""
    model = Perceptron()
    for step in run.rounds(model, 8):
        if step == 0:
            handle = model.first.weight.register_hook(lambda gradient: gradient * 3)
        if step == 5:
            handle.remove()
        run.backward(model(batch()).square().mean())


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
def post_accumulate_hook_that_collects(run: Run) -> None:
    """A hook that moves a gradient elsewhere and clears it leaves a parameter without one at the end of the backward."""
    model = Perceptron()
    collected = []

    def collect(parameter: torch.Tensor) -> None:
        collected.append(parameter.grad)
        parameter.grad = None

    for step in run.rounds(model, 6):
        if step == 0:
            model.first.bias.register_post_accumulate_grad_hook(collect)
        run.backward(model(batch()).square().mean())
    assert collected


@regime()
def tensor_hook_that_clears(run: Run) -> None:
    """A user's hook that drops the old gradient right before the new one, which may get its address, is written."""
    model = nn.Linear(6, 6, bias=False)
    for step in run.rounds(model, 12, clear=False):
        if step == 0:
            model.weight.register_hook(lambda _gradient: setattr(model.weight, "grad", None))
        run.backward(model(batch()).square().mean())


@regime()
def gradients_changed_before_the_step(run: Run) -> None:
    """A change of gradients after the backward changes what the optimizer sees, not the gradient of the backward."""
    model = Perceptron()
    for _ in run.rounds(model, 6):
        run.backward(model(batch()).square().mean())
        for parameter in model.parameters():
            parameter.grad.mul_(0.25)


@regime()
def backward_hooks_on_modules(run: Run) -> None:
    """A user's own full backward hooks, which change a gradient on its way, stand beside the exporter's."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    for step in run.rounds(model, 6):
        if step == 0:
            model[2].register_full_backward_hook(lambda module, inputs, outputs: tuple(g * 2 for g in inputs))
            model.register_full_backward_pre_hook(lambda module, outputs: tuple(g * 3 for g in outputs))
        run.backward(model(batch().requires_grad_()).square().mean())


# Functions and forwards of all sorts


class Reversed(torch.autograd.Function):
    """The identity, with the gradient's sign turned and scaled."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.neg() * ctx.factor, None


@regime()
def custom_function(run: Run) -> None:
    """A gradient reversal, as domain adaptation has it, and a loss on both of its sides."""

    class Adversarial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.label, self.domain = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.body(x).tanh()
            return self.label(hidden), self.domain(Reversed.apply(hidden, 0.5))

    model = Adversarial()
    for _ in run.rounds(model, 5):
        label, domain = model(batch())
        run.backward(label.square().mean() + domain.square().mean())


class Inner(torch.autograd.Function):
    """A layer whose backward runs a backward of its own, as hand-written checkpoints do."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), gradient)
        return x.grad, None


@regime()
def custom_function_with_a_backward_inside(run: Run) -> None:
    """A hand-written checkpoint: its backward runs a forward and a backward within the model's, of which there is one."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(Inner.apply(self.embed(x), self.inner).tanh())

    model = Deep()
    for _ in run.rounds(model, 5):
        run.backward(model(batch()).square().mean())


@regime()
def inplace_activations(run: Run) -> None:
    """In-place ReLUs, the last of them on the root's output, are untouched by the hooks."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3), nn.ReLU(inplace=True))
    for _ in run.rounds(model, 5):
        run.backward((model(batch()) - 1).square().mean())


@regime()
def output_changed_in_place(run: Run) -> None:
    """A loop that writes into the model's output before it computes the loss."""
    model = Perceptron()
    for step in run.rounds(model, 6):
        out = model(batch())
        out[:, 0] = 0
        out.mul_(2)
        if step % 2:
            out.relu_()
        run.backward((out - 1).square().mean())


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


@regime()
def without_gradients_first(run: Run) -> None:
    """Forwards under `no_grad` and `inference_mode`, and one whose graph is dropped, before the one that is trained on."""
    model = Perceptron()
    for _ in run.rounds(model, 5):
        with torch.no_grad():
            target = model(batch())
        with torch.inference_mode():
            model(batch())
        model(batch())
        run.backward((model(batch()) - target).square().mean())
        with torch.no_grad():
            model(batch())


@regime()
def inputs_that_require_gradients(run: Run) -> None:
    """Inputs that require gradients, and a backward into the inputs alone, as for adversarial examples."""
    model = Perceptron()
    for _ in run.rounds(model, 5):
        inputs = batch().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).square().mean(), inputs)
        run.backward(model((inputs + 0.1 * slope.sign()).detach().requires_grad_()).square().mean())


@regime()
def backward_into_the_inputs_alone(run: Run) -> None:
    """`backward(inputs=[x])` before the training backward writes no parameter's gradient."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for _ in range(6):
            inputs = batch().requires_grad_()
            model(inputs).square().mean().backward(inputs=[inputs])
            optimizer.zero_grad()
            run.backward(model((inputs + 0.1 * inputs.grad.sign()).detach()).square().mean())
            run.step(optimizer)
            # Whether a backward that writes no parameter's gradient is one is a matter of taste.
            run.check(without=["torch_train_backward_passes_total"])


@regime()
def detached_branch(run: Run) -> None:
    """A bootstrap target from the model itself, detached, takes no part in the backward."""
    model = Perceptron()
    for _ in run.rounds(model, 5):
        run.backward((model(batch()) - 0.9 * model(batch()).detach()).square().mean())


@regime()
def saved_tensors_offloaded(run: Run) -> None:
    """Saved tensors that are packed and unpacked by hooks of the user's."""
    model = Perceptron()
    for _ in run.rounds(model, 5):
        pack, unpack = lambda t: (t.device, t.numpy(force=True)), lambda kept: torch.from_numpy(kept[1]).to(kept[0])
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = model(batch())
        run.backward(out.square().mean())


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
