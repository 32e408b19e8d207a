"""Where PyTorch lacks a private name that the package uses, trainings run, a rung lower where need be, and it is said once."""

from __future__ import annotations

import ast
import functools
import json
import logging
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_grad_exporter
from torch_grad_exporter.torch_compat import autograd, fsdp, lost, optimizers, pipelines, replicas, tensors

PACKAGE = Path(torch_grad_exporter.__file__).parent
COMPAT = PACKAGE / "torch_compat"

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
    "torch.nn.Module._forward_pre_hooks": "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_hooks_with_kwargs": "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_pre_hooks_with_kwargs": "torch.nn.Module._forward_hooks",
}
"""What is said where the name is gone: what the exporter then does without."""

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
"""Names that have a public substitute: nothing is lost."""

EITHER = ["torch._C._dynamo.eval_frame.set_code_exec_strategy", "torch._C._dynamo.eval_frame.skip_code"]
"""One of them is in each version."""


@functools.cache
def trainings() -> dict[str, dict[str, Any]]:
    """What the exporter said of a training without each of the names, and with all of them, whose name here is empty."""
    names = ["", *TOLD, *REPLACED, *EITHER]
    command = [sys.executable, "-m", "tests.support.removed_names", *names]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=PACKAGE.parent)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", ["", *TOLD, *REPLACED, *EITHER])
def test_a_training_runs_without_a_private_name(name: str) -> None:
    """Whichever private name PyTorch lacks at import, the training ends with the true norm, no failure, and can be clipped."""
    found = trainings()[name]
    assert "raised" not in found, found["raised"]
    assert found["norm"] == pytest.approx(found["true_norm"], rel=1e-6)
    assert found["clipped_norm"] == pytest.approx(found["true_norm"] / 2, rel=1e-5)
    assert found["steps"] == 12
    assert found["errors"] == 0


@pytest.mark.parametrize("name", ["", *TOLD, *REPLACED, *EITHER])
def test_only_names_that_see_backwards_cost_the_rung(name: str) -> None:
    """Without a name that tells of backwards the rung is `optimizer`; without any other one all backwards are counted."""
    found = trainings()[name]
    expected = ("optimizer", 0) if name in RUNG else ("output", 12)
    assert (found["mode"], found["backwards"]) == expected


@pytest.mark.parametrize("name", ["", *TOLD, *REPLACED])
def test_what_is_lost_is_said_once(name: str) -> None:
    """A name whose loss the user notices is named once with what follows, though two exporters start; others are not mentioned."""
    said = [line for line in trainings()[name]["said"] if "this version of PyTorch" in line]
    told = TOLD.get(name)
    assert len(said) == (told is not None)
    if told is not None:
        assert f" has no {told}: {lost.LOST[told]}" in said[0]


def test_the_oldest_version_allowed_is_tried() -> None:
    """The lower bound of torch in pyproject.toml is the first version that `make compat` runs."""
    root = PACKAGE.parent
    (bound,) = (
        one.removeprefix("torch>=")
        for one in tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
        if one.startswith("torch>=")
    )
    (tried,) = (line.split()[2:] for line in (root / "Makefile").read_text().splitlines() if line.startswith("COMPAT ?="))
    assert tried[0] == bound + ".0" * (2 - bound.count("."))
    assert tried == sorted(tried, key=lambda version: [int(part) for part in version.split(".")])


def private_names(path: Path) -> set[str]:
    """Names with an underscore that a file takes from other modules or objects, as attributes, in imports or as strings."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names} if (node.module or "").startswith("torch.") else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(node.value.split(".")) if node.value.startswith("torch.") else {node.value}
    return {name for name in found if name.startswith("_") and not name.startswith("__") and name.isidentifier()}


def rooted_in_torch(path: Path) -> set[str]:
    """Private parts of dotted names of a file that begin with `torch` or `dist`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        chain, one = [], node
        while isinstance(one, ast.Attribute):
            chain.append(one.attr)
            one = one.value
        if isinstance(one, ast.Name) and one.id in ("torch", "dist"):
            found |= {name for name in chain if name.startswith("_") and not name.startswith("__")}
    return found


def test_private_names_are_in_one_folder() -> None:
    """No other file of the package uses a private name of PyTorch, but for modules' tables of hooks, which are checked for."""
    known = {name for path in COMPAT.rglob("*.py") for name in private_names(path)}
    hooks = {f"_forward{pre}_hooks{kind}" for pre in ("", "_pre") for kind in ("", "_with_kwargs")}
    for path in PACKAGE.rglob("*.py"):
        if path.is_relative_to(COMPAT):
            continue
        allowed = hooks if path.name == "torch_hooks.py" else set()
        assert rooted_in_torch(path) - allowed == set(), path
        assert private_names(path) & (known | hooks) - allowed == set(), path


