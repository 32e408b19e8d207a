import copy

import pytest
import torch

from tests.inspection.explain.planted import CASES, Planted, cut_line
from torch_grad_exporter import explain


def expected_of(planted: Planted, name: str) -> str:
    """The verdict that a case expects of a parameter: that of the longest begin of its name."""
    fitting = [begin for begin in planted.expected if name.startswith(begin)]
    return planted.expected[max(fitting, key=len)] if fitting else "ok"


def test_there_are_enough_cases() -> None:
    """At least 20 causes are planted, and each verdict several times but for the clear one of a frozen parameter."""
    verdicts = [verdict for make in CASES.values() for verdict in {*make().expected.values()}]
    assert len(CASES) >= 45
    assert {one: verdicts.count(one) >= 2 for one in verdicts} == dict.fromkeys(verdicts, True)
    assert len({*verdicts}) == 6


@pytest.mark.parametrize("name", CASES)
def test_each_planted_cause_is_named(name: str) -> None:
    """The verdict of each parameter, and where it is cut the line and the module of it."""
    planted = CASES[name]()
    found = explain(planted.step, planted.model, planted.optimizers)
    assert {row.parameter: str(row.verdict) for row in found.rows} == {
        row.parameter: expected_of(planted, row.parameter) for row in found.rows
    }
    line = cut_line(CASES[name])
    bad = [row for row in found.rows if row.verdict in ("detached_at", "non_differentiable", "unknown")]
    for row in bad:
        assert planted.note in row.note
        if line is not None:
            assert row.where is not None
            assert (row.where.line, row.where.file) == (line, CASES[name].__code__.co_filename)
            assert planted.module in (None, row.where.module)


@pytest.mark.parametrize("name", CASES)
def test_verdicts_agree_with_a_real_backward(name: str) -> None:
    """Exactly the parameters that are told to get a gradient have one in `.grad` after PyTorch's own backward; no other is zero."""
    planted = CASES[name]()
    found = explain(planted.step, planted.model, planted.optimizers)
    loss = planted.step()
    if loss.requires_grad:
        loss.backward()
    for parameter, gradient in ((key, p.grad) for key, p in planted.model.named_parameters()):
        row = found[parameter]
        if row.verdict in ("ok", "optimizer_missing"):
            assert gradient is not None
            assert ("gradient is zero" in row.note) == (not gradient.any())
        else:
            assert gradient is None or not gradient.any()


@pytest.mark.parametrize("name", CASES)
def test_a_whole_step_is_judged_alike(name: str) -> None:
    """A function that runs backward and a step itself gives the same verdicts and places as one that returns the loss."""
    planted = CASES[name]()
    once = explain(planted.step, planted.model, planted.optimizers)
    optimizer = torch.optim.AdamW(planted.model.parameters())

    def whole() -> None:
        optimizer.zero_grad()
        loss = planted.step()
        if loss.requires_grad:
            torch.autograd.backward(loss)
        optimizer.step()

    if not planted.step().requires_grad:
        pytest.skip("a backward would raise")
    again = explain(whole, planted.model, planted.optimizers)
    assert again.rows == once.rows
    assert not optimizer.state


@pytest.mark.parametrize("name", CASES)
def test_a_loss_alone_tells_all_but_where_it_was_cut(name: str) -> None:
    """What is `ok`, frozen or without an optimizer is told alike; what is not in the graph is said to be so, and not guessed."""
    planted = CASES[name]()
    once = explain(planted.step, planted.model, planted.optimizers)
    loss = planted.step()
    if not loss.requires_grad:
        with pytest.raises(ValueError, match="the loss requires no gradient"):
            explain(loss, planted.model)
        return
    alone = explain(loss, planted.model, planted.optimizers)
    for row in alone.rows:
        verdict = once[row.parameter].verdict
        assert row.verdict == verdict or (
            row.verdict == "not_in_graph" and verdict in ("detached_at", "non_differentiable", "unknown")
        )
        assert row.where is None or row.verdict == "ok"
    loss.backward()  # the graph is still there


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_as_before(name: str) -> None:
    """Parameters, buffers, gradients and random numbers are the same after it, and the parameters still the same objects."""
    planted = CASES[name]()
    for number, parameter in enumerate(planted.model.parameters()):
        parameter.grad = torch.full_like(parameter, number)
    before = copy.deepcopy(planted.model)
    grads = [id(parameter.grad) for parameter in planted.model.parameters()]
    random = torch.get_rng_state()
    explain(planted.step, planted.model, planted.optimizers)
    assert torch.equal(random, torch.get_rng_state())
    assert [id(parameter.grad) for parameter in planted.model.parameters()] == grads
    for number, (one, other) in enumerate(zip(before.parameters(), planted.model.parameters(), strict=True)):
        assert torch.equal(one, other)
        assert bool((other.grad == number).all())
        assert one.requires_grad == other.requires_grad
    for one, other in zip(before.buffers(), planted.model.buffers(), strict=True):
        assert torch.equal(one, other)
