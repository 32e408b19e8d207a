"""Every regime of training: what a scrape shows against a float64 record kept in the loop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch

from tests.support.models import Perceptron, batch
from tests.support.record import Recorder, norm
from tests.support.scrape import errors, key, lost, mode, value, values
from tests.support.tools import eventually
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


# Clipping


# Closures


# Several optimizers, several models


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


def test_gan_that_pauses_after_its_generator() -> None:
    """A pause after the generator's step shows that step, and nothing of what its backward did to the discriminator."""
    gan = Gan()
    with watching(gan.models, optimizers=gan.names) as exporter:
        for _ in range(10):  # who steps when is known after eight rounds
            gan.train_discriminator()
            gan.train_generator()
        captures = key("torch_grad_captures_total", layer="generator.0")
        assert eventually(lambda: values(exporter)[captures] == 10)
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


class Halves(torch.nn.Module):
    """Two layers side by side; of the second one's outputs the first may be left out of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, *, silent: bool) -> torch.Tensor:
        return self.one(x).square().mean() + self.other(x)[:, int(silent) :].square().mean()


def test_a_unit_is_dead_by_the_rounds_of_its_own_optimizer() -> None:
    """Backwards write gradients of both optimizers; those that the one that steps does not use are none of its units' past."""
    model = Halves()
    optimizers = {"one": sgd(model.one), "other": torch.optim.Adam(model.other.parameters(), lr=0.01)}

    def dead(exporter: Exporter) -> float | None:
        return value(exporter, "torch_grad_dead_ratio", layer="other")

    def train(*names: str, silent: bool) -> None:
        """Rounds in which these optimizers step."""
        for name in names:
            model.zero_grad()
            model(batch(), silent=silent).backward()
            optimizers[name].step()

    with watching(model, optimizers=optimizers, dead_window=3) as exporter:
        train("other", "other", "other", silent=False)
        train("one", "one", "one", "one", "other", "other", "one", silent=True)
        assert dead(exporter) == 0
        train("one", "other", "one", silent=True)
        assert dead(exporter) == 0.25
        assert errors(exporter) == {}


# Frozen, tied, unused


class Branches(torch.nn.Module):
    """Two branches, one of which each forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Linear(6, 3)
        self.right = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, *, right: bool) -> torch.Tensor:
        return self.right(x) if right else self.left(x)


# Backwards that do not run through the root


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


# Other uses of autograd


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


# Optimizers of all sorts


def test_a_new_optimizer_every_epoch() -> None:
    """A run that makes its optimizer anew again and again does not gain series each time."""
    model = Perceptron()

    def epoch() -> None:
        optimizer = sgd(model)
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()

    with watching(model, collectors={"host": False}) as exporter:  # its CPU ratio appears when the machine's clock ticks
        for _ in range(25):  # from 20 samples on there are z-scores and dead ratios too
            epoch()
        values(exporter)  # only the second scrape can say how many series the one before had
        before = len(values(exporter))
        for _ in range(25):
            epoch()
        assert len(values(exporter)) == before
        assert sum(v for k, v in values(exporter).items() if k[0] == "torch_train_steps_total") == 50


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


# Mixed precision


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
        assert (value(exporter, "torch_grad_exporter_captures_total") or 0) + sum(lost(exporter).values()) > 0


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