def test_the_number_of_the_next_node_is_known_without_the_private_name() -> None:
    """A node that is made for it has the number, and the one after that is the next."""
    parameter = torch.ones((), requires_grad=True)
    autograd._sequence_of_a_new_node()
    before = autograd._sequence_of_a_new_node()
    found = autograd.number_of((parameter * 2).grad_fn)
    assert before == found
    assert autograd.next_sequence() == found + 1


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What was logged of names that are gone; as if nothing had been missed before."""
    monkeypatch.setattr(lost, "missing", {})
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        yield lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("shown", ["_register_hook_dict", "_backward_hooks"])
def test_gradients_of_outputs_are_hooked_by_the_public_method(shown: str) -> None:
    """A tensor is hooked by `register_hook` where its node, or the tensor itself, shows no dictionary of hooks."""
    hooked: list[object] = []
    node = types.SimpleNamespace(_register_hook_dict=pytest.fail) if shown == "_register_hook_dict" else object()
    tensor: Any = types.SimpleNamespace(grad_fn=node, register_hook=hooked.append)
    if shown == "_backward_hooks":
        tensor._backward_hooks = None
    autograd.on_gradient(tensor, print)
    assert hooked == [print]


def test_an_optimizer_that_shows_no_hooks_may_have_some() -> None:
    """Where an optimizer has no table of hooks before its step, they are assumed to be there."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    assert not optimizers.has_step_hooks(optimizer)
    del optimizer._optimizer_step_pre_hooks
    assert optimizers.has_step_hooks(optimizer)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_is_found_among_the_callers(monkeypatch: pytest.MonkeyPatch, *, by_name: bool) -> None:
    """Within an optimizer's step the step is found, by PyTorch's wrapper or else by the method's name; outside it is not."""
    if by_name:
        monkeypatch.setattr(optimizers, "_STEP", None)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    found: list[bool] = []

    def closure() -> float:
        found.append(optimizers.called_from_step(sys._getframe()))
        return 0.0

    closure()
    optimizer.step(closure)
    assert found == [False, True]


class PublicScaler:
    """A gradient scaler of which only the public interface is left."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
        self._device = "cpu"

    def is_enabled(self) -> bool:
        """As the scaler says."""
        return self._scaler.is_enabled()

    def get_scale(self) -> float:
        """As the scaler says."""
        return self._scaler.get_scale()


def test_the_scale_is_asked_for_where_it_is_not_shown(said: Callable[[], list[str]]) -> None:
    """Without `_scale` an enabled scaler is asked for its scale, which is said once; a disabled one has none."""
    for _ in range(2):
        scale = optimizers.scale_of(PublicScaler())
        assert scale is not None
        assert scale.item() == 8.0
    assert optimizers.scale_of(PublicScaler(enabled=False)) is None
    assert optimizers.scale_of(None) is None
    assert len(said()) == 1
    assert lost.LOST["torch.amp.GradScaler._scale"] in said()[0]


def test_a_scaler_that_was_never_used_has_no_scale(said: Callable[[], list[str]]) -> None:
    """Of a scaler before its first use there is no scale, and nothing to be said."""
    assert optimizers.scale_of(torch.amp.GradScaler("cpu")) is None
    assert said() == []


class Part(torch.Tensor):
    """A tensor of which this rank has a part, as a DTensor, without a private name."""

    def to_local(self) -> torch.Tensor:
        """That part."""
        assert not torch.is_grad_enabled()
        return self.as_subclass(torch.Tensor)[:1]


class Whole(torch.Tensor):
    """A tensor of another class that is all here."""


def test_the_local_part_is_asked_for_where_it_is_not_shown() -> None:
    """Without `_local_tensor` a DTensor's public method gives this rank's part; a plain tensor is its own."""
    plain = torch.arange(3.0)
    assert tensors.local(plain) is plain
    assert tensors.local(plain.as_subclass(Part)).tolist() == [0.0]
    subclass = plain.as_subclass(Whole)
    assert tensors.local(subclass) is subclass


def test_a_mesh_that_cannot_be_asked_has_no_root(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    """Where a mesh does not know what it was sliced from, there is no root, and the user learns what follows."""
    monkeypatch.delitem(sys.modules, "torch.distributed.device_mesh", raising=False)
    assert replicas.root_mesh(object()) is None
    assert lost.LOST["torch.distributed.device_mesh.DeviceMesh._get_root_mesh"] in said()[0]


def test_a_composed_wrapper_that_is_not_shown_is_none(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    """Where `replicate` hides its state, no wrapper is found, and the user learns what follows."""
    monkeypatch.setitem(sys.modules, "torch.distributed._composable.replicate", types.ModuleType("replicate"))
    assert replicas.composed_wrapper(torch.nn.Linear(1, 1)) is None
    assert lost.LOST["torch.distributed._composable.replicate"] in said()[0]


@pytest.fixture
def wrapper(tmp_path: Path) -> Iterator[DistributedDataParallel]:
    """A wrapper in a job of one rank, around a model of which one parameter is frozen."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = torch.nn.Linear(2, 3)
    model.bias.requires_grad_(requires_grad=False)
    yield DistributedDataParallel(model)
    dist.destroy_process_group()


