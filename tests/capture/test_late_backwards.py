"""Backwards that begin where and when nobody expects them: on a sampled round all that comes into a gradient is seen."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import Perceptron, batch, sgd
from tests.support.record import norm
from tests.support.scrape import errors, lost, mode, value
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.capture.accumulate_grad import AccumulateGradNodes

OFF = dict.fromkeys(("cuda_memory", "gpu", "process", "host", "container", "whole_run"), False)
NORM = "torch_grad_global_norm"
SAMPLED_AT = "torch_grad_sample_step"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@contextlib.contextmanager
def watching(model: nn.Module, **options: object) -> Iterator[Exporter]:
    """An exporter that serves nothing and has no failure of its own."""
    with start_exporter(model, port=None, collectors=OFF, **options) as exporter:
        yield exporter
        assert errors(exporter) == {}


def whole(model: nn.Module) -> float:
    """The norm of all gradients."""
    return norm(p.grad.double() for p in model.parameters() if p.grad is not None)


def much_later(exporter: Exporter) -> None:
    """What is pending has been so for an hour."""
    exporter._host.drain()
    exporter._host._gradients.expire(time.time() + 3600)


class Branched(nn.Module):
    """A trunk with a head, and an auxiliary head that the forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.auxiliary = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.trunk(x)))

    def of_the_auxiliary(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of the auxiliary head, which also trains the trunk."""
        return self.auxiliary(torch.relu(self.trunk(x))).square().mean()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("begins", [1, 40])
def test_an_auxiliary_head_that_joins_later_at_defaults(begins: int, first: bool) -> None:
    """In each scrape, sampled as the budget allows, there is the norm of all backwards of the step that the sample is of."""
    model = Branched()
    optimizer = sgd(model, lr=0.001)
    truth: dict[float, float] = {}
    sampled = set[float]()
    with watching(model) as exporter:
        for step in range(1, 300):
            optimizer.zero_grad()
            joins = step > begins
            if joins and first:
                model.of_the_auxiliary(batch()).backward()
            model(batch()).square().mean().backward()
            if joins and not first:
                model.of_the_auxiliary(batch()).backward()
            truth[step] = whole(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            number = value(exporter, SAMPLED_AT)
            if number is not None:
                sampled.add(number)
                assert value(exporter, NORM) == pytest.approx(truth[number], rel=1e-5)
                missing = value(exporter, "torch_grad_missing_parameters", layer="auxiliary")
                assert missing == (2 if number <= begins else 0)
        assert max(sampled) > begins + 10
        assert sum(lost(exporter).values()) <= 1


def test_a_backward_before_any_forward_of_the_root_belongs_to_the_first_sample() -> None:
    """What only that backward has reached is not missing."""
    model = Branched()
    optimizer = sgd(model)
    with watching(model, every=1) as exporter:
        for step in range(3):
            optimizer.zero_grad()
            model.of_the_auxiliary(batch()).backward()
            model(batch()).square().mean().backward()
            seen = whole(model)
            optimizer.step()
            assert value(exporter, SAMPLED_AT) == step + 1
            assert value(exporter, NORM) == pytest.approx(seen, rel=1e-5)
            assert value(exporter, "torch_grad_missing_parameters", layer="auxiliary") == 0


def test_an_old_gradient_from_before_the_start_is_none_of_the_first_sample() -> None:
    """What was there when the exporter was started, and was cleared since, is missing in the first sample."""
    model = Branched()
    optimizer = sgd(model)
    model.of_the_auxiliary(batch()).backward()
    with watching(model, every=1) as exporter:
        optimizer.zero_grad(set_to_none=False)
        model(batch()).square().mean().backward()
        optimizer.step()
        assert value(exporter, "torch_grad_missing_parameters", layer="auxiliary") == 2


def test_gradients_by_hand_are_shown_from_the_third_round_on() -> None:
    """Two rounds without a backward are enough to know that there is none to wait for."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model, every=1) as exporter:
        for step in range(1, 6):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            seen = whole(model)
            optimizer.step()
            assert mode(exporter) == ("output" if step == 1 else "optimizer")
            assert value(exporter, NORM) == (None if step < 3 else pytest.approx(seen, rel=1e-5))


class Adversaries(nn.Module):
    """A generator and a discriminator in one module, which is never called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Linear(4, 1)


@pytest.mark.parametrize("every", [1, 3])
def test_networks_that_are_frozen_in_turn_around_the_root(every: int) -> None:
    """Both are shown, with the norms before clipping, and no series of the one ends while the other is trained."""
    model = Adversaries()
    optimizers = {"g": sgd(model.generator), "d": torch.optim.Adam(model.discriminator.parameters(), lr=0.01)}
    names = {"g": "generator", "d": "discriminator"}
    truth: dict[tuple[str, float], float] = {}
    shown = dict.fromkeys(names, 0)
    with watching(model, every=every, optimizers=optimizers) as exporter:
        for step in range(1, 60):
            for turn, other in (("d", "g"), ("g", "d")):
                getattr(model, names[other]).requires_grad_(False)
                optimizers[turn].zero_grad()
                model.discriminator(model.generator(torch.randn(5, 4))).square().mean().backward()
                truth[turn, step] = norm(p.grad.double() for p in getattr(model, names[turn]).parameters())
                nn.utils.clip_grad_norm_(getattr(model, names[turn]).parameters(), 0.01)
                optimizers[turn].step()
                getattr(model, names[other]).requires_grad_(True)
                for name, layer in names.items():
                    number = value(exporter, SAMPLED_AT, optimizer=name)
                    found = value(exporter, NORM, optimizer=name)
                    assert (found is None) == (number is None)
                    shown[name] += found is not None
                    assert value(exporter, "torch_grad_captures_total", layer=layer) is not None
                    if found is not None:
                        assert found == pytest.approx(truth[name, number], rel=1e-5)
                        assert value(exporter, "torch_grad_norm", layer=layer) == pytest.approx(found, rel=1e-6)
        assert mode(exporter) == "parameter"
        assert min(shown.values()) > 60
        assert all((value(exporter, "torch_grad_captures_total", layer=layer) or 0) > 10 for layer in names.values())


def test_networks_that_are_frozen_in_turn_within_a_round() -> None:
    """Two parts of a model with a backward each in every step: after the first step, whose sample is lost, both are shown."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = sgd(model)
    model[1].requires_grad_(False)
    with watching(model, every=1) as exporter:
        for step in range(6):
            optimizer.zero_grad()
            for mine, other in ((0, 1), (1, 0)):
                model[mine].requires_grad_(True)
                model[other].requires_grad_(False)
                model(torch.randn(5, 4)).square().mean().backward()
            seen = whole(model)
            optimizer.step()
            assert value(exporter, NORM) == (pytest.approx(seen, rel=1e-5) if step else None)
        assert lost(exporter) == {"parameters_changed": 1}


def test_a_head_that_is_thawed_for_the_second_backward_of_each_round() -> None:
    """It is frozen again before the step. Where no root announces backwards one sample is lost: then the head's nodes are held."""
    model = Branched()
    optimizer = sgd(model)
    shown = []
    with watching(model, every=1) as exporter:
        for _ in range(8):
            optimizer.zero_grad()
            for trains in (False, True):
                model.head.requires_grad_(trains)
                model.head(torch.relu(model.trunk(batch()))).square().mean().backward()
            seen = whole(model)
            model.head.requires_grad_(False)
            optimizer.step()
            shown.append(value(exporter, NORM) == pytest.approx(seen, rel=1e-5))
        assert shown == [False] * 2 + [True] * 6
        assert lost(exporter) == {"parameters_changed": 1}
        assert mode(exporter) == "parameter"


def test_a_backward_that_nothing_announces_into_parameters_that_were_just_thawed() -> None:
    """It has written to them before any hooked node fires, so what is read of the round is taken back, and counted once."""
    model = Branched()
    optimizer = sgd(model)
    shown = math.nan
    model.auxiliary.requires_grad_(False)
    with watching(model, every=1) as exporter:
        for step in range(4):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            if step == 1:
                model.auxiliary.requires_grad_(True)
                model.of_the_auxiliary(batch()).backward()
            else:
                shown = whole(model)
            optimizer.step()
            assert value(exporter, NORM) == pytest.approx(shown, rel=1e-5)
            assert lost(exporter) == ({"parameters_changed": 1} if step else {})
        assert value(exporter, "torch_grad_captures_total", layer="trunk") == 3


def test_a_slow_round_shows_no_norm_of_a_part_of_it() -> None:
    """Hours may lie between micro-batches, and a round may have been shorter lately: norms are of whole rounds only."""
    model = Perceptron()
    optimizer = sgd(model)
    squares = 0.0
    with watching(model, every=1) as exporter:
        for micro_batches in (4, 4, 1, 4, 2):
            before = value(exporter, NORM)
            for _ in range(micro_batches):
                model(batch()).square().mean().backward()
                much_later(exporter)
                assert value(exporter, NORM) == before
            seen = whole(model)
            squares += seen**2
            optimizer.step()
            optimizer.zero_grad()
            assert value(exporter, NORM) == pytest.approx(seen, rel=1e-5)
            added = sum(
                value(exporter, "torch_grad_norm_squared_accumulated_total", layer=layer) or 0.0 for layer in ("first", "second")
            )
            assert added == pytest.approx(squares, rel=1e-5)


def test_an_optimizer_that_nobody_reports_shows_its_norms_in_each_scrape() -> None:
    """However long a step takes: the norm of the last step that is known stays until the next one is."""
    model = Perceptron()
    seen = []
    with watching(model, every=1) as exporter:
        for step in range(12):
            model(batch()).square().mean().backward()
            if step > 3:  # the first three are told by the fourth backward
                assert value(exporter, NORM) == pytest.approx(seen[-1], rel=1e-5)
            much_later(exporter)
            if step > 3:
                assert value(exporter, NORM) == pytest.approx(seen[-1], rel=1e-5)
            seen.append(whole(model))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.01 * parameter.grad)
                    parameter.grad = None


