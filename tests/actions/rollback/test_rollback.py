"""Rollback of real trainings: what they are afterwards, to the bit, when they go back, to which copy, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import psutil
import pytest
import torch

from tests.actions.rollback.loops import BACK, DONE, GOOD, KINDS, Loop, flat, went_back
from tests.capture.test_cuda import nothing_waits
from tests.support.scrape import OFF, errors, value
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Rollback

start = functools.partial(start_exporter, port=None, every=1, collectors=OFF)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_as_if_restarted(kind: str) -> None:
    """After going back a training has the bits of one that was restarted from that step on the same data, in the same tensors."""
    compare(kind)


def compare(kind: str) -> None:
    """Compare a training that goes back with one that is restarted."""
    loop = Loop(kind)
    with start(loop.net) as exporter:
        last = went_back(exporter, loop, Rollback(every=5))
        step = int(value(exporter, BACK) or 0)
        pointers = [parameter.data_ptr() for parameter in loop.net.parameters()]
        for number in range(last + 1, last + 6):
            loop.step(number)
        assert "action" not in errors(exporter)
        assert value(exporter, "torch_train_rollback_lost_steps_total") == last - step
    assert [parameter.data_ptr() for parameter in loop.net.parameters()] == pointers
    reference = Loop(kind)
    for number in range(1, step + 1):
        reference.step(number, only_first=kind.startswith("two") and number == step)
    reference = reference.resumed(reference.kept())
    for number in range(last + 1, last + 6):
        reference.step(number)
    assert flat(loop.kept()) == flat(reference.kept())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_nothing_waits() -> None:
    """On a GPU it is the same to the bit, and a step that makes a copy waits for nothing."""
    copies = "torch_train_rollback_copies_total"
    with torch.device("cuda"):
        compare("fused")
        loop, numbers = Loop("fused"), iter(range(1, 10**9))
        with start(loop.net) as exporter:
            exporter.on("TrainingFailed", Rollback(every=1))
            # The first two allocate their memory, which may wait.
            assert eventually(lambda: loop.step(next(numbers)) or value(exporter, copies) == 2)

            def more() -> bool:
                with nothing_waits():
                    loop.step(next(numbers))
                return value(exporter, copies) > 2

            assert eventually(more)
            assert "action" not in errors(exporter)


def test_a_nan_is_undone() -> None:
    """A step on NaN takes the training back by itself: weights and loss are finite again, and the data go on."""
    loop = Loop()
    with start(loop.net) as exporter:
        exporter.on(Rollback(every=10))
        numbers = iter(range(1, 10**9))
        assert eventually(lambda: loop.step(next(numbers)) or value(exporter, GOOD) is not None)
        loop.net.second.weight.register_hook(lambda grad: grad * spoilt)
        spoilt = float("nan")
        loop.step(next(numbers))
        assert not loop.net.second.weight.isfinite().any()
        spoilt = 1.0
        assert eventually(lambda: loop.step(next(numbers)) or value(exporter, DONE, reason="nonfinite_gradients") == 1)
        loop.step(next(numbers))
        assert all(parameter.isfinite().all() for parameter in loop.net.parameters())
        assert value(exporter, "torch_train_rollback_copy_bytes") > 0
        assert "action" not in errors(exporter)


@pytest.mark.parametrize("kind", ["adamw", "two", "two scaled"])
def test_copies_change_no_bit(kind: str) -> None:
    """A training of which copies are made, and that never goes back, keeps all its bits."""
    watched, plain = Loop(kind), Loop(kind)
    with start(watched.net) as exporter:
        exporter.on("TrainingFailed", Rollback(every=3))
        for number in range(1, 20):
            watched.step(number)
            plain.step(number)
        assert value(exporter, "torch_train_rollback_copies_total") >= 1
    assert flat(watched.kept()) == flat(plain.kept())


def test_without_it_there_are_no_metrics() -> None:
    """An exporter without a Rollback shows nothing of it."""
    loop = Loop()
    with start(loop.net) as exporter:
        loop.step(1)
        assert not exporter.values("torch_train_rollback")


@pytest.mark.parametrize(("arguments", "message"), [
    ({"every": 0}, r"every=0: expected a number of optimizer steps of at least 1"),
    ({"every": 1.5}, r"every=1.5: expected"),
    ({"keep": 1}, r"keep=1: expected a number of copies, since the latest may have been made after the fault, of at least 2"),
    ({"most": 0}, r"most=0: expected a number of times of at least 1"),
])  # fmt: skip
def test_wrong_arguments_are_refused(arguments: dict[str, int], message: str) -> None:
    """Each error says what is expected."""
    with pytest.raises((TypeError, ValueError), match=message):
        Rollback(**arguments)


def test_what_cannot_be_copied_is_refused() -> None:
    """A sparse buffer, a model without anything to train, and an action that is in use are refused by `on`."""
    sparse, frozen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)
    sparse.register_buffer("mask", torch.eye(2).to_sparse())
    with start(sparse) as exporter, pytest.raises(ValueError, match=r"the buffer mask is a tensor of the layout torch.sparse_coo"):
        exporter.on(Rollback())
    with start(frozen) as exporter, pytest.raises(ValueError, match="nothing to copy: no parameter requires a gradient"):
        exporter.on(Rollback())
    net, action = torch.nn.Linear(2, 2), Rollback()
    with start(net) as exporter:
        exporter.on("LossSpike", action)
        with pytest.raises(ValueError, match="it is in use"):
            exporter.on("GradientExploding", action)
        with pytest.raises(ValueError, match=r"for_=3: .* knows by itself when it is due"):
            exporter.on(Rollback(), for_=3)


def test_a_model_larger_than_the_memory_is_refused() -> None:
    """Two copies of more than the host has are refused with the numbers, before anything is copied."""
    with torch.device("meta"):
        net = torch.nn.Linear(1, 1, bias=False)
    elements = int(0.5 * psutil.virtual_memory().available / 4)
    net.weight = torch.nn.Parameter(torch.empty(elements, 1))  # untouched memory is not taken
    with start(net) as exporter, pytest.raises(RuntimeError, match=r"a copy takes .* GB, 2 take .* GB; .* GB are available"):
        exporter.on(Rollback())


class Opaque(torch.optim.SGD):
    """An optimizer whose state is an object of its own."""

    def step(self, closure: Any = None) -> None:  # noqa: ANN401 - as `SGD`
        """Step, and keep an object."""
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["own"] = object()


def test_a_state_that_cannot_be_copied_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer whose state cannot be copied is reported after the first step, and the training goes on."""
    loop = Loop()
    loop.optimizers = [Opaque(loop.net.parameters(), lr=0.1)]
    with start(loop.net) as exporter:
        exporter.on(Rollback(every=1))
        for number in range(1, 6):
            loop.step(number)
        assert errors(exporter)["action"] == 1
        assert value(exporter, "torch_train_rollback_copies_total") == 0
    assert caplog.text.count("the state of Opaque['own'] is of the class object, which Rollback cannot copy") == 1


