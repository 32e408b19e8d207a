"""Routers: loads of experts and entropies against a recount by NumPy, wherever the router's choices are seen."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.inspection.support import EachOperation, refuse_reads
from tests.matrix.compiled import EAGER, compilations, dynamo
from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors, values
from torch_grad_exporter import Exporter, start_exporter

Shown = dict[tuple[str, str], float]


class MixtralTopKRouter(nn.Module):
    """A router as those of Transformers, which also keeps what it has chosen in training."""

    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.num_experts, self.chosen = experts, chosen
        self.weight = nn.Parameter(torch.randn(experts, width))
        self.seen: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(x, self.weight)
        weights, ids = logits.softmax(-1).topk(self.chosen)
        # Not the second forward of a checkpoint.
        if self.training and torch._C._current_graph_task_id() == -1:
            self.seen.append((logits.detach().double().numpy(), ids.numpy().copy()))
        return logits, weights, ids


class DeepseekV3TopkRouter(MixtralTopKRouter):
    """One whose probabilities are sigmoids."""


class OtherTopKRouter(nn.Module):
    """One that does not say by what it makes probabilities. Not a subclass of those that do."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.num_experts = sizes[1]
        self.inner = MixtralTopKRouter(*sizes)

    @property
    def seen(self) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """What it has chosen."""
        return self.inner.seen

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return MixtralTopKRouter.forward(self.inner, x)


class Mixture(nn.Module):
    """A mixture of linear experts. `kind`: of its router; `after`: what else its forward does with the indices."""

    def __init__(self, kind: Callable[..., nn.Module] = MixtralTopKRouter) -> None:
        super().__init__()
        self.router = kind(6, 8, 2)
        self.experts = nn.Parameter(torch.randn(8, 6, 6) / 3)
        self.after: Callable[[torch.Tensor], object] = lambda _: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, ids = self.router(x)
        self.after(ids)
        return (torch.einsum("td,tkde->tke", x, self.experts[ids]) * weights[..., None]).sum(1)


def shown(exporter: Exporter, layer: str) -> Shown:
    """Return what the scrape has of a layer, by metric without its prefix, and expert."""
    return {
        (name.removeprefix("torch_moe_"), of.get("expert", "")): number
        for (name, labels), number in values(exporter).items()
        if name.startswith("torch_moe_") and (of := dict(labels)).get("layer") == layer
    }


def recounted(samples: list[np.ndarray[Any, Any]]) -> Shown:
    """Return what is to be shown of these counts by sample, shape (experts,) each, without an entropy of the router."""
    last, window = samples[-1], samples[-16:]
    recent = np.sum(window, axis=0)
    shares = np.array([load / recent.sum() for load in recent if load])
    loads = sorted(((load / recent.mean(), -expert) for expert, load in enumerate(recent)), reverse=True)
    expected = {
        ("experts", ""): len(last),
        ("load_imbalance_ratio", ""): last.max() / last.mean(),
        ("effective_experts", ""): np.exp(-(shares * np.log(shares)).sum()),
        **{("expert_load_ratio", str(-expert)): load for load, expert in {*loads[:3], *loads[-3:]}},
    }
    return expected | ({("dead_experts", ""): float((recent == 0).sum())} if len(window) == 16 else {})


def counts(ids: np.ndarray[Any, Any], experts: int = 8) -> np.ndarray[Any, Any]:
    """Return how often each expert is there, one after the other."""
    return np.array([(ids == expert).sum() for expert in range(experts)], dtype=np.float64)


def entropy(logits: np.ndarray[Any, Any], *, sigmoid: bool = False) -> float:
    """Return the mean entropy of the tokens' probabilities in float64."""
    scores = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits - logits.max(-1, keepdims=True))
    p = scores / scores.sum(-1, keepdims=True)
    return float(-(p * np.log(p)).sum(-1).mean())