def test_a_sample_of_two_optimizers_in_turn_has_the_number_of_its_step() -> None:
    """Where the other one may still step, the sample is shown after a while, with the step that was taken on it."""
    model = Adversaries()
    optimizers = {"g": sgd(model.generator), "d": sgd(model.discriminator)}
    with watching(model, every=1, optimizers=optimizers) as exporter:
        for step in range(1, 5):
            for name, optimizer in optimizers.items():
                for one in optimizers.values():
                    one.zero_grad()
                model.discriminator(model.generator(torch.randn(5, 4))).square().mean().backward()
                optimizer.step()
                much_later(exporter)
                if step > 2:
                    assert value(exporter, SAMPLED_AT, optimizer=name) == step


def test_nodes_are_hooked_again_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal's handler raises may come between two nodes: the next round hooks all of them, and nothing fails."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    hook_on, hooked = AccumulateGradNodes._hook_on, itertools.count()

    def interrupted(nodes: AccumulateGradNodes, *given: Any) -> None:  # noqa: ANN401 - handed on
        if next(hooked) == 1:
            raise InterruptedError
        hook_on(nodes, *given)

    with watching(model, every=1) as exporter:
        parts = exporter._training.capture._parts
        parts.nodes.release()
        with monkeypatch.context() as patch:
            patch.setattr(AccumulateGradNodes, "_hook_on", interrupted)
            with pytest.raises(InterruptedError):
                parts.nodes.arm(parts.index.table, lambda _tracked: None)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
            assert parts.nodes.sees_all_of(parts.index.table)
            optimizer.step()
