"""Where PyTorch lacks a private name that the package uses, training runs, less is measured where needed, and it is logged once."""

from __future__ import annotations

import functools
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.programs import Starter
from torch_grad_exporter.torch_compat import autograd, fsdp, lost, optimizers, replicas, tensors

RUNG = {
    "torch._C._current_graph_task_id": "torch._C._current_graph_task_id",
    "torch.autograd.Variable._execution_engine": "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.Tensor._version": "torch.Tensor._version",
}
"""Without these gradients are read when the optimizer steps."""

TOLD = {
    **RUNG,
    "torch.optim.optimizer._global_optimizer_pre_hooks": "torch.optim.optimizer._global_optimizer_pre_hooks",
    "torch.optim.optimizer._global_optimizer_post_hooks": "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch._C._dynamo.eval_frame.set_eval_frame": "torch._C._dynamo.eval_frame.set_eval_frame",
    "torch._C._functorch.maybe_current_level": "torch._C._functorch.maybe_current_level",
    "torch.nn.Module._forward_hooks": "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_pre_hooks_with_kwargs": "torch.nn.Module._forward_hooks",
}
"""By hidden name, the name whose loss is logged."""

REPLACED = [
    "torch._C._is_tracing",
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "torch._dynamo.utils.counters",
    "torch.optim.Optimizer.profile_hook_step",
    "torch.nn.Module._parameters",
    "torch.nn.Module._modules",
    "torch.nn.modules.conv._ConvTransposeNd",
    "torch._foreach_norm",
    "torch._foreach_mul_",
    "torch.utils._foreach_utils._group_tensors_by_device_and_dtype",
    "torch.utils._foreach_utils._has_foreach_support",
]
"""Names that have a public substitute, hidden together: nothing is lost."""

EITHER = ["torch._C._dynamo.eval_frame.set_code_exec_strategy", "torch._C._dynamo.eval_frame.skip_code"]
"""One of them is in each version."""


TOGETHER = "+".join(name for name in TOLD if name not in RUNG)
OFTEN = ("", "torch._C._current_graph_task_id", TOGETHER, "+".join(REPLACED))
SELDOM = (*(name for name in RUNG if name not in OFTEN), *EITHER)

TRAININGS = """
import json, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "torch_grad_exporter"]:
    del sys.modules[name]
from tests.support.removed_names import in_a_fork
print(json.dumps({name: in_a_fork(name) for name in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def trainings(starter: Starter) -> Callable[[tuple[str, ...]], dict[str, dict[str, Any]]]:
    """Return the reports of trainings without names; under the empty name, of one with all of them."""

    @functools.cache
    def reports(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        program = starter.start(TRAININGS, *names)
        assert program.wait() == 0, program.err.read_text()
        found: dict[str, dict[str, Any]] = json.loads(program.out.read_text())
        return found

    return reports


@pytest.mark.process
@pytest.mark.parametrize("name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.full) for name in SELDOM)])
def test_a_training_without_a_private_name(name: str, trainings: Callable[[tuple[str, ...]], dict[str, dict[str, Any]]]) -> None:
    """Without a private name training ends with the true norm and no failure; what is lost is logged once, by name."""
    report = trainings(OFTEN if name in OFTEN else SELDOM)[name]
    assert "raised" not in report, report["raised"]
    assert report["norm"] == pytest.approx(report["true_norm"], rel=1e-6)
    assert report["clipped_norm"] == pytest.approx(report["true_norm"] / 2, rel=1e-5)
    assert (report["steps"], report["errors"]) == (12, 0)
    assert (report["mode"], report["backwards"]) == (("optimizer", 0) if name in RUNG else ("backward", 12))
    if name not in EITHER:
        missing = {TOLD[part] for part in name.split("+") if part in TOLD}
        lines = [line.partition(" has no ")[2] for line in report["said"] if "this version of PyTorch" in line]
        assert len(lines) == len(missing)
        assert all(any(line.startswith(f"{one}: {lost.LOST[one]}") for line in lines) for one in missing)


# Public substitutes, each where a private name is hidden


def test_the_number_of_the_next_node() -> None:
    """The number that the next node of a graph gets is known before it is made."""
    parameter = torch.ones((), requires_grad=True)
    before = autograd.next_sequence()
    number = autograd.number_of((parameter * 2).grad_fn)
    assert autograd.next_sequence() == number + 1
    assert before <= number


def test_the_scale_of_a_gradient_scaler() -> None:
    """A scaler that hides its scale is asked for it; an unused and a missing one have none."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    public = types.SimpleNamespace(_device="cpu", is_enabled=scaler.is_enabled, get_scale=scaler.get_scale)
    scale = optimizers.scale_of(public)
    assert scale is not None
    assert scale.item() == 8.0
    assert (optimizers.scale_of(torch.amp.GradScaler("cpu")), optimizers.scale_of(None)) == (None, None)


