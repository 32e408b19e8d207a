"""Models that change in the run: what is frozen, added, replaced, removed or converted between steps."""

from __future__ import annotations

import torch
from torch import nn

from tests.matrix.harness import Run, regime
from tests.support.models import Perceptron, batch, sgd


class Stack(nn.Module):
    """Layers that may come and go, and a head."""

    def __init__(self, depth: int = 2, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


# Freezing


@regime()
def frozen_from_the_start(run: Run) -> None:
    """A layer that was frozen before the start has no series, and the others are right."""
    model = Perceptron()
    model.first.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with run.watching(model, optimizer):
        run.train(model, optimizer, 5)


@regime()
def frozen_bias(run: Run) -> None:
    """Of a layer that is frozen in part only the rest is shown, counted and missed."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        run.train(model, optimizer)
        model.first.bias.requires_grad_(False)
        run.train(model, optimizer)


@regime()
def unfrozen_one_by_one(run: Run) -> None:
    """Layers that are unfrozen from the head down are each shown from the next sample on."""
    model = Stack(depth=3)
    model.blocks.requires_grad_(False)
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        run.train(model, optimizer)
        for block in reversed(model.blocks):
            block.requires_grad_(True)
            run.train(model, optimizer)


@regime(stale=[True, False])
def frozen_in_the_run(run: Run, stale: bool) -> None:
    """A layer that is frozen in the run keeps its totals and shows nothing else, also with an old `.grad` that still moves it."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        run.train(model, optimizer)
        model.first.requires_grad_(False)
        for _ in range(4):
            (model.second if stale else optimizer).zero_grad()
            run.backward(model(batch()).square().mean())
            run.step(optimizer)
            run.check()


@regime(zeroed=[True, False])
def unfrozen_with_an_old_gradient(run: Run, zeroed: bool) -> None:
    """A branch that is frozen and unfrozen again keeps its old `.grad`, which counts as a gradient only where it is added to."""
    model = Perceptron()
    extra = nn.Linear(6, 3)
    whole = nn.ModuleDict({"main": model, "extra": extra})
    whole.forward = lambda x, with_extra: model(x) + extra(x) if with_extra else model(x)
    optimizer = sgd(whole)
    with run.watching(whole, optimizer):
        for step in range(9):
            if zeroed:
                optimizer.zero_grad(set_to_none=False)
            else:
                model.zero_grad()
            extra.requires_grad_(not 3 <= step < 6)
            used = step % 3 != 0
            unused = [] if used else ["extra.weight", "extra.bias"]
            run.backward(whole(batch(), used).square().mean(), unused=unused)
            run.step(optimizer)
            run.check()


@regime()
def frozen_between_backward_and_step(run: Run) -> None:
    """What is frozen after its backward still steps on that gradient, and is shown with it."""
    model = Perceptron()
    for _ in run.rounds(model, 5):
        model.first.requires_grad_(True)
        run.backward(model(batch()).square().mean())
        model.first.requires_grad_(False)


@regime()
def unfrozen_between_backward_and_step(run: Run) -> None:
    """What is unfrozen after a backward had no gradient in it and is not missed, whatever old one it holds."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        run.train(model, optimizer, 2)
        for _ in range(4):
            model.second.zero_grad()
            model.first.requires_grad_(False)
            run.backward(model(batch()).square().mean())
            model.first.requires_grad_(True)
            run.step(optimizer)
            run.check()


@regime()
def frozen_every_other_step(run: Run) -> None:
    """A layer that is frozen in every other step remembers over the gaps which of its units are silent."""
    model = Perceptron()
    for step in run.rounds(model, 16):
        model.first.requires_grad_(step % 2 == 0)
        run.backward(model(batch(2)).square().mean())


# Adding


@regime()
def layer_appended(run: Run) -> None:
    """A layer appended to a `ModuleList` in the run is shown, and counts in the global norm, from its first step on."""
    model = Stack()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        run.train(model, optimizer, 3)
        for _ in range(2):
            model.blocks.append(nn.Linear(6, 6))
            optimizer.add_param_group({"params": list(model.blocks[-1].parameters())})
            run.train(model, optimizer)


@regime()
def layer_inserted(run: Run) -> None:
    """A layer inserted below another one takes over its name: a name's numbers are those of who bears it."""
    model = Stack()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        run.train(model, optimizer, 3)
        model.blocks.insert(0, nn.Linear(6, 6))
        optimizer.add_param_group({"params": list(model.blocks[0].parameters())})
        run.train(model, optimizer, 3)


BEFORE_THE_TAKEOVER = (
    "torch_grad_captures_total",
    "torch_grad_norm_",
    "torch_grad_global_norm_distribution",
    "torch_grad_dead_ratio",
)
"""What counts on from rounds in which a layer had no optimizer of its own, and went with the only one there was."""


@regime()
def optimizer_that_takes_over(run: Run) -> None:
    """An optimizer that trained something else gets a group of the watched model, which was not trained until then."""
    model, other = Perceptron(), nn.Linear(3, 3)
    optimizers = {"SGD": sgd(model.first), "Adam": torch.optim.Adam(other.parameters(), lr=0.01)}
    with run.watching(model, {"SGD": optimizers["SGD"]}):
        for step in range(8):
            if step == 4:
                optimizers["Adam"].add_param_group({"params": list(model.second.parameters())})
                run.uses(optimizers)
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            model.second.zero_grad()
            run.backward(other(model(batch())).square().mean())
            run.step(optimizers["SGD"], "SGD")
            if step < 4:
                optimizers["Adam"].step()
            else:
                run.step(optimizers["Adam"], "Adam")
            if step >= 5:  # until two optimizers have stepped nothing has a label of its own
                run.check(without=BEFORE_THE_TAKEOVER)


class Adapted(nn.Module):
    """A linear layer with a product of two thin ones beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@regime(frozen=[True, False])
def adapters_injected(run: Run, frozen: bool) -> None:
    """Low-rank adapters that are put around layers in the run are shown; so is what they are around, by its new name."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        run.train(model, optimizer)
        model.first, model.second = Adapted(model.first), Adapted(model.second)
        for layer in (model.first, model.second):
            layer.base.requires_grad_(not frozen)
            optimizer.add_param_group({"params": [layer.down.weight, layer.up.weight]})
        run.train(model, optimizer)


# Replacing


@regime(position=[0, 1])
def parameter_replaced(run: Run, position: int) -> None:
    """A new `nn.Parameter` in the place of an old one is the one that is read, whether the old one lives on or not."""
    model = Perceptron()
    optimizer = sgd(model)
    kept = []
    with run.watching(model, optimizer):
        run.train(model, optimizer)
        for keep in (True, False):
            old = list(model.first.parameters())[position]
            new = nn.Parameter(torch.randn_like(old) / 3)
            setattr(model.first, ("weight", "bias")[position], new)
            optimizer.param_groups[0]["params"][position] = new
            if keep:
                kept.append(old)
            del old
            run.train(model, optimizer)


class Language(nn.Module):
    """An embedding, a hidden layer and a decoder over the same vocabulary, tied or not."""

    def __init__(self, tokens: int = 11, width: int = 6, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.hidden = nn.Linear(width, width)
        self.decoder = nn.Linear(width, tokens, bias=False)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.hidden(self.embedding(tokens)).tanh())


def tokens() -> torch.Tensor:
    """A few token numbers."""
    return torch.randint(0, 11, (3, 4))


@regime()
def tied_and_untied(run: Run) -> None:
    """Weights that are tied in the run count once, and twice again when the tie is cut."""
    model = Language(tied=False)
    optimizer = sgd(model)
    own = model.decoder.weight
    with run.watching(model, optimizer):
        run.train(model, optimizer, data=tokens)
        model.decoder.weight = model.embedding.weight
        run.train(model, optimizer, data=tokens)
        model.decoder.weight = own
        run.train(model, optimizer, data=tokens)


# Removing


@regime(held=[True, False])
def layer_removed(run: Run, held: bool) -> None:
    """A layer that is taken out of the model leaves the scrape, whether or not it is still referenced."""
    model = Stack(depth=3)
    optimizer = sgd(model)
    kept = []
    with run.watching(model, optimizer):
        run.train(model, optimizer, 3)
        kept.append(model.blocks.pop(1))
        if not held:
            kept.clear()
        run.train(model, optimizer, 3)


# Converting


@regime(dtype=[torch.float64, torch.bfloat16])
def converted_in_the_run(run: Run, dtype: torch.dtype) -> None:
    """A model whose parameters are given another type in place, and the first one back."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        run.train(model, optimizer)
        model.to(dtype)
        run.train(model, optimizer, data=lambda: batch().to(dtype))
        model.float()
        run.train(model, optimizer)


@regime()
def tensors_swapped(run: Run) -> None:
    """A parameter whose content is exchanged by `torch.utils.swap_tensors` stays the same object and is still read."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        run.train(model, optimizer)
        optimizer.zero_grad()
        torch.utils.swap_tensors(model.first.weight, nn.Parameter(torch.randn(8, 6)))
        run.train(model, optimizer)


@regime()
def data_replaced(run: Run) -> None:
    """A parameter whose `.data` is set to another tensor is the same parameter."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watching(model, optimizer):
        for _ in range(3):
            run.train(model, optimizer, 2)
            model.first.weight.data = torch.randn(8, 6)


# Lazily initialised


@regime()
def lazy_modules(run: Run) -> None:
    """Lazy layers get their shapes in the first forward, after the exporter was started, and their optimizer after that."""
    model = nn.Sequential(nn.LazyConv1d(4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(2))

    def inputs() -> torch.Tensor:
        return torch.randn(4, 3, 7)

    with run.watching(model, {}):
        model(inputs())
        optimizer = sgd(model)
        run.uses(optimizer)
        run.train(model, optimizer, 6, data=inputs)