def train(model: nn.Module, steps: int = 3, micro: int = 1, **options: object) -> Iterator[Exporter]:
    """Yield the exporter before each micro-batch's backward, and at the end once it is closed."""
    optimizer = sgd(model)
    with start_exporter(model, None, **{"every": 1, "routers": True, **options}) as exporter:
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(micro):
                loss = model(batch(12)).square().mean()
                yield exporter
                loss.backward()
            optimizer.step()
    assert errors(exporter) == {}
    yield exporter


def trained(model: nn.Module, **options: object) -> Exporter:
    """Train and return the closed exporter."""
    *_, exporter = train(model, **options)
    return exporter


@pytest.mark.parametrize("kind", [MixtralTopKRouter, DeepseekV3TopkRouter, OtherTopKRouter])
@pytest.mark.parametrize("steps", [3, 20])
def test_loads_are_those_of_a_recount(kind: Callable[..., nn.Module], steps: int) -> None:
    """Loads are exact over a round's micro-batches and the last 16 rounds; the entropy, where it is known, is that of float64."""
    torch.manual_seed(0)
    model = Mixture(kind)
    options = {} if kind is not OtherTopKRouter else {"exclude": "inner"}
    exporter = trained(model, steps=steps, micro=2, **options)
    seen = model.router.seen
    rounds = [counts(np.concatenate([ids for _, ids in seen[at : at + 2]])) for at in range(0, len(seen), 2)]
    assert len(rounds) == steps
    here = shown(exporter, "router")
    got = here.pop(("router_entropy", ""), None)
    assert here == pytest.approx(recounted(rounds), rel=1e-12)
    logits = np.concatenate([logits for logits, _ in seen[-2:]])
    known = None if kind is OtherTopKRouter else pytest.approx(entropy(logits, sigmoid=kind is DeepseekV3TopkRouter), abs=1e-5)
    assert got == known


def test_dead_experts() -> None:
    """An expert that the router cannot choose is dead after 16 samples, and lives again with its first token."""
    torch.manual_seed(0)
    model = Mixture()
    with torch.no_grad():
        model.router.weight[:3] = -1e-3 * model.router.weight[3:6]
    kept, seen = model.router.forward, []

    def never(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, ids = kept(x)
        ids = ids.where(ids > 1, 7) if len(seen) < 20 else ids
        seen.append(ids)
        return logits, weights, ids

    model.router.forward = never
    dead = [shown(exporter, "router").get(("dead_experts", "")) for exporter in train(model, steps=20)]
    assert dead[0] is None
    assert dead[-1] == (counts(np.concatenate([ids.numpy() for ids in seen[-16:]])) == 0).sum() >= 2


def test_training_is_unchanged() -> None:
    """Parameters are bit-identical with routers=True, and no operation waits for a device."""
    after = []
    for options in ({"routers": False}, {"routers": True}):
        torch.manual_seed(0)
        model = Mixture()
        run = train(model, steps=4, **options)
        with EachOperation(refuse_reads):
            for _ in range(4):
                next(run)
        deque(run)
        after.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*after, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_checkpoint_counts_once(reentrant: bool, own: bool) -> None:
    """The second forward of a checkpoint does not count, by hooks or by the user's calls."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mixture = nn.Linear(6, 6), Mixture()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.mixture, self.first(x), use_reentrant=reentrant)

    torch.manual_seed(0)
    model = Checkpointed()
    run = train(model, routers=not own)
    exporter = next(run)
    model.mixture.after = (lambda ids: exporter.router("mine", ids, experts=8)) if own else lambda _: None
    deque(run)
    rounds = [counts(ids) for _, ids in model.mixture.router.seen[int(own) :]]
    here = shown(exporter, "mine" if own else "mixture.router")
    here.pop(("router_entropy", ""), None)
    assert here == pytest.approx(recounted(rounds), rel=1e-12)


def test_a_selective_checkpoint_keeps_nothing_of_it() -> None:
    """Operations on what a loop gives are not among those that a checkpoint keeps for its second forward."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)

        def part(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            exporter.router("mine", hidden.argmax(dim=1), experts=8)
            return torch.where(hidden > 0, hidden, 0.1 * hidden).square()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keep = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
            return self.second(checkpoint(self.part, x, use_reentrant=False, context_fn=keep))

    torch.manual_seed(0)
    model = Chosen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with start_exporter(model, None, every=1) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 6)).square().mean().backward()
            optimizer.step()
        assert shown(exporter, "mine")["experts", ""] == 8
        assert errors(exporter) == {}


