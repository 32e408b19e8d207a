"""Every regime of training: what a scrape shows against a float64 record kept in the loop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from models import Perceptron, batch
from record import Recorder, norm
from scrape import errors, key, mode, value, values
from tools import eventually
from torch.utils.checkpoint import checkpoint

from torch_grad_exporter import Exporter, start_exporter

NONFINITE = "torch_grad_nonfinite_steps_total"
ELEMENTS = "torch_grad_nonfinite_elements_total"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@contextlib.contextmanager
def watching(model: torch.nn.Module | Mapping[str, torch.nn.Module], **options: object) -> Iterator[Exporter]:
    """An exporter that samples every round and serves nothing."""
    with start_exporter(model, port=None, **{"every": 1, **options}) as exporter:
        yield exporter


def sgd(model: torch.nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    """The plainest optimizer."""
    return torch.optim.SGD(model.parameters(), lr=lr)


# Plain loops


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_plain_loop(kind: type[torch.optim.Optimizer], set_to_none: bool) -> None:
    """After every step of a plain loop each number is that of this step."""
    model = Perceptron()
    optimizer = kind(model.parameters(), lr=0.01)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            record.backward(model(batch()).square().mean())
            record.step(optimizer)
            record.check(exporter)
        assert mode(exporter) == "output"


def test_zero_grad_after_the_step() -> None:
    """A loop that clears gradients right after the step shows the same numbers."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(4):
            record.backward(model(batch()).square().mean())
            record.step(optimizer)
            optimizer.zero_grad()
            record.check(exporter)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation(set_to_none: bool) -> None:
    """Three backwards to a step are one sample of the accumulated gradient."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(4):
            for _ in range(3):
                record.backward(model(batch()).square().mean())
            record.step(optimizer)
            optimizer.zero_grad(set_to_none=set_to_none)
            record.check(exporter)


def test_accumulation_with_a_shorter_last_round() -> None:
    """An epoch of 4, 4 and 1 micro-batches to a step is three samples, the short round too."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for micro_batches in (4, 4, 1, 4, 4, 1, 4, 2):
            for _ in range(micro_batches):
                record.backward(model(batch()).square().mean())
            record.step(optimizer)
            optimizer.zero_grad()
            record.check(exporter)


# Clipping


def test_no_clipping_gives_a_coefficient_of_exactly_one() -> None:
    """Where nothing is clipped the coefficient is 1 and not nearly 1, and no step counts as clipped."""
    model = Perceptron(40, 64, 10)
    optimizer = sgd(model)
    with watching(model) as exporter:
        for _ in range(20):
            optimizer.zero_grad()
            model(batch(8, 40)).square().mean().backward()
            optimizer.step()
            assert value(exporter, "torch_grad_clip_coefficient") == 1.0
        assert value(exporter, "torch_grad_clipped_steps_total") == 0
        assert value(exporter, "torch_grad_global_norm_after_clip") == value(exporter, "torch_grad_global_norm")


@pytest.mark.parametrize("looking", [True, False], ids=["scraped each step", "scraped at the end"])
def test_clip_by_norm(looking: bool) -> None:
    """Norms are those before `clip_grad_norm_`, the coefficient is its factor, clipped steps are counted."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for step in range(20):
            optimizer.zero_grad()
            record.backward(model(batch()).square().mean() * (10.0 if step % 3 else 0.001))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            record.step(optimizer)
            if looking:
                record.check(exporter, rel=1e-4)
        record.check(exporter, rel=1e-4)
        assert 0 < (value(exporter, "torch_grad_clipped_steps_total") or 0) < 20


def test_clip_by_value() -> None:
    """Clipping by value shows the norm after it and its ratio, also where only some parameters are cut."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(12):
            optimizer.zero_grad()
            record.backward(model(batch()).square().sum() * 10)
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            record.step(optimizer)
            record.check(exporter)


def test_clip_by_value_now_and_then() -> None:
    """A clip by value that begins after calm steps shows a right coefficient or none, and is counted."""
    model = Perceptron()
    optimizer = sgd(model, lr=1e-4)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for step in range(40):
            optimizer.zero_grad()
            record.backward(model(batch()).square().sum() * (1.0 if step % 5 == 4 else 1e-6))
            torch.nn.utils.clip_grad_value_(model.parameters(), 2.0)
            record.step(optimizer)
            shown = value(exporter, "torch_grad_clip_coefficient")
            expected = record.expected()[key("torch_grad_clip_coefficient")]
            assert shown is None or shown == pytest.approx(expected, rel=1e-4), f"step {step}"
            clipped = key("torch_grad_clipped_steps_total")
            assert values(exporter)[clipped] == record.expected()[clipped], f"step {step}"


def test_clip_per_group() -> None:
    """Clipping one parameter group and not the other shows the ratio of the whole norms."""
    model = Perceptron()
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.second.parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.05)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(12):
            optimizer.zero_grad()
            record.backward(model(batch()).square().sum())
            torch.nn.utils.clip_grad_norm_(model.second.parameters(), 0.5)
            record.step(optimizer)
            record.check(exporter)


