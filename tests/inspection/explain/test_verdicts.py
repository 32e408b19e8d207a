"""Each planted cause gets its verdict, whatever is given to `explain`, and the model stays as it was."""

import copy

import pytest
import torch

from tests.inspection.explain import planted as planted_causes
from tests.inspection.explain.planted import CASES, Planted
from torch_grad_exporter import explain

CUT = ("detached_at", "non_differentiable", "unknown")


def expected_of(planted: Planted, name: str) -> str:
    """Return the expected verdict of a parameter: that of the longest begin of its name."""
    fitting = [begin for begin in planted.expected if name.startswith(begin)]
    return planted.expected[max(fitting, key=len)] if fitting else "ok"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_planted_cause_is_named(name: str) -> None:
    """Each parameter has its verdict, a cut has its line and module, and nothing of the model changes."""
    planted = CASES[name]()
    for number, parameter in enumerate(planted.model.parameters()):
        parameter.grad = torch.full_like(parameter, number)
    before = copy.deepcopy(planted.model)
    grads = [id(parameter.grad) for parameter in planted.model.parameters()]
    random = torch.get_rng_state()
    found = explain(planted.step, planted.model, planted.optimizers)
    assert torch.equal(random, torch.get_rng_state())
    assert {row.parameter: str(row.verdict) for row in found.rows} == {
        row.parameter: expected_of(planted, row.parameter) for row in found.rows
    }
    for row in (row for row in found.rows if row.verdict in CUT):
        assert planted.note in row.note
        if planted.line is not None:
            assert row.where is not None
            assert (row.where.line, row.where.file) == (planted.line, planted_causes.__file__)
            assert planted.module in (None, row.where.module)
    assert [id(parameter.grad) for parameter in planted.model.parameters()] == grads
    for number, (then, now) in enumerate(zip(before.parameters(), planted.model.parameters(), strict=True)):
        assert torch.equal(then, now)
        assert bool((now.grad == number).all())
        assert then.requires_grad == now.requires_grad
    assert all(map(torch.equal, before.buffers(), planted.model.buffers()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_verdicts_agree_with_a_real_backward(name: str) -> None:
    """Exactly the parameters with such a verdict get a gradient; a loss alone and a whole step are judged alike."""
    planted = CASES[name]()
    found = explain(planted.step, planted.model, planted.optimizers)
    loss = planted.step()
    if loss.requires_grad:
        alone = explain(loss, planted.model, planted.optimizers)
        loss.backward()  # the graph is still there
        for row in alone.rows:
            verdict = found[row.parameter].verdict
            assert row.verdict == verdict or (row.verdict == "not_in_graph" and verdict in CUT)
            assert row.where is None or row.verdict == "ok"
    else:
        with pytest.raises(ValueError, match="the loss requires no gradient"):
            explain(loss, planted.model)
    for parameter, gradient in ((key, p.grad) for key, p in planted.model.named_parameters()):
        row = found[parameter]
        if row.verdict in ("ok", "optimizer_missing"):
            assert gradient is not None
            assert ("gradient is zero" in row.note) == (not gradient.any())
        else:
            assert gradient is None or not gradient.any()
    optimizer = torch.optim.AdamW(planted.model.parameters())

    def whole() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(planted.step())
        optimizer.step()

    if loss.requires_grad:
        assert explain(whole, planted.model, planted.optimizers).rows == found.rows
        assert not optimizer.state
