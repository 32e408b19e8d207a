"""The model stays ordinary: attached it is copied, saved, exported, sent and freed as without us, and `close()` leaves nothing."""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import io
import json
import logging
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.multiprocessing as mp
from torch._dynamo.utils import counters
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.optim.swa_utils import AveragedModel

from tests.support.models import Perceptron, batch, sgd
from tests.support.record import gradients_of, norm
from tests.support.scrape import errors, key, mode, value, values
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.composition import open_exporters

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def build() -> torch.nn.Sequential:
    """A model of torch's own modules, so that it loads anywhere, with buffers."""
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def by_root(model: torch.nn.Sequential, x: torch.Tensor) -> None:
    """A backward that rung `output` sees."""
    model(x).square().mean().backward()


def by_parts(model: torch.nn.Sequential, x: torch.Tensor) -> None:
    """A backward that rung `parameter` sees."""
    for part in model:
        x = part(x)
    x.square().mean().backward()


def by_hand(model: torch.nn.Sequential, x: torch.Tensor) -> None:
    """Gradients that only rung `optimizer` sees."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(x).square().mean(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


RUNGS: dict[str, Callable[[torch.nn.Sequential, torch.Tensor], None]] = {
    "output": by_root,
    "parameter": by_parts,
    "optimizer": by_hand,
}


def threads_of_ours() -> list[str]:
    """The exporters' threads that run now."""
    return [thread.name for thread in threading.enumerate() if "torch-grad-exporter" in thread.name]


@dataclass
class Attached:
    """A model in training, on one rung, with its exporter."""

    rung: str
    model: torch.nn.Sequential
    optimizer: torch.optim.Optimizer
    exporter: Exporter

    def step(self, x: torch.Tensor | None = None) -> float:
        """One step; the float64 norm of its gradients."""
        self.optimizer.zero_grad()
        RUNGS[self.rung](self.model, batch() if x is None else x)
        whole = norm(gradients_of(self.model).values())
        self.optimizer.step()
        return whole

    def counted(self) -> dict[object, float]:
        """Everything that is counted, but for times."""
        ours = ("torch_train_", "torch_grad_")
        return {
            k: v
            for k, v in values(self.exporter).items()
            if k[0].startswith(ours) and k[0].endswith(("_total", "_count")) and "_seconds" not in k[0]
        }

    def goes_on(self) -> None:
        """Asserts that the next two steps are seen on the same rung, counted once and shown with the right norm."""
        for _ in range(2):
            before = self.counted()
            expected = self.step()
            assert value(self.exporter, "torch_grad_global_norm") == pytest.approx(expected, rel=1e-5)
            for name in (key("torch_train_steps_total", optimizer="SGD"), key("torch_grad_captures_total", layer="0")):
                assert self.counted()[name] == before[name] + 1
        assert mode(self.exporter) == self.rung
        assert errors(self.exporter) == {}


def attach(rung: str, port: int | None = None, **options: object) -> Attached:
    """A model after six steps, which are enough to come to each rung."""
    torch.manual_seed(0)
    model = build()
    exporter = start_exporter(model, port, **{"every": 1, "addr": "127.0.0.1", **options})
    attached = Attached(rung, model, sgd(model), exporter)
    for _ in range(6):
        attached.step()
    assert mode(exporter) == rung
    return attached


@pytest.fixture(params=RUNGS)
def attached(request: pytest.FixtureRequest) -> Iterator[Attached]:
    """An attached model on each rung."""
    found = attach(request.param)
    with found.exporter:
        yield found