@pytest.mark.parametrize("gradients", [False, True])
def test_evaluations_do_not_count(gradients: bool) -> None:
    """Forwards of an evaluation, with gradients or without, count neither by hooks nor by the user's calls."""
    torch.manual_seed(0)
    model = Mixture()
    optimizer = sgd(model)
    with start_exporter(model, None, every=1, routers=True) as exporter:
        model.after = lambda ids: exporter.router("mine", ids, experts=8)
        for _ in range(3):
            model.train()
            model(batch(12)).square().mean().backward()
            optimizer.step()
            model.eval()
            with torch.set_grad_enabled(gradients):
                model(batch(50))
    rounds = [counts(ids) for _, ids in model.router.seen]
    for layer in ("router", "mine"):
        here = shown(exporter, layer)
        here.pop(("router_entropy", ""), None)
        assert here == pytest.approx(recounted(rounds), rel=1e-12)


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("name", ["tokens_per_expert", "local_tokens_per_expert"])
def test_modules_that_count_by_themselves(clears: bool, name: str) -> None:
    """Of a module with a known buffer the tokens of a round are shown, whether the buffer is cleared each step or never."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Mixture())
    mixture = model[1]
    mixture.register_buffer(name, torch.zeros(8), persistent=False)
    buffer = getattr(mixture, name)
    mixture.after = lambda ids: buffer.add_(torch.bincount(ids.reshape(-1), minlength=8))
    optimizer = sgd(model)
    if clears:
        optimizer.register_step_pre_hook(lambda *_: buffer.__setitem__(slice(None), 0.0))
    with start_exporter(model, None, every=1, routers=True) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                model(batch(12)).square().mean().backward()
            optimizer.step()
    seen = [ids for _, ids in mixture.router.seen]
    rounds = [counts(np.concatenate(seen[at : at + 2])) for at in (0, 2, 4)]
    assert shown(exporter, "1") == pytest.approx(recounted(rounds), rel=1e-12)
    assert shown(exporter, "1.router") == {}


def test_a_loop_gives_counts_or_indices() -> None:
    """Counts and indices of any shape and whole type add up over a round, from any thread; others than experts do not count."""
    torch.manual_seed(0)
    model = Perceptron()
    chosen = [torch.randint(-1, 5, (3, 4), dtype=torch.int32) for _ in range(6)]
    copies = [ids.clone() for ids in chosen]
    run = train(model, steps=3, micro=2, routers=False)
    for ids, exporter in zip([*chosen, chosen[0]], run, strict=True):
        if ids is chosen[0] and not copies[0].equal(ids):
            break  # the exporter is closed
        tokens = torch.tensor(counts(ids.numpy(), 4), dtype=torch.float16)
        threads = [
            threading.Thread(target=exporter.router, args=("indices", ids, 4)),
            threading.Thread(target=exporter.router, args=("counts", tokens)),
            threading.Thread(target=exporter.router, args=("whole", tokens.long()[:, None][:, 0])),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ids.fill_(0)
        tokens.fill_(0)
        exporter.router("empty", ids[:0], experts=4)
    rounds = [counts(torch.cat(copies[at : at + 2]).numpy(), 4) for at in (0, 2, 4)]
    for name in ("indices", "counts", "whole"):
        assert shown(exporter, name) == pytest.approx(recounted(rounds), rel=1e-12)
    assert shown(exporter, "empty") == {}


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ((3, torch.ones(1)), TypeError, r"name=3\): expected a name"),
        (("", torch.ones(1)), ValueError, "expected a name of 1 to"),
        (("x", [1, 2]), TypeError, r"\[1, 2\]\): expected a tensor"),
        (("x", torch.ones(2, dtype=torch.bool)), TypeError, "torch.bool"),
        (("x", torch.ones(2, 2)), ValueError, r"got \(2, 2\); for indices"),
        (("x", torch.ones(3), 3), TypeError, "expected indices, got a tensor of torch.float32"),
        (("x", torch.ones(2), 0), ValueError, "experts=0"),
        (("x", torch.ones(2), 2.0), TypeError, "experts=2.0"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], kind: type[Exception], said: str) -> None:
    """The first call raises an error that names the argument and its value; later ones count it."""
    model = Perceptron()
    with start_exporter(model, None, every=1) as exporter:
        with pytest.raises(kind, match=said):
            exporter.router(*arguments)
        exporter.router("x", torch.ones(4))
        exporter.router(*arguments)
        assert errors(exporter) == {"routers": 1}
    exporter.router(*arguments)


def test_counts_that_are_none_leave_the_layer(caplog: pytest.LogCaptureFixture) -> None:
    """NaN, negative and zero counts show nothing; of 103 names a hundred are shown, which is said once."""
    for exporter in train(Perceptron(), routers=False):
        for name, number in (("nan", float("nan")), ("negative", -1.0), ("zero", 0.0), ("one", 1.0)):
            exporter.router(name, torch.full((4,), number))
        for extra in range(99):
            exporter.router(f"name {extra}", torch.ones(4))
    assert not any(shown(exporter, name) for name in ("nan", "negative", "zero", "name 98"))
    assert shown(exporter, "one") == recounted([np.ones(4)] * 3)
    assert shown(exporter, "name 95")
    assert caplog.text.count("only the first 100 names are shown; 'name 96' is left out") == 1


def test_what_is_not_known_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A router that returns something else is absent, like a model without one, and each is said once."""

    class StrangeRouter(MixtralTopKRouter):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, weights, ids = super().forward(x)
            return ids, weights, logits

    class Strange(Mixture):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ids, weights, _ = self.router(x)
            return (torch.einsum("td,tkde->tke", x, self.experts[ids]) * weights[..., None]).sum(1)

    exporter = trained(Strange(StrangeRouter))
    assert shown(exporter, "router") == {}
    assert caplog.text.count("the router router is not shown, since a StrangeRouter returns no known form") == 1
    trained(Perceptron())
    assert caplog.text.count("finds no router in the model") == 1


