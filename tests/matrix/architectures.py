"""Architectures: layers, and ways to put them together, whose gradients have a shape or a timing of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.matrix.changing import Language, tokens
from tests.matrix.harness import Run, regime
from tests.matrix.outcomes import Branches
from tests.support.models import Perceptron, batch, inputs_first, sgd


def train(
    run: Run,
    model: nn.Module,
    data: Callable[[], torch.Tensor] = batch,
    *,
    steps: int = 5,
    of: Callable[[torch.Tensor], torch.Tensor] = lambda out: out.square().mean(),
    clip: float | None = None,
) -> None:
    """Some ordinary steps, with a check after each. `of`: the loss of the model's output."""
    for _ in run.rounds(model, steps):
        run.backward(of(model(data())))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)


def parameters_of(model: nn.Module, *layers: str) -> list[str]:
    """The names of the parameters under these layers."""
    return [name for name, _ in model.named_parameters() if name.startswith(tuple(f"{layer}." for layer in layers))]


# Convolutions and normalisation


class Autoencoder(nn.Module):
    """Convolutions down and, transposed, up again."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, groups=2))
        self.up = nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.ConvTranspose2d(6, 3, 3, stride=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x).relu())


@regime(layout=[torch.contiguous_format, torch.channels_last])
def convolutions(run: Run, layout: torch.memory_format) -> None:
    """Convolutions, grouped and transposed ones, and norms between them, also with the channels last in memory."""
    model = Autoencoder().to(memory_format=layout)
    train(run, model, lambda: torch.randn(2, 3, 9, 9).to(memory_format=layout), clip=0.01)


# Attention


# Recurrence


@regime(to_root=[True, False])
def packed_sequences(run: Run, to_root: bool) -> None:
    """Packed sequences within a model, and as what a root takes and returns."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(6, 4, batch_first=True, proj_size=3)

        def forward(self, x: PackedSequence | torch.Tensor) -> PackedSequence | torch.Tensor:
            if isinstance(x, PackedSequence):
                return self.layers(x)[0]
            packed = pack_padded_sequence(x, [5, 3, 2], batch_first=True)
            return pad_packed_sequence(self.layers(packed)[0], batch_first=True)[0]

    model = Packed()
    for _ in run.rounds(model, 5):
        x = torch.randn(3, 5, 6)
        packed = pack_padded_sequence(x, [4, 4, 1], batch_first=True)
        out = model(packed).data if to_root else model(x)
        run.backward(out.square().mean())


# Parts that are idle in some steps


class Experts(nn.Module):
    """Each token goes to the one expert that the router prefers."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(6, experts)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(experts))
        self.head = nn.Linear(6, 2)
        self.idle: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for position, expert in enumerate(self.experts):
            if (here := chosen == position).any():
                out = out.index_put((here.nonzero()[:, 0],), expert(x[here]) * weight[here].unsqueeze(-1))
        self.idle = [f"experts.{i}" for i in range(len(self.experts)) if not (chosen == i).any()]
        return self.head(x + out)


@regime()
def mixture_of_experts_accumulated(run: Run) -> None:
    """An expert that is idle in one backward of a step and busy in the other has the gradient of the busy one."""
    model = Experts(6)
    for _ in run.rounds(model, 6, set_to_none=False):
        idle = set(parameters_of(model, "experts"))
        for _ in range(2):
            loss = model(batch(2)).square().mean()
            idle &= set(parameters_of(model, *model.idle))
            run.backward(loss, unused=idle)


@regime()
def alternating_branches(run: Run) -> None:
    """Two branches in turn without any `zero_grad` on the idle one: its last gradient stays out of every number."""
    model = Branches()
    for step in run.rounds(model, 8, clear=False):
        used, idle = ("right", "left") if step in (1, 2, 4, 7) else ("left", "right")
        model.get_submodule(used).zero_grad()
        run.backward(model(batch(), right=used == "right").square().mean(), unused=parameters_of(model, idle))


# Tied weights


@regime()
def tied_embedding(run: Run) -> None:
    """An embedding that is the decoder too has one gradient, of both uses, under its first name."""
    train(run, Language(), tokens, clip=0.05)


@regime(uses=[1, 2, 3])
def tied_layers(run: Run, uses: int) -> None:
    """A weight that two modules share, of which only the first, only the second or both are used."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).tanh() if uses & 1 else x
            return self.second(x) if uses & 2 else x

    train(run, Tied())