def same_state(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two models have the same state, to the last bit."""
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and a._metadata == b._metadata and all(torch.equal(a[k], b[k]) for k in a)


# Copies


class Wrapper(torch.nn.Module):
    """Around a model, as a parallel one is."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def pickled(model: torch.nn.Module) -> torch.nn.Module:
    """Through pickle."""
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - our own


def saved(model: torch.nn.Module) -> torch.nn.Module:
    """Through `torch.save` and `torch.load`."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper], ids=["itself", "wrapped"])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled, saved], ids=lambda way: way.__name__)
def test_a_model_that_has_its_exporter_is_copied(
    attached: Attached, copied: Callable[[torch.nn.Module], torch.nn.Module], wrap: Callable[[torch.nn.Module], torch.nn.Module]
) -> None:
    """A copy of a model with the exporter as an attribute has the same one, a loaded one has none; each trains by itself."""
    attached.model.exporter = attached.exporter
    twin = copied(wrap(attached.model))
    inner = twin.module if isinstance(twin, Wrapper) else twin
    assert inner.exporter is (attached.exporter if copied in (copy.copy, copy.deepcopy) else None)
    assert same_state(inner, attached.model)
    if copied is not copy.copy:  # that one shares its parameters
        before, optimizer = attached.counted(), sgd(twin)
        twin(batch()).square().mean().backward()
        optimizer.step()
        assert not same_state(inner, attached.model)
        assert attached.counted() == before
    attached.goes_on()


def test_an_average_of_a_model_that_has_its_exporter(attached: Attached) -> None:
    """`AveragedModel`, which copies the model, averages one that has its exporter as an attribute."""
    attached.model.exporter = attached.exporter
    average = AveragedModel(attached.model)
    attached.goes_on()
    average.update_parameters(attached.model)
    assert average.module.exporter is attached.exporter
    assert same_state(average.module, attached.model)


@pytest.mark.parametrize("armed", [False, True], ids=["after a step", "after a forward"])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved], ids=lambda way: way.__name__)
def test_a_copy_is_not_watched(attached: Attached, copied: Callable[[torch.nn.Module], torch.nn.Module], armed: bool) -> None:
    """A copy of any kind is equal, trains without reaching the exporter, and can have an exporter of its own."""
    if armed:
        attached.model(batch())
    twin = copied(attached.model)
    assert same_state(twin, attached.model)
    assert repr(twin) == repr(attached.model)
    before = attached.counted()
    optimizer = sgd(twin)
    for _ in range(3):
        optimizer.zero_grad()
        RUNGS[attached.rung](twin, batch())
        optimizer.step()
    assert attached.counted() == before
    with start_exporter(twin, None, every=1) as second:
        of_twin = Attached(attached.rung, twin, optimizer, second)
        for _ in range(6):
            of_twin.step()
        of_twin.goes_on()
        assert attached.counted() == before
        assert errors(attached.exporter) == {}
    attached.goes_on()


def test_a_copy_of_a_copy() -> None:
    """A copy of a copy, with the original long closed, is a copy like any other."""
    first = attach("output")
    twin = copy.deepcopy(first.model)
    first.exporter.close()
    for copied in (copy.deepcopy, pickled, saved):
        twin = copied(twin)
    with start_exporter(twin, None, every=1) as exporter:
        last = Attached("output", twin, sgd(twin), exporter)
        last.step()
        last.goes_on()


def test_a_shallow_copy_is_the_same_model(attached: Attached) -> None:
    """`copy.copy` shares parameters and hooks, so what it trains is the model's training; `close()` clears both."""
    alias = copy.copy(attached.model)
    Attached(attached.rung, alias, attached.optimizer, attached.exporter).goes_on()
    attached.exporter.close()
    assert hooks_of(alias) == []


def test_state_dicts(attached: Attached) -> None:
    """State dicts of model and optimizer have the keys that they have without us, and load with `weights_only`."""
    plain = build()
    optimizer = sgd(plain)
    optimizer.zero_grad()
    by_root(plain, batch())
    optimizer.step()
    for ours, theirs in ((attached.model, plain), (attached.optimizer, optimizer)):
        assert list(ours.state_dict()) == list(theirs.state_dict())
    buffer = io.BytesIO()
    torch.save({"model": attached.model.state_dict(), "optimizer": attached.optimizer.state_dict()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    plain.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert same_state(plain, attached.model)
    attached.model.load_state_dict(loaded["model"])
    attached.optimizer.load_state_dict(loaded["optimizer"])
    attached.goes_on()


def test_loads_where_this_package_is_not(tmp_path: Path) -> None:
    """A model pickled or saved on any rung loads, runs and trains in a process that cannot import the package."""
    x = batch()
    for rung in RUNGS:
        one = attach(rung)
        with one.exporter:
            for armed in ("stepped", "armed"):
                (tmp_path / f"{rung}-{armed}.pickle").write_bytes(pickle.dumps(one.model))
                torch.save(one.model, tmp_path / f"{rung}-{armed}.saved")
                torch.save(copy.deepcopy(one.model).eval()(x).detach(), tmp_path / f"{rung}-{armed}.expected")
                one.model(x)
    torch.save(x, tmp_path / "inputs")
    script = """
        import sys, pathlib
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "torch_grad_exporter":
                    raise ImportError(name)
        sys.meta_path.insert(0, Refuse())
        import pickle, torch
        where = pathlib.Path(sys.argv[1])
        x = torch.load(where / "inputs", weights_only=True)
        for path in sorted([*where.glob("*.pickle"), *where.glob("*.saved")]):
            if path.suffix == ".pickle":
                model = pickle.loads(path.read_bytes())
            else:
                model = torch.load(path, weights_only=False)
            assert torch.equal(model.eval()(x), torch.load(path.with_suffix(".expected"), weights_only=True)), path
            model.train()(x).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            print(path.name)
        assert "torch_grad_exporter" not in sys.modules
        print("fine")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split()[-1:] == ["fine"], done.stderr
    assert len(done.stdout.split()) == 2 * 2 * len(RUNGS) + 1


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averaged_model(attached: Attached, use_buffers: bool) -> None:
    """An `AveragedModel` of the attached model averages, is no part of its training and is not watched."""
    average = AveragedModel(attached.model, use_buffers=use_buffers)
    before = attached.counted()[key("torch_train_backward_passes_total")]
    for _ in range(3):
        attached.step()
        average.update_parameters(attached.model)
        average(batch())
    # Without a backward that can be seen, as on the rung `optimizer`, none is counted.
    passes = 0 if attached.rung == "optimizer" else 3
    assert attached.counted()[key("torch_train_backward_passes_total")] == before + passes
    assert average.n_averaged == 3
    copy.deepcopy(average)
    attached.goes_on()


# Other forms of the model


def exported(model: torch.nn.Module) -> str:
    """The graph of `torch.export`."""
    return torch.export.export(model, (torch.ones(5, 6),), strict=False).graph_module.code


def exported_strictly(model: torch.nn.Module) -> str:
    """The graph of `torch.export` through dynamo."""
    return torch.export.export(model, (torch.ones(5, 6),), strict=True).graph_module.code


def traced(model: torch.nn.Module) -> str:
    """The graph of `torch.jit.trace`, and its warnings: torch's own batch norm has one."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", torch.jit.TracerWarning)
        graph = torch.jit.trace(model, torch.ones(5, 6), check_trace=False).code
    return str(graph) + "".join(str(warning.message) for warning in warned if warning.category is torch.jit.TracerWarning)


def symbolic(model: torch.nn.Module) -> str:
    """The graph of `torch.fx`."""
    return torch.fx.symbolic_trace(model).code


def inner_symbolic(model: torch.nn.Module) -> str:
    """The graph of `torch.fx` where the model is a part of another one."""
    return torch.fx.symbolic_trace(torch.nn.ModuleDict({"inner": model})["inner"]).code


def with_symbols(model: torch.nn.Module) -> str:
    """The graph of `make_fx` with symbolic shapes."""
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}

    def call(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, state, (x,))

    return torch.fx.experimental.proxy_tensor.make_fx(call, tracing_mode="symbolic")(state, torch.ones(5, 6)).code


@pytest.mark.parametrize("attached", ["output", "parameter"], indirect=True)
@pytest.mark.parametrize("form", [exported, exported_strictly, traced, symbolic, inner_symbolic, with_symbols])
def test_other_forms_have_nothing_of_us(attached: Attached, form: Callable[[torch.nn.Module], str]) -> None:
    """Each way to turn a model into a graph gives the graph that it gives without us, and training goes on."""
    before = attached.counted()
    assert form(attached.model) == form(copy.deepcopy(build()))
    assert attached.counted() == before
    attached.goes_on()


def per_sample(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Gradients of each row, by `vmap` over `grad`."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, (parameters, buffers), (row.unsqueeze(0),)).square().mean()

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)["0.weight"]


TRANSFORMS: dict[str, Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]] = {
    "per-sample gradients": per_sample,
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "hessian": lambda model, x: torch.func.hessian(lambda y: model(y).square().sum())(x),
    "jacobian": torch.autograd.functional.jacobian,
    "inference mode": lambda model, x: torch.inference_mode()(model)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_function_transforms(attached: Attached, transform: str) -> None:
    """Transforms of functions over the model give what they give without us, and are no training."""
    x = batch()
    twin = copy.deepcopy(attached.model)
    attached.model.eval()
    before = attached.counted()[key("torch_train_backward_passes_total")]
    found = TRANSFORMS[transform](attached.model, x)
    assert torch.equal(found, TRANSFORMS[transform](twin.eval(), x))
    assert attached.counted()[key("torch_train_backward_passes_total")] == before
    attached.model.train()
    attached.goes_on()


# What is asked of a module


def test_everything_that_is_asked_of_a_module(attached: Attached) -> None:
    """`repr`, the modules, parameters, buffers and attributes of an attached model are those of another of its kind."""
    plain = build()
    assert repr(attached.model) == repr(plain)
    assert dir(attached.model) == dir(plain)
    for ours, theirs in zip(attached.model.modules(), plain.modules(), strict=True):
        assert list(vars(ours)) == list(vars(theirs))
        assert type(ours) is type(theirs)
    for what in ("named_modules", "named_parameters", "named_buffers", "named_children"):
        assert [name for name, _ in getattr(attached.model, what)()] == [name for name, _ in getattr(plain, what)()]
    visited: list[torch.nn.Module] = []
    attached.model.apply(visited.append)
    assert len(visited) == len(list(plain.modules()))
    for ours, theirs in zip(attached.model.parameters(), plain.parameters(), strict=True):
        assert type(ours) is type(theirs)
        assert vars(ours) == vars(theirs)


def converted(model: torch.nn.Module) -> None:
    """Other memory of another type, in the same parameters."""
    model.to(torch.float64)
    model.to(torch.float32)


def assigned(model: torch.nn.Module) -> None:
    """Other parameters in the place of those that were there."""
    model.load_state_dict({k: v.detach().clone() for k, v in model.state_dict().items()}, assign=True)


def refrozen(model: torch.nn.Module) -> None:
    """Gradients off and on."""
    model.requires_grad_(False).requires_grad_(True)


def shared(model: torch.nn.Module) -> None:
    """Memory that other processes can have."""
    model.share_memory()


@pytest.mark.parametrize("change", [converted, assigned, refrozen, shared])
def test_changed_in_place(attached: Attached, change: Callable[[torch.nn.Module], None]) -> None:
    """What changes all parameters in place, after a step or after a forward, does so, and training is seen as before."""
    for armed in (False, True):
        if armed:
            attached.model(batch())
        change(attached.model)
        attached.optimizer = sgd(attached.model)
        if attached.rung == "parameter":
            attached.step()  # the hooks of this round may be on nodes that are no longer there: it may be lost
        attached.goes_on()


def test_replaced_parameters_on_rounds_that_are_not_sampled() -> None:
    """With a long interval, too, parameters and their optimizer may be replaced: each step is counted, and samples go on."""
    model = build()
    optimizer = sgd(model)
    with start_exporter(model, None, every=16) as exporter:
        for step in range(48):
            if step == 5:
                assigned(model)
                optimizer = sgd(model)
            optimizer.zero_grad()
            by_root(model, batch())
            optimizer.step()
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 48
        assert value(exporter, "torch_train_skipped_steps_total") == 0
        assert value(exporter, "torch_grad_captures_total", layer="0") == 3


def test_trained_in_another_type() -> None:
    """A model that is converted to float64 for good goes on in it, on each rung."""
    for rung in RUNGS:
        one = attach(rung)
        with one.exporter:
            one.model.to(torch.float64)
            for step in range(4):
                expected = one.step(batch().double())
                shown = value(one.exporter, "torch_grad_global_norm")
                # On the rung `parameter` the first round may be lost, as its hooks are on nodes that are no longer there.
                assert shown == pytest.approx(expected, rel=1e-9) or (step == 0 and rung == "parameter"), rung
            assert value(one.exporter, "torch_train_steps_total", optimizer="SGD") == 10
            assert mode(one.exporter) == rung
            assert errors(one.exporter) == {}


# Other processes


def facts() -> list[float]:
    """What of an exporter there is in this process: live ones, threads, listening sockets, hooks of optimizers."""
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    return [float(len(open_exporters())), float(len(threads_of_ours())), float(len(listening)), float(hooks)]


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows made in the worker with the model that is being trained, and what of an exporter there is in the worker."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.model(torch.full((2, 6), float(index)))
        return out.detach().new_ones(6) * index, torch.tensor(facts())


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=[pytest.mark.full] * (one == "spawn")) for one in multiprocessing.get_all_start_methods()]
)
def test_loader_workers(method: str) -> None:
    """Workers of each kind that carry the model end, hold no socket and start nothing; the parent's exporter goes on."""
    one = attach("output", 0)
    with one.exporter:
        loader = torch.utils.data.DataLoader(Rows(one.model), batch_size=4, num_workers=1, multiprocessing_context=method)
        before = one.counted()[key("torch_train_samples_total")]
        found = []
        for inputs, in_worker in one.exporter.watch_loader(loader):
            one.step(inputs + torch.randn(4, 6))
            found.append(in_worker)
        live, threads, listening, optimizer_hooks = torch.cat(found).amax(dim=0).tolist()
        assert (live, threads, listening) == (0, 0, 0)
        # A forked child has the parent's hook, which does nothing there.
        assert optimizer_hooks == (len(torch_optimizer._global_optimizer_pre_hooks) if method == "fork" else 0)
        assert multiprocessing.active_children() == []
        assert one.counted()[key("torch_train_samples_total")] == before + 16
        one.goes_on()
        assert threads_of_ours() != []


