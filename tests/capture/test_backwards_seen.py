"""Backwards that begin where and when they are not expected: on a sampled round all that comes into a gradient is seen."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.capture.scenes import (
    BACKWARDS,
    CAPTURES,
    LAYER_CAPTURES,
    MISSING,
    NORM,
    SAMPLED_AT,
    SAMPLES,
    SKIPPED,
    STATE,
    STEPS,
    Headed,
    loss_of,
    reads_after_backward,
    watching,
    whole,
)
from tests.support.models import Perceptron, batch, sgd
from tests.support.ranks import of_ranks
from tests.support.record import norm
from tests.support.scrape import OFF, key, lost, value, values
from tests.support.torch_versions import fully_shard, need
from torch_grad_exporter import start_exporter


class Branched(nn.Module):
    """A trunk with a head, and an auxiliary head that the forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.auxiliary = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.trunk(x)))

    def of_the_auxiliary(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of the auxiliary head, which also trains the trunk."""
        return self.auxiliary(torch.relu(self.trunk(x))).square().mean()


class Adversaries(nn.Module):
    """A generator and a discriminator in one module, which is never called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Linear(4, 1)


# Around the root


def test_a_step_ends_an_evaluation_without_the_root() -> None:
    """After an evaluation training goes on by way of submodules: the state is `training` with the first step."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for _ in range(3):
            model.eval()
            with torch.no_grad():
                model(batch())
            assert value(exporter, STATE, state="evaluating") == 1
            model.train()
            optimizer.zero_grad()
            model.second(model.first(batch()).relu()).square().mean().backward()
            optimizer.step()
            assert value(exporter, STATE, state="training") == 1
            assert value(exporter, STATE, state="evaluating") == 0


# Layers that are frozen and thawed


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_networks_that_are_frozen_in_turn(every: int) -> None:
    """Both of a GAN's networks are shown, with the norms before clipping, and no series ends while the other one is trained."""
    model = Adversaries()
    optimizers = {"g": sgd(model.generator), "d": torch.optim.Adam(model.discriminator.parameters(), lr=0.01)}
    names = {"g": "generator", "d": "discriminator"}
    truth: dict[tuple[str, float], float] = {}
    shown = dict.fromkeys(names, 0)
    with watching(model, every=every, optimizers=optimizers) as exporter:
        for step in range(1, 20):
            for turn, other in (("d", "g"), ("g", "d")):
                getattr(model, names[other]).requires_grad_(False)
                optimizers[turn].zero_grad()
                model.discriminator(model.generator(torch.randn(5, 4))).square().mean().backward()
                truth[turn, step] = norm(p.grad.double() for p in getattr(model, names[turn]).parameters())
                nn.utils.clip_grad_norm_(getattr(model, names[turn]).parameters(), 0.01)
                optimizers[turn].step()
                getattr(model, names[other]).requires_grad_(True)
                scrape = values(exporter)
                for name, layer in names.items():
                    number = scrape.get(key(SAMPLED_AT, optimizer=name))
                    norm_shown = scrape.get(key(NORM, optimizer=name))
                    assert (norm_shown is None) == (number is None)
                    shown[name] += norm_shown is not None
                    assert key(LAYER_CAPTURES, layer=layer) in scrape
                    if norm_shown is not None:
                        assert norm_shown == pytest.approx(truth[name, number], rel=1e-5)
                        assert scrape[key("torch_grad_norm", layer=layer)] == pytest.approx(norm_shown, rel=1e-6)
        assert min(shown.values()) > 12
        captures = [value(exporter, LAYER_CAPTURES, layer=layer) or 0 for layer in names.values()]
        assert min(captures) >= (17 if every == 1 else 4)
        assert reads_after_backward(exporter)


def test_layers_that_are_frozen_in_turn_within_a_round() -> None:
    """Two layers with a backward each in every step are both shown, after the first step, whose sample is lost."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = sgd(model)
    model[1].requires_grad_(False)
    with watching(model) as exporter:
        for step in range(6):
            optimizer.zero_grad()
            for mine, other in ((0, 1), (1, 0)):
                model[mine].requires_grad_(True)
                model[other].requires_grad_(False)
                model(torch.randn(5, 4)).square().mean().backward()
            seen = whole(model)
            optimizer.step()
            assert value(exporter, NORM) == (pytest.approx(seen, rel=1e-5) if step else None)
        assert sum(lost(exporter).values()) == 1


def test_a_backward_into_layers_that_were_just_thawed() -> None:
    """What was read before a backward that nothing announces is taken back, and counted once as lost."""
    model = Branched()
    optimizer = sgd(model)
    shown = math.nan
    model.auxiliary.requires_grad_(False)
    with watching(model) as exporter:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model).backward()
            if step == 1:
                model.auxiliary.requires_grad_(True)
                model.of_the_auxiliary(batch()).backward()
            else:
                shown = whole(model)
            optimizer.step()
            assert value(exporter, NORM) == pytest.approx(shown, rel=1e-5)
            assert sum(lost(exporter).values()) == (1 if step else 0)
        assert value(exporter, LAYER_CAPTURES, layer="trunk") == 3


@pytest.mark.parametrize("reached", [True, False])
def test_a_parameter_frozen_within_a_round(reached: bool) -> None:
    """A parameter that is frozen between two backwards is not missing; its gradient counts if it has one already."""
    model = Headed()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for _ in range(3):  # two backwards to a step: gradients are read after the second
            optimizer.zero_grad()
            loss_of(model).backward()
            loss_of(model).backward()
            optimizer.step()
        optimizer.zero_grad()
        model.head_only = not reached
        loss_of(model).backward()
        model.head_only = False
        model.first.weight.requires_grad_(False)
        for captures in (4, 5):
            loss_of(model).backward()
            weight = [model.first.weight.grad.double()] if reached and captures == 4 else []
            seen = norm([model.first.bias.grad.double(), *weight])
            optimizer.step()
            assert value(exporter, LAYER_CAPTURES, layer="first") == captures
            assert value(exporter, MISSING, layer="first") == value(exporter, MISSING, layer="second") == 0
            assert value(exporter, "torch_grad_norm", layer="first") == pytest.approx(seen)
            optimizer.zero_grad()
            loss_of(model).backward()


# Checkpoints of the root


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("twice", [True, False])
def test_a_root_that_is_checkpointed(twice: bool, reentrant: bool) -> None:
    """Steps with two checkpoints of the root, or with and without one in turn: norms, steps and examples are those of the loop."""
    model = Perceptron()
    optimizer = sgd(model)
    with watching(model) as exporter:
        for step in range(1, 9):
            optimizer.zero_grad()
            if twice:
                outputs = [checkpoint(model, batch().requires_grad_(), use_reentrant=reentrant) for _ in range(2)]
            elif step % 2:
                outputs = [model(batch())]
            else:
                outputs = [checkpoint(model, batch().requires_grad_(), use_reentrant=reentrant)]
            sum(output.square().mean() for output in outputs).backward()
            seen = norm(p.grad.double() for p in model.first.parameters())
            optimizer.step()
            assert value(exporter, STEPS, optimizer="SGD") == step
            assert value(exporter, SAMPLES) == 5 * len(outputs) * step
            if step > 1:
                assert value(exporter, "torch_grad_norm", layer="first") == pytest.approx(seen)
                assert value(exporter, MISSING, layer="first") == 0
            if not reentrant:
                assert value(exporter, BACKWARDS) == step
        assert value(exporter, CAPTURES) >= 7
        assert value(exporter, SKIPPED) == 0
        assert lost(exporter) == {}
        assert reads_after_backward(exporter)


# Steps without a backward


def steps_in_surplus(rank: int) -> float:
    """Train a sharded model with a second step in two rounds far apart; return whether its backwards are still looked for."""
    model = nn.Linear(4, 4)
    fully_shard(model)
    optimizer = sgd(model)
    with start_exporter(model, None, every=1000, collectors=OFF) as exporter:
        for step in range(60):
            optimizer.zero_grad()
            model(batch(inputs=4)).sum().backward()
            optimizer.step()
            if step in (20, 40):
                optimizer.step()
        return value(exporter, "torch_grad_exporter_capture_mode", mode="backward")


@pytest.mark.process
def test_single_steps_in_surplus_of_a_sharded_model() -> None:
    """Two steps without a backward, with backwards between them, are no reason to read at the step."""
    need(2, 7, "FSDP2 on a CPU")
    assert of_ranks(steps_in_surplus, ranks=1) == [1]