def test_a_nan_is_counted_before_clipping_spreads_it() -> None:
    """One NaN element is counted as one, though `clip_grad_norm_` makes every gradient NaN."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        model(batch()).square().mean().backward()
        model.second.bias.grad[0] = math.nan  # after the backward: not seen
        optimizer.zero_grad()
        model.second.bias.register_hook(lambda g: torch.cat((g[:1] * math.nan, g[1:])))
        model(batch()).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert value(exporter, ELEMENTS, layer="second", kind="nan") == 1
        assert value(exporter, ELEMENTS, layer="first", kind="nan") == 0
        assert value(exporter, NONFINITE, outcome="stepped") == 1
        assert math.isnan(value(exporter, "torch_grad_norm", layer="second") or 0)
        assert math.isfinite(value(exporter, "torch_grad_norm", layer="first") or math.nan)


# Closures


def test_closure_with_sgd() -> None:
    """`SGD.step(closure)` shows the gradient that its closure computed."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(5):
            inputs = batch()

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                record.backward(loss)
                record.stepping()
                return loss

            optimizer.step(closure)
            record.check(exporter)


def test_closure_as_lightning_has_it() -> None:
    """A closure that clears, runs forward and backward and clips shows norms of before and after clipping."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(12):
            inputs = batch()

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                loss = model(inputs).square().mean() * 20
                optimizer.zero_grad()
                record.backward(loss)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                record.stepping()
                return loss

            optimizer.step(closure)
            record.check(exporter, rel=1e-4)
        assert value(exporter, "torch_grad_clipped_steps_total") == 12


def test_closure_with_lbfgs() -> None:
    """LBFGS calls its closure many times in a step: that is one step, one sample, and no skipped step."""
    model = Perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6)
    inputs = batch()
    last: dict[str, float] = {}
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        for layer in ("first", "second"):
            last[layer] = norm(p.grad.double() for p in getattr(model, layer).parameters())
        return loss

    with watching(model) as exporter:
        for _ in range(3):
            optimizer.step(closure)
        assert calls > 6
        for layer, expected in last.items():
            assert value(exporter, "torch_grad_norm", layer=layer) == pytest.approx(expected, rel=1e-5)
        assert value(exporter, "torch_train_steps_total", optimizer="LBFGS") == 3
        assert value(exporter, "torch_train_backward_passes_total") == calls
        assert value(exporter, "torch_train_skipped_steps_total") == 0
        assert value(exporter, "torch_grad_captures_total", layer="first") == 3
        assert errors(exporter) == {}


# Several optimizers, several models


def test_two_optimizers_share_each_backward() -> None:
    """With weights in one optimizer and biases in another, each shows the norm of what it owns."""
    model = Perceptron()
    weights = torch.optim.SGD([model.first.weight, model.second.weight], lr=0.01)
    biases = torch.optim.AdamW([model.first.bias, model.second.bias], lr=0.01)
    record = Recorder(model, {"SGD": weights, "AdamW": biases})
    with watching(model) as exporter:
        for _ in range(4):
            weights.zero_grad()
            biases.zero_grad()
            record.backward(model(batch()).square().mean())
            record.step(weights, "SGD")
            record.step(biases, "AdamW")
        record.check(exporter)


def test_two_named_optimizers_share_each_backward() -> None:
    """Optimizers that were named at the start are told apart from the first sample on."""
    model = Perceptron()
    weights = torch.optim.SGD([model.first.weight, model.second.weight], lr=0.01)
    biases = torch.optim.SGD([model.first.bias, model.second.bias], lr=0.01)
    named = {"weights": weights, "biases": biases}
    record = Recorder(model, named)
    with watching(model, optimizers=named) as exporter:
        for _ in range(4):
            weights.zero_grad()
            biases.zero_grad()
            record.backward(model(batch()).square().mean())
            torch.nn.utils.clip_grad_norm_([model.first.weight, model.second.weight], 0.01)
            record.step(weights, "weights")
            record.step(biases, "biases")
            record.check(exporter, rel=1e-4)


class Gan:
    """A generator and a discriminator with an optimizer each; `record` sees both."""

    def __init__(self) -> None:
        self.generator = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        self.discriminator = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        self.models = {"generator": self.generator, "discriminator": self.discriminator}
        self.of_generator = torch.optim.SGD(self.generator.parameters(), lr=0.01)
        self.of_discriminator = torch.optim.Adam(self.discriminator.parameters(), lr=0.01)
        self.names = {"SGD": self.of_generator, "Adam": self.of_discriminator}
        self.record = Recorder(self.models, self.names)

    def train_discriminator(self) -> None:
        self.of_discriminator.zero_grad()
        fake = self.generator(torch.randn(5, 3)).detach()
        loss = self.discriminator(fake).mean() - self.discriminator(torch.randn(5, 4)).mean()
        self.record.backward(loss, unused=[f"generator.{n}" for n, _ in self.generator.named_parameters()])
        self.record.step(self.of_discriminator, "Adam")

    def train_generator(self) -> None:
        self.of_generator.zero_grad()
        self.record.backward(-self.discriminator(self.generator(torch.randn(5, 3))).mean())
        self.record.step(self.of_generator, "SGD")


@pytest.mark.parametrize("critics", [1, 2, 3, 5])
@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
def test_gan(critics: int, named: bool) -> None:
    """Of each round of a GAN only what the stepping optimizer owns is published, from the first round on."""
    gan = Gan()
    with watching(gan.models, optimizers=gan.names if named else None) as exporter:
        for _ in range(4):
            for _ in range(critics):
                gan.train_discriminator()
            gan.train_generator()
    gan.record.check(exporter)  # after `close`, since the last round is open until the next backward


def test_gan_that_begins_with_its_generator() -> None:
    """Before the discriminator's optimizer has stepped, the generator's norm is of the generator alone."""
    gan = Gan()
    with watching(gan.models) as exporter:
        for _ in range(3):
            gan.train_generator()
        for _ in range(3):
            gan.train_discriminator()
            gan.train_generator()
    gan.record.check(exporter)


def test_gan_that_pauses_after_its_generator() -> None:
    """A pause after the generator's step shows that step, and nothing of what its backward did to the discriminator."""
    gan = Gan()
    with watching(gan.models, optimizers=gan.names) as exporter:
        for _ in range(3):
            gan.train_discriminator()
            gan.train_generator()
        captures = key("torch_grad_captures_total", layer="generator.0")
        assert eventually(lambda: values(exporter)[captures] == 3, 10)
        gan.record.check(exporter)
        gan.train_discriminator()
        gan.record.check(exporter)