def in_another_process(_number: int, model: torch.nn.Sequential, folder: str) -> None:
    """Says what of an exporter came along with the model, trains it, and watches it."""
    torch.set_num_threads(1)
    came = facts()
    optimizer = sgd(model)
    optimizer.zero_grad()
    by_root(model, torch.ones(5, 6))
    optimizer.step()
    still = facts()
    with start_exporter(model, None, every=1) as exporter:
        own = Attached("output", model, optimizer, exporter)
        own.step()
        own.goes_on()
    Path(folder, "found.json").write_text(json.dumps([came, still]))


def test_model_given_to_another_process(tmp_path: Path) -> None:
    """A function in a spawned process that is given the model can train it, with an exporter of its own or with none."""
    one = attach("output", 0)
    with one.exporter:
        before = one.counted()
        mp.spawn(in_another_process, args=(one.model, str(tmp_path)), nprocs=1)
        assert json.loads((tmp_path / "found.json").read_text()) == [[0, 0, 0, 0]] * 2
        assert one.counted() == before
        one.goes_on()


# Nothing is held


def alive(references: Sequence[weakref.ref[object]]) -> list[object]:
    """What has not been freed."""
    gc.collect()
    return [found for reference in references if (found := reference()) is not None]


@pytest.mark.parametrize("moment", ["stepped", "forward", "backward", "failed backward"])
def test_the_model_and_its_optimizer_can_go(attached: Attached, moment: str) -> None:
    """What the user drops is freed while the exporter is attached, whatever it was doing, and a scrape still works."""
    attached.optimizer.zero_grad()
    if moment == "forward":
        attached.model(batch())
    elif moment == "backward":
        RUNGS[attached.rung](attached.model, batch())
    elif moment == "failed backward":

        def fail(_gradient: torch.Tensor) -> None:
            raise RuntimeError("the user's own")

        handle = attached.model[0].weight.register_hook(fail)
        with contextlib.suppress(RuntimeError):
            RUNGS[attached.rung](attached.model, batch())
        handle.remove()
        del handle, fail
    references: list[weakref.ref[object]] = [
        weakref.ref(attached.optimizer),
        *(weakref.ref(module) for module in attached.model.modules()),
        *(weakref.ref(parameter) for parameter in attached.model.parameters()),
    ]
    exporter = attached.exporter
    attached.model = attached.optimizer = None  # type: ignore[assignment]
    assert alive(references) == []
    assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 6
    assert errors(exporter) == {}