@regime()
def module_used_twice(run: Run) -> None:
    """One module under two names, and as a layer that is applied over and over, counts once."""

    class Universal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.again = self.layer
            self.norm = nn.LayerNorm(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.norm(x + self.again(self.layer(x).relu()))
            return x

    train(run, Universal(), of=lambda out: (out * torch.arange(6)).square().mean())


@regime()
def module_in_two_roots(run: Run) -> None:
    """A body that two watched models share stands under the first one's name, whichever of them ran."""
    body = nn.Linear(6, 6)
    models = {"a": nn.Sequential(body, nn.Tanh(), nn.Linear(6, 2)), "b": nn.Sequential(body, nn.ReLU(), nn.Linear(6, 3))}
    optimizer = torch.optim.SGD([*models["a"].parameters(), *models["b"][2].parameters()], lr=0.05)
    for step in run.rounds(models, 8, optimizer):
        loss = models["a"](batch()).square().mean() if step % 3 != 1 else torch.zeros(())
        if step % 3 != 0:
            loss = loss + models["b"](batch()).square().mean()
        run.backward(loss)


# Sparse gradients and complex numbers


class Sparse(nn.Module):
    """A sparse embedding, a sparse bag of another one, and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=True)
        self.bag = nn.EmbeddingBag(15, 4, sparse=True, mode="sum")
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat((self.words(x).mean(1), self.bag(x)), 1))


@regime(clear=[True, False])
def sparse_embeddings(run: Run, clear: bool) -> None:
    """Sparse gradients with repeated indices, of one backward or of two, beside an optimizer for what is dense."""
    model = Sparse()
    sparse = torch.optim.SparseAdam([model.words.weight, model.bag.weight], lr=0.01)
    dense = torch.optim.Adam(model.head.parameters(), lr=0.01)
    named = {"sparse": sparse, "dense": dense}
    for _ in run.rounds(model, 5, named, named=True):
        for _ in range(1 if clear else 2):
            run.backward(model(torch.randint(0, 6, (4, 3))).square().mean())


@regime()
def sparse_embedding_with_sgd(run: Run) -> None:
    """Sparse and dense gradients under one optimizer that takes both."""
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(12, 2))
    train(run, model, lambda: torch.randint(0, 5, (6, 3)))


class Pruned(nn.Module):
    """A layer whose weight is a sparse tensor itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(6, 6) * (torch.rand(6, 6) > 0.6)).to_sparse().coalesce())
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.sparse.mm(self.weight, x.T).T)


@regime(set_to_none=[True, False])
def sparse_weight(run: Run, set_to_none: bool) -> None:
    """A weight that is sparse is measured at each step."""
    model = Pruned()
    for _ in run.rounds(model, 20, sgd(model, lr=0.01), set_to_none=set_to_none):
        run.backward(model(batch()).square().mean())


class Complex(nn.Module):
    """A complex linear layer, a complex scale and a real layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5, dtype=torch.complex64)
        self.scale = nn.Parameter(torch.tensor(1.0 + 0.5j))
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.to(torch.complex64)) * self.scale.conj()
        return self.last(hidden.abs() + hidden.imag)


@regime()
def complex_parameters(run: Run) -> None:
    """Complex parameters beside real ones; a complex element is two real numbers in every metric."""
    model = Complex()
    for _ in run.rounds(model, 5):
        run.backward(model(batch()).square().mean())
        nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=False)  # the other way refuses a conjugated gradient


# Weights with the inputs first


@regime()
def inputs_before_outputs(run: Run) -> None:
    """Weights that are stored (inputs, outputs), as GPT-2's and those of experts: units are those of the outputs."""
    train(run, inputs_first(), clip=0.01)


# Parametrizations


# Parameters in unusual places and of unusual shapes


class Odd(nn.Module):
    """Parameters of the root itself, in lists and dictionaries, scalars, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.randn(6))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.matrices = nn.ParameterList(torch.randn(6, 6) / 3 for _ in range(2))
        self.named = nn.ParameterDict({"gain": torch.ones(6), "shift": torch.zeros(1)})
        self.out = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.offset
        for matrix in self.matrices:
            x = (x @ matrix).relu()
        x = x * self.named["gain"] + self.named["shift"] + self.nothing.sum()
        return self.out(x) / self.temperature


@regime()
def odd_parameters(run: Run) -> None:
    """Parameters of the root itself, scalars, empty ones, and those in lists and dictionaries."""
    train(run, Odd())


@regime()
def parameters_shared_as_views(run: Run) -> None:
    """Parameters that are views of one flat buffer, and gradients that are views of another."""
    model = Perceptron()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    gradient = torch.zeros_like(flat)
    optimizer = sgd(model)
    with torch.no_grad():
        start = 0
        for parameter in model.parameters():
            end = start + parameter.numel()
            parameter.data = flat[start:end].view_as(parameter)
            parameter.grad = gradient[start:end].view_as(parameter)
            start = end
    for _ in run.rounds(model, 5, optimizer, clear=False):
        gradient.zero_()
        run.backward(model(batch()).square().mean())


# Wrappers and companions


@regime(inner=[True, False])
def data_parallel(run: Run, inner: bool) -> None:
    """`nn.DataParallel` without a GPU, with either the wrapper or the model inside of it watched."""
    model = nn.DataParallel(Perceptron())
    for _ in run.rounds(model, 5, watched=model.module if inner else model):
        run.backward(model(batch()).square().mean())