@pytest.mark.parametrize("critics", [1, 2, 3, 5])
def test_gan_sampled_every_fourth_round(critics: int) -> None:
    """Whatever the pattern of a GAN's rounds, every fourth of each optimizer is sampled, none is starved."""
    gan = Gan()
    rounds = 16
    with watching(gan.models, every=4) as exporter:
        for _ in range(rounds):
            for _ in range(critics):
                gan.train_discriminator()
            gan.train_generator()
        shown = values(exporter)
        for name, layer, steps in (("SGD", "generator.0", rounds), ("Adam", "discriminator.0", rounds * critics)):
            assert shown[key("torch_train_steps_total", optimizer=name)] == steps
            captures = shown[key("torch_grad_captures_total", layer=layer)]
            # One more for the first round, which is always sampled, and one or two while the pattern is learnt.
            assert steps / 4 - 1 <= captures <= steps, (name, captures)
            assert shown[key("torch_grad_sample_step", optimizer=name)] > steps - 4 - critics
        assert errors(exporter) == {}


# Frozen, tied, unused


def test_frozen_parameters_are_not_shown() -> None:
    """A frozen layer has no series, and the others are right."""
    model = Perceptron()
    model.first.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            record.backward(model(batch()).square().mean())
            record.step(optimizer)
            record.check(exporter)
        assert value(exporter, "torch_grad_norm", layer="first") is None


def test_parameters_unfrozen_in_the_run() -> None:
    """A layer that is unfrozen in the run is shown from the next sample on."""
    model = Perceptron()
    model.first.requires_grad_(False)
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for step in range(6):
            if step == 3:
                model.first.requires_grad_(True)
            optimizer.zero_grad()
            record.backward(model(batch()).square().mean())
            record.step(optimizer)
            record.check(exporter)
        assert value(exporter, "torch_grad_captures_total", layer="first") == 3


def test_parameters_frozen_in_the_run() -> None:
    """A layer that is frozen in the run leaves the scrape instead of standing still in it."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for step in range(6):
            if step == 3:
                model.first.requires_grad_(False)
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
        assert value(exporter, "torch_grad_norm", layer="first") is None
        assert value(exporter, "torch_grad_captures_total", layer="second") == 6
        assert errors(exporter) == {}


def test_tied_parameters_count_once() -> None:
    """A weight that two modules share stands under its first name and enters the norm once."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
    model[2].weight = model[0].weight
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            record.backward(model(batch()).square().mean())
            record.step(optimizer)
            record.check(exporter)