def test_the_model_can_go_while_armed_at_the_first_step() -> None:
    """Nodes that are hooked for the first sample do not keep the parameters alive either."""
    model = build()
    with start_exporter(model, None):
        model(batch())
        references = [weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]
        del model
        assert alive(references) == []


def test_gradients_and_graphs_are_not_kept(attached: Attached) -> None:
    """After `zero_grad` no gradient of before lives on, and no output when the user drops it."""
    for _ in range(3):
        attached.step()
        out = attached.model(batch())
        gone = [weakref.ref(out), *(weakref.ref(p.grad) for p in attached.model.parameters())]
        attached.optimizer.zero_grad()
        del out
        assert alive(gone) == []


# Nothing is left


HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def hooks_of(model: torch.nn.Module) -> list[object]:
    """Every hook on the modules and the parameters."""
    found = [hook for module in model.modules() for name in HOOKS for hook in getattr(module, name).values()]
    for parameter in model.parameters():
        found += (parameter._post_accumulate_grad_hooks or {}).values()
        found += (parameter._backward_hooks or {}).values()
    return found


def state_of_torch() -> dict[str, object]:
    """What is global in torch, and what a module remembers to call."""
    return {
        "module hooks": [
            dict(getattr(torch_module, name))
            for name in (
                "_global_forward_hooks",
                "_global_forward_pre_hooks",
                "_global_backward_hooks",
                "_global_backward_pre_hooks",
            )
        ],
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()),
        "cuda": torch.cuda.is_initialized(),
    }


