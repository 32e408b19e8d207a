"""Any course of a training against sums in plain Python, scraped again and again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.store.support import Training
from tests.support.properties import PROFILE, both_formats, no_timeout_in_a_soak
from tests.support.scrape import Key, errors_in, key, values
from torch_grad_exporter.metrics.families import REMOVED

pytestmark = [no_timeout_in_a_soak, pytest.mark.slow]

NORMS = st.sampled_from([0.0, 1.0, 2.5, 1e-200, 1e150, math.nan, math.inf]) | st.floats(0.1, 10)
GRADIENTS = st.dictionaries(st.sampled_from(["a", "a_bias", "b"]), NORMS, min_size=1)
ANY = st.floats() | st.sampled_from([0.0, -1.0, 1.7e308, math.nan, math.inf])
ROUND = st.tuples(st.just("round"), GRADIENTS, st.sampled_from(["step", "step", "skip"]))
COURSE = st.lists(
    st.one_of(
        ROUND, ROUND, ROUND,
        st.tuples(st.just("usual"), st.integers(1, 25), st.none()),
        st.tuples(st.just("observe"), st.sampled_from(["loss", "samples", "tokens"]), ANY),
        st.tuples(st.just("freeze"), st.booleans(), st.none()),
        st.tuples(st.just("replace"), st.none(), st.none()),
    ),
    max_size=12,
)  # fmt: skip


class Sums:
    """What a layer counts."""

    def __init__(self) -> None:
        self.captures = self.nans = self.infs = self.norms = self.squares = 0.0
        self.entered = 0

    def add(self, norms: list[float]) -> None:
        whole = math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)
        self.captures += 1
        self.nans += sum(map(math.isnan, norms))
        self.infs += sum(map(math.isinf, norms))
        if math.isfinite(whole):
            self.entered += 1
            self.norms += whole
            self.squares += whole * whole


class Course:
    """A scripted training, and its totals by layer."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.sums: dict[str, Sums] = {name: Sums() for name in (*"ab", REMOVED)}
        self.outcomes = {"stepped": 0, "skipped": 0}
        self.rounds = 0
        self.before: dict[Key, float] = {}

    def round(self, gradients: dict[str, float], end: str) -> None:
        training = self.training
        final = {name: norm for name, norm in gradients.items() if training.parameter(name).requires_grad}
        if not final:
            return
        training.backward(**final)
        if end == "step":
            training.step()
        else:
            training.exporter.step_skipped()
        self.rounds += 1
        for layer in "ab":
            if norms := [norm for name, norm in final.items() if name[0] == layer]:
                self.sums[layer].add(norms)
        self.outcomes["stepped" if end == "step" else "skipped"] += any(not math.isfinite(norm) for norm in final.values())

    def usual(self, rounds: int, _: None) -> None:
        for number in range(rounds):
            self.round({"a": 1.0 + number % 3 / 10, "a_bias": 1.0, "b": 2.0}, "step")

    def observe(self, name: str, number: float) -> None:
        self.training.exporter.observe(**{name: number})

    def freeze(self, frozen: bool, _: None) -> None:
        self.training.model["b"].requires_grad_(not frozen)

    def replace(self, *_: None) -> None:
        """Put a new layer in the place of `b`, whose counters go to the remainder."""
        model, removed, gone = self.training.model, self.sums[REMOVED], self.sums["b"]
        del model["b"]
        self.round({"a": 1.0}, "step")
        model["b"] = nn.Linear(4, 2, bias=False).double()
        self.training.optimizers[0].param_groups[0]["params"] = list(model.parameters())
        for name in vars(removed):
            setattr(removed, name, getattr(removed, name) + getattr(gone, name))
        self.sums["b"] = Sums()
        self.round({"a": 1.0, "b": 1.0}, "step")

    def check(self) -> None:
        """Compare a scrape, and see that nothing has fallen but what a layer counts that was replaced."""
        found = values(self.training.exporter)
        now = {k: v for k, v in found.items() if k[0].endswith(("_total", "_bucket", "_sum", "_count"))}
        assert all(map(math.isfinite, now.values()))
        for (name, labels), number in self.before.items():
            if ("layer", "b") not in labels:
                assert now[name, labels] >= number * (1 - 1e-12), name
        self.before = now
        assert found[key("torch_grad_exporter_captures_total")] == self.rounds
        for outcome, number in self.outcomes.items():
            assert found[key("torch_grad_nonfinite_steps_total", outcome=outcome)] == number
        for layer, sums in self.sums.items():
            if layer == REMOVED and key("torch_grad_captures_total", layer=layer) not in found:
                assert sums.captures == 0
                continue
            assert found[key("torch_grad_captures_total", layer=layer)] == sums.captures
            assert found[key("torch_grad_nonfinite_elements_total", layer=layer, kind="nan")] == sums.nans
            assert found[key("torch_grad_nonfinite_elements_total", layer=layer, kind="inf")] == sums.infs
            assert found[key("torch_grad_norm_distribution_count", layer=layer)] == sums.entered
            assert found[key("torch_grad_norm_distribution_sum", layer=layer)] == pytest.approx(sums.norms, rel=1e-9)
            assert found[key("torch_grad_norm_squared_accumulated_total", layer=layer)] == pytest.approx(sums.squares, rel=1e-9)
        assert not any(math.isinf(number) for (name, _), number in found.items() if name == "torch_grad_norm_zscore")
        assert errors_in(found) == {}


@given(course=COURSE)
@settings(max_examples=12 if PROFILE == "short" else 300)
def test_any_course_adds_up(course: list[tuple[str, object, object]]) -> None:
    """After any course of rounds, skipped steps, observations and changes of layers, each sum is that of plain Python."""
    with Training() as training:
        its = Course(training)
        its.usual(1, None)  # before the first step a scaler is possible, and sizes are not known
        for what, first, second in course:
            getattr(its, what)(first, second)
            its.check()
        both_formats(training.exporter.collect())