class Branches(torch.nn.Module):
    """Two branches, one of which each forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Linear(6, 3)
        self.right = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, *, right: bool) -> torch.Tensor:
        return self.right(x) if right else self.left(x)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_unused_parameters_are_missing(set_to_none: bool) -> None:
    """Parameters that a backward did not reach are counted as missing, and a stale `.grad` is not their gradient."""
    model = Branches()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for right in (False, True, True, False, True):
            optimizer.zero_grad(set_to_none=set_to_none)
            other = "left" if right else "right"
            record.backward(model(batch(), right=right).square().mean(), unused=[f"{other}.weight", f"{other}.bias"])
            record.step(optimizer)
            shown = values(exporter)
            assert shown[key("torch_grad_missing_parameters", layer=other)] == 2
            assert shown[key("torch_grad_missing_parameters", layer="right" if right else "left")] == 0
        assert value(exporter, "torch_grad_captures_total", layer="left") == 2
        assert value(exporter, "torch_grad_captures_total", layer="right") == 3
        assert errors(exporter) == {}


def test_stale_gradients_of_unused_parameters_do_not_count() -> None:
    """Without `zero_grad` on an unused branch its old `.grad` stays out of the global norm of the backward."""
    model = Branches()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        record.backward(model(batch(), right=False).square().mean())
        record.step(optimizer)
        for _ in range(3):
            model.right.zero_grad()
            record.backward(model(batch(), right=True).square().mean(), unused=["left.weight", "left.bias"])
            record.step(optimizer)
        # What the optimizer saw includes the stale part here, so what compares with it is left out.
        clipping = ("torch_grad_global_norm_after_clip", "torch_grad_clip_coefficient", "torch_grad_clipped_steps_total")
        record.check(exporter, without=clipping)
        assert value(exporter, "torch_grad_missing_parameters", layer="left") == 2


# Backwards that do not run through the root


def test_submodules_called_directly() -> None:
    """A loop that never calls the root is captured by rung `parameter`, right from then on."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for step in range(8):
            optimizer.zero_grad()
            record.backward(model.second(model.first(batch()).relu()).square().mean())
            record.step(optimizer)
            if step == 3:
                assert mode(exporter) == "parameter"
                before = value(exporter, "torch_grad_captures_total", layer="first") or 0
        assert value(exporter, "torch_grad_captures_total", layer="first") == before + 4
        counted = ("_captures_total", "_accumulated_total", "_count", "_sum", "_passes_total")
        record.check(exporter, without=[k[0] for k in record.expected() if k[0].endswith(counted)])


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
def test_auxiliary_backward_beside_the_roots(first: bool) -> None:
    """A backward through a submodule alone, before or after the one through the root, belongs to the sample."""
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(6, 6), "head": torch.nn.Linear(6, 3), "aux": torch.nn.Linear(6, 2)})

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["head"](self.parts["body"](x))

    whole = Whole()
    optimizer = sgd(whole)
    record = Recorder(whole, optimizer)
    with watching(whole) as exporter:
        for _ in range(6):
            optimizer.zero_grad()

            def auxiliary() -> None:
                record.backward(whole.parts["aux"](whole.parts["body"](batch())).square().mean())

            if first:
                auxiliary()
            record.backward(whole(batch()).square().mean())
            if not first:
                auxiliary()
            record.step(optimizer)
        shown, expected = values(exporter), record.expected()
        for layer in ("parts.body", "parts.head", "parts.aux"):
            for name in ("torch_grad_norm", "torch_grad_missing_parameters"):
                assert shown.get(key(name, layer=layer)) == pytest.approx(expected[key(name, layer=layer)], rel=1e-5), layer
        assert shown[key("torch_grad_global_norm")] == pytest.approx(expected[key("torch_grad_global_norm")], rel=1e-5)
        assert errors(exporter) == {}


def test_gradients_written_by_hand() -> None:
    """Where neither the output nor a parameter sees a backward, gradients are read at the step: rung `optimizer`."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for _ in range(10):
            parameters = list(model.parameters())
            found = torch.autograd.grad(model(batch()).square().mean(), parameters)
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.grad = gradient * 3
            expected = norm(g.double() * 3 for g in found)
            optimizer.step()
        assert mode(exporter) == "optimizer"
        assert value(exporter, "torch_grad_global_norm") == pytest.approx(expected, rel=1e-5)
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 10
        assert value(exporter, "torch_train_skipped_steps_total") == 0
        assert errors(exporter) == {}


@pytest.mark.parametrize("every", [1, 4])
def test_accumulation_and_skips_without_the_root(every: int) -> None:
    """On rung `parameter` accumulations, skipped steps and clipping are told apart as on rung `output`."""
    model = Perceptron()
    optimizer = sgd(model)

    def backward(factor: float = 1.0) -> None:
        (model.second(model.first(batch()).relu()).square().mean() * factor).backward()

    with watching(model, every=every) as exporter:
        for _ in range(6):
            optimizer.zero_grad()
            backward()
            optimizer.step()
        assert mode(exporter) == "parameter"
        before = values(exporter)
        for step in range(16):
            optimizer.zero_grad()
            for _ in range(3):
                backward()
            if step % 4 != 1:
                optimizer.step()
        after = values(exporter)
        passes, skipped = key("torch_train_backward_passes_total"), key("torch_train_skipped_steps_total")
        assert after[passes] - before[passes] == 48
        assert after[skipped] - before[skipped] == 4
        if every == 1:
            captures = key("torch_grad_captures_total", layer="first")
            assert after[captures] - before[captures] == 16
        assert errors(exporter) == {}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_on_rounds_that_are_not_sampled(set_to_none: bool) -> None:
    """With `every=4` accumulations are neither skipped steps nor samples of their own."""
    model = Perceptron()
    optimizer = sgd(model)
    expected = []
    with watching(model, every=4) as exporter:
        for _ in range(16):
            optimizer.zero_grad(set_to_none=set_to_none)
            for _ in range(3):
                model(batch()).square().mean().backward()
            expected.append(norm(p.grad.double() for p in model.parameters()))
            optimizer.step()
        assert value(exporter, "torch_train_backward_passes_total") == 48
        assert value(exporter, "torch_train_skipped_steps_total") == 0
        assert value(exporter, "torch_grad_captures_total", layer="first") == 4  # one of each four rounds
        sampled = int(value(exporter, "torch_grad_sample_step") or 0)
        assert sampled in (13, 14, 15, 16)
        assert value(exporter, "torch_grad_global_norm") == pytest.approx(expected[sampled - 1], rel=1e-5)


# Outputs


@dataclass
class Output:
    """An output as libraries have it."""

    loss: torch.Tensor
    logits: torch.Tensor


class Plain:
    """An output that is neither a mapping nor a dataclass."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