def state_of_process() -> dict[str, object]:
    """What a library could leave behind in a process, but for what belongs to torch."""
    root = logging.getLogger()
    ours = logging.getLogger("torch_grad_exporter")
    return {
        "environment": dict(os.environ),
        "logging": [(list(log.handlers), log.level, log.propagate, log.disabled, list(log.filters)) for log in (root, ours)],
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "warnings": list(warnings.filters),
        "excepthooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.gettrace(), sys.getprofile()),
        "gc": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "path": (list(sys.path), list(sys.meta_path), Path.cwd()),
        "switch interval": sys.getswitchinterval(),
        "streams": (sys.stdout, sys.stderr),
    }


def open_files() -> list[str]:
    """What this process has open: files, sockets, pipes."""
    found = []
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(one.readlink()).partition("[")[0])
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux shows them")
def test_close_leaves_nothing(attached: Attached) -> None:
    """After `close()` models and process are as if there had been no exporter, and already before it torch is."""
    attached.exporter.close()
    registered = atexit._ncallbacks()
    files, torches, process = open_files(), state_of_torch(), state_of_process()
    optimizer_hooks = len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)
    fresh = build()
    modules = [{name: list(v) for name, v in vars(m).items() if name in HOOKS} for m in fresh.modules()]

    second = attach(attached.rung, 0, moments=True, weights=True)
    assert threads_of_ours() != []
    assert hooks_of(second.model) != []
    assert state_of_torch() == torches
    assert state_of_process() == process
    port = second.exporter.port
    second.exporter.close()

    assert hooks_of(second.model) == []
    assert [{name: list(v) for name, v in vars(m).items() if name in HOOKS} for m in second.model.modules()] == modules
    assert [list(vars(m)) for m in second.model.modules()] == [list(vars(m)) for m in fresh.modules()]
    found = len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)
    assert found == optimizer_hooks
    assert threads_of_ours() == []
    assert len(open_exporters()) == 0
    assert atexit._ncallbacks() == registered
    assert (state_of_torch(), state_of_process()) == (torches, process)
    assert open_files() == files
    assert port not in [c.laddr.port for c in psutil.Process().net_connections("tcp")]
    for _ in range(3):
        second.step()
    assert value(second.exporter, "torch_train_steps_total", optimizer="SGD") == 6