def test_reduced_parameters_are_found_by_the_public_method(wrapper: DistributedDataParallel) -> None:
    """Without the wrapper's own list, the parameters that require a gradient are the same ones."""
    shown = list(replicas.reduced_parameters(wrapper))
    del wrapper._module_parameters
    found = list(replicas.reduced_parameters(wrapper))
    assert len(found) == 1
    assert found[0] is shown[0] is wrapper.module.weight


@pytest.mark.parametrize("name", ["_comm_hooks", "_join_config"])
def test_a_wrapper_that_hides_its_hooks_need_not_take_the_mean(
    wrapper: DistributedDataParallel, said: Callable[[], list[str]], name: str
) -> None:
    """Where it is not shown what communicates, the mean is not assumed, and the user learns what follows."""
    assert replicas.takes_the_mean(wrapper)
    delattr(wrapper, name)
    assert not replicas.takes_the_mean(wrapper)
    assert lost.LOST["torch.nn.parallel.DistributedDataParallel._comm_hooks"] in said()[0]


def test_a_running_wrapper_that_is_not_shown_is_none(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    """Where PyTorch does not say whose forward is running, no wrapper is found, and the user learns what follows."""
    assert replicas.active_wrapper() is None
    assert said() == []
    monkeypatch.delattr(DistributedDataParallel, "_get_active_ddp_module")
    assert replicas.active_wrapper() is None
    assert "DistributedDataParallel._get_active_ddp_module" in said()[0]


def test_a_groups_store_that_is_not_shown_is_none(
    wrapper: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """Where the process group hides its store there is none, and the user learns what follows."""
    assert wrapper is not None
    assert isinstance(replicas.default_store(), dist.Store)
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    assert replicas.default_store() is None
    assert lost.LOST["torch.distributed.distributed_c10d._get_default_store"] in said()[0]


def test_a_store_that_hides_what_it_is_around_is_itself() -> None:
    """A store whose prefixes cannot be taken off is returned as it is."""
    store = object()
    assert replicas.without_prefix(store) is store


class Schedule:
    """As a pipeline schedule that shows what it is given."""

    def __init__(self, **shown: object) -> None:
        vars(self).update(shown)

    def _step_microbatches(self) -> pipelines.Pipeline | None:
        return pipelines.calling_pipeline(sys._getframe(0))


def schedules(monkeypatch: pytest.MonkeyPatch, **names: object) -> types.ModuleType:
    """A module of schedules in the place of PyTorch's, in which `Schedule` runs."""
    module = types.ModuleType("schedules")
    run = types.FunctionType(Schedule._step_microbatches.__code__, vars(module))
    vars(module).update(names, pipelines=pipelines, sys=sys)
    monkeypatch.setattr(Schedule, "_step_microbatches", run)
    monkeypatch.setitem(sys.modules, "torch.distributed.pipelining.schedules", module)
    return module


@pytest.mark.parametrize(
    ("shown", "stage", "expected"),
    [
        ({"_n_microbatches": 4, "scale_grads": True}, {"scale_grads": print}, 4),
        ({"_n_microbatches": 4, "scale_grads": False}, {"scale_grads": print}, 1),
        ({"_n_microbatches": 4}, {}, 1),
        ({"_n_microbatches": 4}, {"scale_grads": print}, None),
        ({"scale_grads": True}, {"scale_grads": print}, None),
    ],
)
def test_a_schedule_says_by_what_it_divides(
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[[], list[str]],
    shown: dict[str, object],
    stage: dict[str, object],
    expected: int | None,
) -> None:
    """Before stages could divide none does; where a schedule hides what it does, that is not known, and the user learns it."""
    schedules(monkeypatch, PipelineScheduleSingle=Schedule, _PipelineStageBase=type("Stage", (), stage))
    found = Schedule(**shown)._step_microbatches()
    assert found == pipelines.Pipeline(expected, piecewise=False)
    told = lost.LOST["torch.distributed.pipelining.schedules._PipelineSchedule"]
    assert [told in line for line in said()] == [True] * (expected is None)


def test_no_schedule_among_the_callers() -> None:
    """A function that no schedule has called."""
    assert pipelines.calling_pipeline(sys._getframe(0)) is None


@pytest.mark.parametrize("shown", [{}, {"_handle": object()}, {"_handle": types.SimpleNamespace(flat_param=torch.ones(2))}])
def test_fsdp1_that_hides_its_parts_has_none(said: Callable[[], list[str]], shown: dict[str, object]) -> None:
    """Where FullyShardedDataParallel does not show what it keeps, nothing is taken for known, and the user learns what follows."""
    assert fsdp.flat_of(types.SimpleNamespace(**shown)) is None
    assert lost.LOST["torch.distributed.fsdp.FullyShardedDataParallel._handle"] in said()[0]


def test_an_fsdp1_module_without_parameters_has_no_part(said: Callable[[], list[str]]) -> None:
    """A module whose parameters are all those of modules within."""
    assert fsdp.flat_of(types.SimpleNamespace(_handle=None)) is None
    assert said() == []
