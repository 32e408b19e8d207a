"""What an inspection is told of rounds, and hooks on inner modules that are there in single rounds only."""

from __future__ import annotations

import copy
import pickle

import torch

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import errors
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.capture.torch_hooks import Hooks, InnerHooks
from torch_grad_exporter.errors import ErrorLog


class Notes:
    """An inspection that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def forward_began(self, root: torch.nn.Module, _args: object, _kwargs: object, *, sampled: bool) -> None:
        """Notes it."""
        self.told.append(("forward", type(root).__name__, sampled))

    def backward_ended(self, number: int, *, sampled: bool) -> None:
        """Notes it."""
        self.told.append(("backward", number, sampled))

    def round_over(self, number: int, *, kept: bool) -> None:
        """Notes it."""
        self.told.append(("over", number, kept))

    def step_over(self, *, sampled: bool) -> None:
        """Notes it."""
        self.told.append(("step", sampled))

    def release(self) -> None:
        """Notes it."""
        self.told.append(("release",))


def inspected(model: torch.nn.Module, every: int, *inspections: Notes) -> Exporter:
    """An exporter that tells these."""
    exporter = start_exporter(model, None, every=every)
    for one in inspections:
        exporter._training.capture.inspect(one, exporter._errors.boundary("capture"))
    return exporter


def test_each_moment_of_a_round_is_told_in_its_order() -> None:
    """Two micro-batches, then a step: forward, backward, forward, backward, the end of the round, and of the step."""
    model, notes = Perceptron(), Notes()
    optimizer = sgd(model)
    with inspected(model, 1, notes):
        for _ in range(2):
            for _ in range(2):
                model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    rounds = [one for one in notes.told if one[0] in ("backward", "over")]
    assert rounds == [(kind, number, True) for number in (0, 1) for kind in ("backward", "backward", "over")]
    name = type(model).__name__
    assert notes.told[:4] == [("forward", name, True), ("backward", 0, True)] * 2
    assert ("step", True) in notes.told
    assert notes.told[-1] == ("release",)


def test_rounds_that_are_not_sampled_say_so() -> None:
    """With `every=4` no more than one round in four is told as sampled, and has an end."""
    model, notes = Perceptron(), Notes()
    optimizer = sgd(model)
    with inspected(model, 4, notes):
        for _ in range(40):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
    kept = [told[1] for told in notes.told if told[0] == "over"]
    assert 8 <= len(kept) <= 12
    assert {told[1] for told in notes.told if told[0] == "backward" and told[2]} == set(kept)


def test_evaluation_and_forwards_within_a_backward_are_not_told() -> None:
    """Without gradients nothing begins; what a checkpoint runs again is no forward of the round."""
    model, notes = Perceptron(), Notes()
    with inspected(model, 1, notes):
        with torch.no_grad():
            model(batch())
        torch.utils.checkpoint.checkpoint(model, batch(), use_reentrant=False).square().mean().backward()
    assert [kind for kind, *_ in notes.told].count("forward") == 1


def test_one_that_fails_costs_neither_the_others_nor_the_training() -> None:
    """Its failures are counted; the other one is told everything, and the gradients are captured."""
    model, notes = Perceptron(), Notes()

    class Failing(Notes):
        def forward_began(self, root: torch.nn.Module, _args: object, _kwargs: object, *, sampled: bool) -> None:
            raise RuntimeError("planted")

    optimizer = sgd(model)
    with inspected(model, 1, Failing(), notes) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
        assert errors(exporter)["capture"] == 3
        assert exporter._training.capture.samples == 3
    assert [kind for kind, *_ in notes.told].count("forward") == 3


def test_inner_hooks_are_there_while_they_are_armed_and_leave_nothing() -> None:
    """They see what a module gets and gives after all other hooks; disarmed, its dictionaries are as before."""
    model = Perceptron()
    inner = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    inner.register_forward_hook(lambda _module, _args, output: output * 0 + 7)
    before = {name: dict(found) for name, found in vars(inner).items() if name.startswith("_forward")}
    seen: list[tuple[str, float]] = []
    hooks = Hooks(ErrorLog(("capture",)))
    inside = InnerHooks(
        hooks,
        "capture",
        lambda _module, args, _kwargs: seen.append(("in", float(args[0].sum()))),
        lambda _module, _args, _kwargs, output: seen.append(("out", float(output.detach().mean()))),
    )
    data = torch.ones(2, inner.in_features)
    inner(data)
    inside.arm([inner])
    inside.arm([inner])  # in the place of those before
    inner(data)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(inner.weight)))  # noqa: S301 - our own
    assert torch.equal(copied, inner.weight)
    inside.disarm()
    inner(data)
    assert seen == [("in", float(data.sum())), ("out", 7.0)]
    assert {name: dict(found) for name, found in vars(inner).items() if name.startswith("_forward")} == before


def test_an_armed_module_is_copied_and_saved_without_the_hooks() -> None:
    """A copy, and a model that is loaded again, tell nothing."""
    inner, seen = torch.nn.Linear(3, 2), list[int]()
    inside = InnerHooks(Hooks(ErrorLog(("capture",))), "capture", lambda *_: seen.append(1), lambda *_: seen.append(2))
    inside.arm([inner])
    for other in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):  # noqa: S301 - our own
        other(torch.ones(1, 3))
    assert not seen
    inner(torch.ones(1, 3))
    assert seen == [1, 2]


def test_closing_the_hooks_ends_those_that_are_armed() -> None:
    """After `Hooks.disconnect`, as in a forked child, armed hooks do nothing."""
    inner, seen, hooks = torch.nn.Linear(3, 2), list[int](), Hooks(ErrorLog(("capture",)))
    InnerHooks(hooks, "capture", lambda *_: seen.append(1), lambda *_: seen.append(2)).arm([inner])
    hooks.disconnect()
    inner(torch.ones(1, 3))
    assert not seen