def test_random_numbers_are_the_users(attached: Attached) -> None:
    """Neither a start, nor scrapes, nor `close()` draws from a random generator of the process'."""

    def states() -> list[object]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002 - the process' own

    model = build()
    before = states()
    with start_exporter(model, 0, addr="127.0.0.1", every=1) as exporter:
        values(exporter)
    values(attached.exporter)
    attached.exporter.close()
    assert states() == before


@pytest.mark.parametrize("rung", RUNGS)
def test_close_lets_go_of_the_exporter(rung: str) -> None:
    """After `close()` nothing of the exporter lives on, though the model, its optimizer and a graph of before do."""
    one = attach(rung, 0, moments=True, weights=True)
    out = one.model(batch())
    inside = one.exporter
    training = inside._training
    stages = (inside, training.capture, training.capture._loop, inside._host, inside._outputs, training.optimizers)
    references = [weakref.ref(stage) for stage in (*stages, training.optimizers._index.table.tracked[0])]
    inside.close()
    one.exporter = None  # type: ignore[assignment]
    del inside, training, stages
    assert [type(found) for found in alive(references)] == []
    out.square().mean().backward()
    one.optimizer.step()


def test_many_starts_and_closes_grow_nothing() -> None:
    """Fifty starts on one model leave as many objects, hooks, threads and files as five."""
    model = build()
    optimizer = sgd(model)

    def cycle() -> None:
        with start_exporter(model, 0, addr="127.0.0.1", every=1) as exporter:
            for backward in (by_root, by_parts):
                optimizer.zero_grad()
                backward(model, torch.ones(5, 6))
                optimizer.step()
            values(exporter)

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    for _ in range(5):
        cycle()
    before, files = objects(), open_files()
    for _ in range(50):
        cycle()
    assert objects() - before < 50  # less than one for each
    assert open_files() == files
    assert threads_of_ours() == []
    assert hooks_of(model) == []
    assert len(open_exporters()) == 0