def test_states_from_after_the_copy_are_removed() -> None:
    """What an optimizer keeps of a parameter only since the copy goes, and a parameter that it has dropped comes back in place."""
    loop = Loop()
    extra = loop.net.second.bias.requires_grad_(False)
    state = loop.optimizers[0].state
    with start(loop.net) as exporter:
        rollback, wanted = Rollback(every=5), False
        exporter.on(lambda m: wanted, rollback)
        numbers = iter(range(1, 10**9))
        assert eventually(lambda: loop.step(next(numbers)) or value(exporter, GOOD) is not None)
        assert extra not in state
        moments = state[loop.net.first.weight]["exp_avg"]
        extra.requires_grad_(True)
        loop.step(next(numbers))
        assert extra in state
        wanted = True
        extra.requires_grad_(False)
        assert eventually(lambda: loop.step(next(numbers)) or value(exporter, DONE, reason="condition") == 1)
        assert extra not in state
        assert state[loop.net.first.weight]["exp_avg"] is moments


@pytest.mark.parametrize("kept", [False, True], ids=["gone", "kept"])
def test_a_replaced_parameter_changes_nothing(kept: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Where a parameter was replaced since the copy nothing goes back, not even a part, whether the script keeps the old one."""
    loop, wanted = Loop(), False
    with start(loop.net) as exporter:
        exporter.on(lambda m: wanted, Rollback(every=5))
        numbers = iter(range(1, 10**9))
        assert eventually(lambda: loop.step(next(numbers)) or value(exporter, GOOD) is not None)
        old = [loop.net.second.weight] if kept else []
        loop.net.second.weight = torch.nn.Parameter(torch.ones(2, 8))
        loop.optimizers = [torch.optim.SGD(loop.net.parameters(), lr=0.0)]
        weights = loop.net.first.weight.tolist()
        wanted, number = True, next(numbers)
        assert eventually(lambda: loop.step(number) or "action" in errors(exporter))
        assert "a parameter of the copy was replaced since" in caplog.text
        assert loop.net.first.weight.tolist() == weights
        assert loop.net.seen == loop.net.norm.num_batches_tracked
        assert value(exporter, DONE, reason="condition") == 0
    assert len(old) == kept


class Counted(torch.optim.SGD):
    """SGD that counts its steps, and has a tensor, in the state of its first two parameters."""

    def step(self, closure: Any = None) -> None:  # noqa: ANN401 - as `SGD`
        """Step, and count."""
        super().step(closure)
        first, second, *_ = self.param_groups[0]["params"]
        self.state[first]["count"] = self.state[first].get("count", 0) + 1
        self.state[second].setdefault("own", torch.eye(2))


def test_what_cannot_be_written_changes_nothing() -> None:
    """Where a tensor of the state has become one that cannot be written to, all of the training stays as it is."""
    loop, wanted = Loop(), False
    loop.optimizers = [Counted(loop.net.parameters(), lr=0.1)]
    first, second, *_ = loop.net.parameters()
    with start(loop.net) as exporter:
        exporter.on(lambda m: wanted, Rollback(every=5))
        numbers = iter(range(1, 10**9))
        assert eventually(lambda: loop.step(next(numbers)) or value(exporter, GOOD) is not None)
        state = loop.optimizers[0].state
        state[second]["own"] = torch.eye(2).to_sparse()
        wanted = True
        failed = functools.partial(value, exporter, "torch_grad_exporter_actions_total", action="Rollback", result="failed")
        assert eventually(lambda: loop.step(next(numbers)) or failed() == 1)
        assert state[first]["count"] == next(numbers) - 1