def test_compiled_code(caplog: pytest.LogCaptureFixture) -> None:
    """Compiled routers are absent, which is said once; in compiled code a call breaks no graph; counters are shown."""
    with dynamo(), torch._dynamo.config.patch(error_on_recompile=True):
        torch.manual_seed(0)
        model = Mixture(OtherTopKRouter)
        model.router.forward = lambda x: (x, *x.topk(2))
        model.register_buffer("tokens_per_expert", torch.zeros(8), persistent=False)
        inner = nn.Sequential(nn.Linear(6, 6), model)
        compiled = torch.compile(Outer(inner), backend=EAGER, fullgraph=True)
        optimizer = sgd(inner)
        with start_exporter(compiled, None, every=1, routers=True) as exporter:
            model.after = lambda ids: exporter.router("mine", ids, experts=8)
            for _ in range(4):
                optimizer.zero_grad()
                compiled(batch(12)).square().mean().backward()
                optimizer.step()
            assert (compilations()["graphs"], compilations()["breaks"], compilations()["recompilations"]) == (1, 0, 0)
        assert shown(exporter, "mine") == {}
        assert shown(exporter, "inner.1")[("experts", "")] == 8
        assert errors(exporter) == {}


class Outer(nn.Module):
    """Counts the tokens of its mixture, within compiled code."""

    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixture = self.inner[1]
        x = self.inner[0](x)
        with torch.no_grad():
            mixture.tokens_per_expert.add_(nn.functional.one_hot(x.topk(2)[1], 8).sum((0, 1)))
        return mixture(x)