class Part(torch.Tensor):
    """A tensor of which this rank has a part, like a DTensor, without a private name."""

    def to_local(self) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        return self.as_subclass(torch.Tensor)[:1]


class Whole(torch.Tensor):
    """A tensor of another class that is all here."""


def test_the_local_part_of_a_tensor() -> None:
    """A DTensor that hides its part is asked for it; other tensors are whole."""
    plain = torch.arange(3.0)
    assert tensors.local(plain) is plain
    assert tensors.local(plain.as_subclass(Part)).tolist() == [0.0]
    subclass = plain.as_subclass(Whole)
    assert tensors.local(subclass) is subclass


def test_replicas_that_hide_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh, a composed wrapper and a store that hide what they belong to belong to nothing."""
    monkeypatch.delitem(sys.modules, "torch.distributed.device_mesh", raising=False)
    assert replicas.root_mesh(object()) is None
    monkeypatch.setitem(sys.modules, "torch.distributed._composable.replicate", types.ModuleType("replicate"))
    assert replicas.composed_wrapper(torch.nn.Linear(1, 1)) is None
    store = object()
    assert replicas.without_prefix(store) is store


@pytest.fixture
def wrapper(tmp_path: Path) -> Iterator[DistributedDataParallel]:
    """Return a wrapper in a job of one rank, around a model of which one parameter is frozen."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = torch.nn.Linear(2, 3)
    model.bias.requires_grad_(requires_grad=False)
    yield DistributedDataParallel(model)
    dist.destroy_process_group()


def test_ddp_that_hides_its_parameters(wrapper: DistributedDataParallel) -> None:
    """Without the wrapper's own list the reduced parameters are those that require a gradient."""
    shown = list(replicas.reduced_parameters(wrapper))
    delattr(wrapper, "_module_parameters")
    (reduced,) = replicas.reduced_parameters(wrapper)
    assert reduced is shown[0] is wrapper.module.weight


@pytest.mark.parametrize("name", ["_comm_hooks", "_join_config"])
def test_ddp_that_hides_its_hooks(wrapper: DistributedDataParallel, name: str) -> None:
    """A wrapper that hides what communicates is not assumed to take the mean."""
    assert replicas.takes_the_mean(wrapper)
    delattr(wrapper, name)
    assert not replicas.takes_the_mean(wrapper)


def test_a_job_that_hides_its_state(wrapper: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch hides whose forward is running and the job's store, there is neither."""
    assert wrapper is not None
    assert replicas.active_wrapper() is None
    assert isinstance(replicas.default_store(), dist.Store)
    monkeypatch.delattr(DistributedDataParallel, "_get_active_ddp_module")
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    assert replicas.active_wrapper() is None
    assert replicas.default_store() is None


@pytest.mark.parametrize(
    "shown", [{}, {"_handle": None}, {"_handle": object()}, {"_handle": types.SimpleNamespace(flat_param=torch.ones(2))}]
)
def test_fsdp1_that_hides_its_parts(shown: dict[str, object]) -> None:
    """FullyShardedDataParallel that hides what it keeps, or has no parameters of its own, has no known part."""
    assert fsdp.flat_of(types.SimpleNamespace(**shown)) is None