def test_compiles_after_close_as_before() -> None:
    """A model that had an exporter compiles to one graph without a break, and can be scripted."""

    def compiled(model: torch.nn.Module) -> tuple[int, int, int]:
        torch._dynamo.reset()
        counters.clear()
        result = torch.compile(model, backend="eager")
        for _ in range(3):
            result(torch.ones(5, 6)).sum().backward()
        found = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), sum(counters["recompiles"].values())
        torch._dynamo.reset()
        return found

    expected = compiled(build())
    assert expected[1] == 0
    for rung in RUNGS:
        one = attach(rung)
        one.exporter.close()
        assert compiled(one.model) == expected
        torch.jit.script(one.model)


def test_a_saved_model_leaves_the_hooks_of_others_alone() -> None:
    """A model that was saved with the exporter attached, loaded elsewhere, calls the hooks of others as they were registered."""
    model = Perceptron()
    with start_exporter(model, port=None):
        data = pickle.dumps(model)
    script = """if True:
        import pickle, sys
        import torch
        sys.path.insert(0, sys.argv[1])
        model = pickle.loads(sys.stdin.buffer.read())
        seen = []
        model.register_forward_pre_hook(lambda module, args: seen.append(len(args)))
        model.register_forward_hook(lambda module, args, output: seen.append(len(args)))
        model(torch.randn(5, 6))
        assert seen == [1, 1]
    """
    subprocess.run([sys.executable, "-c", script, str(Path(__file__).parents[2])], input=data, check=True)