OUTPUTS = {
    "dict": (lambda loss, out: {"loss": loss, "more": {"logits": out}}, lambda o: o["loss"]),
    "tuple": (lambda loss, out: (out, (loss, None)), lambda o: o[1][0]),
    "list": (lambda loss, out: [loss, out], lambda o: o[0]),
    "dataclass": (Output, lambda o: o.loss),
    "object": (lambda loss, out: Plain(loss), lambda o: o.loss),
}


@pytest.mark.parametrize("shape", OUTPUTS)
def test_output_structures(shape: str) -> None:
    """The capture finds the backward whatever the model returns, from the first step on where it returns tensors."""
    wrap, unwrap = OUTPUTS[shape]

    class Model(Perceptron):
        def forward(self, x: torch.Tensor) -> object:
            out = super().forward(x)
            return wrap(out.square().mean(), out)

    model = Model()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(5):
            optimizer.zero_grad()
            loss = unwrap(model(batch()))
            record.backward(loss)
            record.step(optimizer)
        record.check(exporter)
        if shape in ("dict", "dataclass", "object"):
            assert value(exporter, "torch_train_loss") == pytest.approx(loss.item(), rel=1e-6)


# Other uses of autograd


def test_gradient_penalty_is_no_backward() -> None:
    """`torch.autograd.grad(create_graph=True)` in the loop is not counted and does not disturb the capture."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(5):
            inputs = batch().requires_grad_()
            out = model(inputs)
            (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
            optimizer.zero_grad()
            record.backward(out.square().mean() + (slope.norm(dim=1) - 1).square().mean(), unused=["second.bias.none"])
            record.step(optimizer)
            record.check(exporter)


def test_gradient_penalty_on_every_fourth_round() -> None:
    """On rounds that are not sampled `torch.autograd.grad` is told from a backward just as well."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model, every=4) as exporter:
        for _ in range(16):
            inputs = batch().requires_grad_()
            out = model(inputs)
            (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
            optimizer.zero_grad()
            (out.square().mean() + slope.square().mean()).backward()
            optimizer.step()
        assert value(exporter, "torch_train_backward_passes_total") == 16
        assert value(exporter, "torch_train_skipped_steps_total") == 0


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_backward_with_create_graph() -> None:
    """`backward(create_graph=True)` gives gradients with a graph; they are measured all the same."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            record.backward(model(batch()).square().mean(), create_graph=True)
            record.step(optimizer)
            record.check(exporter)
        optimizer.zero_grad()


def test_retain_graph() -> None:
    """Two backwards through one graph are two backwards and one sample."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(4):
            optimizer.zero_grad()
            out = model(batch())
            record.backward(out.square().mean(), retain_graph=True)
            record.backward(out.abs().mean())
            record.step(optimizer)
            record.check(exporter)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    """Activation checkpointing, whose backward runs forwards or whole backwards inside, changes no number."""

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Linear(6, 8)
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
            self.head = torch.nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(lambda y, block=block: block(y).tanh(), x, use_reentrant=reentrant)
            return self.head(x)

    model = Checkpointed()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(5):
            optimizer.zero_grad()
            record.backward(model(batch()).square().mean())
            record.step(optimizer)
            record.check(exporter)


@pytest.mark.parametrize("reentrant", [True, False])
def test_whole_model_checkpointed(reentrant: bool) -> None:
    """A root that is itself called through a checkpoint, so that its forward runs within the backward."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(6):
            optimizer.zero_grad()
            record.backward(checkpoint(model, batch().requires_grad_(), use_reentrant=reentrant).square().mean())
            record.step(optimizer)
        shown, expected = values(exporter), record.expected()
        for one in (key("torch_grad_norm", layer="first"), key("torch_grad_global_norm"), key("torch_train_skipped_steps_total")):
            assert shown.get(one) == pytest.approx(expected[one], rel=1e-5), one
        assert errors(exporter) == {}


def test_a_backward_that_raises() -> None:
    """A backward that raises and is caught leaves nothing stuck: the next steps are right."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)

    def fail(_gradient: torch.Tensor) -> None:
        raise RuntimeError("the user's own")

    with watching(model) as exporter:
        for step in range(6):
            optimizer.zero_grad()
            hidden = model.first(batch()).relu() if step == 1 else None
            out = model(batch()) if hidden is None else model(batch()) + 0 * model.second(hidden)
            if step in (1, 3):
                out.register_hook(lambda g: g)
                middle = out.square()
                handle = model.first.weight.register_hook(fail)
                with pytest.raises(RuntimeError, match="the user's own"):
                    middle.mean().backward()
                handle.remove()
                continue
            record.backward(out.square().mean())
            record.step(optimizer)
            record.check(exporter)


# Optimizers of all sorts


def test_optimizer_that_calls_super_step() -> None:
    """A subclass whose `step` calls `super().step()` fires the hooks twice and counts once."""

    class Twice(torch.optim.SGD):
        def step(self, closure: object = None) -> object:
            return super().step(closure)

    model = Perceptron()
    optimizer = Twice(model.parameters(), lr=0.05)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(4):
            optimizer.zero_grad()
            record.backward(model(batch()).square().mean())
            record.step(optimizer)
            record.check(exporter)
        assert value(exporter, "torch_train_steps_total", optimizer="Twice") == 4


def test_optimizer_around_another() -> None:
    """A wrapper that owns the parameters of the optimizer it calls is captured once a round."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: object = None) -> object:
            return self.inner.step(closure)

    model = Perceptron()
    optimizer = Wrapper(sgd(model))
    with watching(model) as exporter:
        for _ in range(5):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            expected = norm(p.grad.double() for p in model.parameters())
            optimizer.step()
        shown = values(exporter)
        norms = [v for k, v in shown.items() if k[0] == "torch_grad_global_norm"]
        assert norms == [pytest.approx(expected, rel=1e-5)]
        assert shown[key("torch_grad_captures_total", layer="first")] == 5
        assert {v for k, v in shown.items() if k[0] == "torch_train_steps_total"} == {5}


def test_a_new_optimizer_every_epoch() -> None:
    """A run that makes its optimizer anew again and again does not gain series each time."""
    model = Perceptron()

    def epoch() -> None:
        optimizer = sgd(model)
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()

    with watching(model) as exporter:
        for _ in range(25):  # from 20 samples on there are z-scores and dead ratios too
            epoch()
        values(exporter)  # only the second scrape can say how many series the one before had
        before = len(values(exporter))
        for _ in range(25):
            epoch()
        assert len(values(exporter)) == before
        assert sum(v for k, v in values(exporter).items() if k[0] == "torch_train_steps_total") == 50


def test_sparse_gradients() -> None:
    """A sparse embedding beside dense layers shows the norm of its coalesced gradient."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(12, 2))
    sparse, dense = torch.optim.SparseAdam(model[0].parameters()), sgd(model[2])
    record = Recorder(model, {"sparse": sparse, "dense": dense})
    with watching(model, optimizers={"sparse": sparse, "dense": dense}) as exporter:
        for _ in range(4):
            sparse.zero_grad()
            dense.zero_grad()
            record.backward(model(torch.randint(0, 5, (6, 3))).square().mean())
            record.step(sparse, "sparse")
            record.step(dense, "dense")
            record.check(exporter, without=["torch_grad_zero_units_ratio"])  # rows of an embedding are no units


class HandMade:
    """An optimizer that is no `torch.optim.Optimizer`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self._parameters:
            parameter.sub_(0.05 * parameter.grad)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


@pytest.mark.parametrize("numbered", [False, True])
def test_duck_typed_optimizer(numbered: bool) -> None:
    """With `exporter.step()` a hand-made optimizer is seen like any other."""
    model = Perceptron()
    optimizer = HandMade(model)
    record = Recorder(model, sgd(model))
    with watching(model) as exporter:
        for step in range(5):
            record.backward(model(batch()).square().mean() * 10)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            record.stepping()
            optimizer.step()
            exporter.step(100 + step) if numbered else exporter.step()
            optimizer.zero_grad()
            record.check(exporter, rel=1e-4)
        assert value(exporter, "torch_train_steps_total", optimizer="manual") == 5


def test_step_beside_an_optimizers_hook_counts_once() -> None:
    """`exporter.step()` after an ordinary optimizer's step adds nothing."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(4):
            optimizer.zero_grad()
            record.backward(model(batch()).square().mean())
            record.step(optimizer)
            exporter.step()
            record.check(exporter)


def test_step_number_aligns_the_samples() -> None:
    """Runs that number their steps alike with `step(number)` sample the same steps, wherever they began: one of each four."""

    def sampled(first: int) -> list[int]:
        model = Perceptron()
        optimizer = sgd(model)
        found = []
        with watching(model, every=4) as exporter:
            for number in range(first, 160):
                optimizer.zero_grad()
                before = value(exporter, "torch_grad_captures_total", layer="first")
                model(batch()).square().mean().backward()
                optimizer.step()
                exporter.step(number)
                if value(exporter, "torch_grad_captures_total", layer="first") != before:
                    found.append(number)
        return [number for number in found if number >= 112]

    assert sampled(101) == sampled(110)
    assert [number // 4 for number in sampled(101)] == list(range(28, 40))


# Backwards without a step


@pytest.mark.parametrize("set_to_none", [True, False])
def test_nan_and_a_skipped_step(set_to_none: bool) -> None:
    """A NaN after which the loop does not step is counted once, with outcome `skipped`."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for step in range(6):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = model(batch()).square().mean() * (math.nan if step in (2, 4) else 1.0)
            record.backward(loss)
            if loss.isfinite():
                record.step(optimizer)
            else:
                record.skipped()
        record.check(exporter)
        assert value(exporter, NONFINITE, outcome="skipped") == 2
        assert value(exporter, NONFINITE, outcome="stepped") == 0


def test_skipped_steps_on_rounds_that_are_not_sampled() -> None:
    """With `every=4` skipped steps are counted on every round."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model, every=4) as exporter:
        for step in range(24):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            if step % 3 != 1:
                optimizer.step()
        assert value(exporter, "torch_train_skipped_steps_total") == 8
        assert value(exporter, "torch_train_backward_passes_total") == 24
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 16


def test_nan_and_an_exception() -> None:
    """A NaN after which nothing happens any more is visible within seconds, with outcome `unknown`, once."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for _ in range(2):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        (model(batch()).square().mean() * math.nan).backward()
        assert eventually(lambda: value(exporter, NONFINITE, outcome="unknown") == 1, 10)
        assert value(exporter, ELEMENTS, layer="first", kind="nan") == 6 * 8 + 8
        optimizer.step()  # it was only slow
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()
        # That step made the parameters NaN, and so the gradients of the one after it: the second of the two.
        assert value(exporter, ELEMENTS, layer="first", kind="nan") == 2 * (6 * 8 + 8)
        assert sum(value(exporter, NONFINITE, outcome=o) or 0 for o in ("stepped", "skipped", "unknown")) == 2
        assert errors(exporter) == {}


def test_nan_and_close() -> None:
    """A NaN after which the loop raises out of the `with` is in the last scrape."""
    model = Perceptron()
    exporter = start_exporter(model, port=None, every=1)
    with contextlib.suppress(FloatingPointError), exporter:
        (model(batch()).square().mean() * math.nan).backward()
        raise FloatingPointError
    assert value(exporter, NONFINITE, outcome="unknown") == 1
    assert value(exporter, "torch_train_state", state="failed") == 1


# Evaluation


def test_evaluation_between_steps() -> None:
    """Evaluation under `no_grad` between steps changes no number but the state."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        assert value(exporter, "torch_train_state", state="initialising") == 1
        for _ in range(4):
            model.train()
            optimizer.zero_grad()
            record.backward(model(batch()).square().mean())
            record.step(optimizer)
            assert value(exporter, "torch_train_state", state="training") == 1
            model.eval()
            with torch.no_grad():
                model(batch(50))
            assert value(exporter, "torch_train_state", state="evaluating") == 1
            record.check(exporter)
        assert value(exporter, "torch_train_samples_total") == 4 * 5
        model.train()
        model(batch())
        assert value(exporter, "torch_train_state", state="training") == 1


def test_evaluation_with_gradients() -> None:
    """An evaluation forward with gradients on, between forward and backward of training, disturbs nothing."""
    model = Perceptron()
    optimizer = sgd(model)
    record = Recorder(model, optimizer)
    with watching(model) as exporter:
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(batch()).square().mean()
            model.eval()
            model(batch(7))
            model.train()
            record.backward(loss)
            record.step(optimizer)
            record.check(exporter)


# Mixed precision


def amp(model: torch.nn.Module, *, given: bool, overflow_at: int = -1, clip: float | None = None, steps: int = 12) -> None:
    """A GradScaler loop against the record of unscaled gradients."""
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=5)
    record = Recorder(model, optimizer)
    with watching(model, grad_scaler=scaler if given else None) as exporter:
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(batch()).square().mean() * (math.inf if step == overflow_at else 1.0)
            scaled = scaler.scale(loss)
            scale = scaler.get_scale()
            record.unscale = 1 / scale
            record.backward(scaled)
            scaler.unscale_(optimizer)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if step == overflow_at:
                record.skipped()
            else:
                record.stepping()
            scaler.step(optimizer)
            scaler.update()
            if step not in (overflow_at, overflow_at + 1):
                record.check(exporter, rel=1e-4)
        record.check(exporter, rel=1e-4)
        if given:
            assert value(exporter, "torch_train_loss_scale") is not None


@pytest.mark.parametrize("given", [True, False], ids=["given", "inferred"])
def test_grad_scaler(given: bool) -> None:
    """Under a gradient scaler all norms are unscaled, whether it was given or is inferred, though it grows."""
    amp(Perceptron(), given=given)


@pytest.mark.parametrize("given", [True, False], ids=["given", "inferred"])
def test_grad_scaler_overflow(given: bool) -> None:
    """An overflow that the scaler skips is a skipped step with non-finite gradients, and the rest goes on."""
    amp(Perceptron(), given=given, overflow_at=4)


def test_grad_scaler_with_clipping() -> None:
    """With the scaler given, clipping after `unscale_` shows its own factor and not the scale's."""
    amp(Perceptron(), given=True, clip=0.01)


def test_grad_scaler_with_clipping_and_nobody_told() -> None:
    """Where the scale cannot be told from the clipping, norms are absent and never 16384 times too large."""
    model = Perceptron()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    with watching(model) as exporter:
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(model(batch()).square().mean()).backward()
            scaler.unscale_(optimizer)
            before = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            scaler.step(optimizer)
            scaler.update()
            shown = value(exporter, "torch_grad_global_norm")
            assert shown is None or shown == pytest.approx(before, rel=1e-3)


# Values given by the user


def test_observed_norm_is_the_source() -> None:
    """`observe(grad_norm=)` is shown as it is given, one observation each."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        given = []
        for _ in range(5):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            exporter.observe(grad_norm=total)
            given.append(float(total))
            optimizer.step()
        assert value(exporter, "torch_grad_global_norm") == pytest.approx(given[-1], rel=1e-6)
        assert value(exporter, "torch_grad_global_norm_distribution_count") == 5
        assert value(exporter, "torch_grad_global_norm_distribution_sum") == pytest.approx(sum(given), rel=1e-5)


# The meta device


@pytest.mark.parametrize("options", [{}, {"moments": True, "weights": True}], ids=["default", "all"])
def test_no_hook_looks_at_data(options: dict[str, bool]) -> None:
    """A whole loop on `device="meta"`, where looking at data raises, runs with every hook active and no failure."""
    with torch.device("meta"):
        model = torch.nn.Sequential(
            torch.nn.Embedding(10, 8), torch.nn.Conv1d(4, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(24, 3)
        )
        tokens = torch.zeros(2, 4, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, **options) as exporter:
        for step in range(20):
            optimizer.zero_grad()
            loss = model(tokens).square().mean()
            loss.backward()
            if step % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            exporter.observe(loss=loss)
            optimizer.step()
        assert errors(exporter) == {}
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 20
        assert value(exporter, "torch_train_backward_passes_total") == 20
        # Something was measured: copies to the host that never arrive are no reason to measure nothing.
        assert (value(exporter, "torch_grad_exporter_captures_total") or 0) + (
            value(exporter, "torch_grad_exporter_captures_skipped_total") or 0
        ) > 0


@pytest.mark.parametrize("step_first", [True, False])
def test_a_nan_in_an_observed_norm_is_counted_on_any_round(step_first: bool) -> None:
    """A NaN that only `observe(grad_norm=)` saw is counted once, with what became of its step, sampled or not."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model, every=64) as exporter:
        for step in range(40):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            observed = math.nan if step in (9, 20) else 1.0
            skip = step == 20
            if step_first and not skip:
                optimizer.step()
            exporter.observe(grad_norm=observed)
            if not step_first and not skip:
                optimizer.step()
        assert value(exporter, NONFINITE, outcome="stepped") == 1
        assert value(exporter, NONFINITE, outcome="skipped") == 1
        assert value(exporter, NONFINITE, outcome="unknown") == 0


def test_the_round_after_a_skipped_step_is_sampled() -> None:
    """With a long interval a skipped step is followed by a sample, which shows what is wrong; a row of them by every other."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model, every=64) as exporter:
        for step in range(40):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            if step not in (10, 20, 21, 22, 23):
                optimizer.step()
        assert value(exporter, "torch_train_skipped_steps_total") == 5
        assert value(exporter, "torch_grad_exporter_captures_total") == 1 + 1 + 2  # the first, after 10, after 20 and 22


def test_an_output_object_of_the_users_own_is_looked_into() -> None:
    """A plain object with tensors as attributes is hooked like a tuple: the rung stays `output`."""

    class Model(Perceptron):
        def forward(self, inputs: torch.Tensor) -> Plain:  # type: ignore[override]
            return Plain(super().forward(inputs).square().mean())

    model = Model()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for _ in range(4):
            optimizer.zero_grad()
            model(batch()).loss.backward()
            optimizer.step()
        assert mode(exporter) == "output"
        assert value(exporter, "torch_grad_captures_total", layer="first") == 4
