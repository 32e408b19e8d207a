"""The model stays ordinary: attached it is copied, saved, exported and sent like without an exporter."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.capture.attached_model import WAYS, Attached, attach, build, by_root, same_state
from tests.support.models import batch, sgd
from tests.support.programs import Starter
from tests.support.scrape import errors, key, value
from tests.support.tools import threads_of_ours
from tests.support.torch_hooks import global_step_hooks
from torch_grad_exporter import start_exporter

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(params=["root"])
def attached(request: pytest.FixtureRequest) -> Iterator[Attached]:
    """Return an attached model, trained in one of the ways."""
    model = attach(request.param)
    with model.exporter:
        yield model


each_way = pytest.mark.parametrize("attached", WAYS, indirect=True)


# Copies


def pickled(model: torch.nn.Module) -> torch.nn.Module:
    """Pickle and load."""
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - our own


def saved(model: torch.nn.Module) -> torch.nn.Module:
    """Save and load."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.slow
def test_a_model_that_has_its_exporter_is_copied(attached: Attached) -> None:
    """A copy of a model with the exporter as an attribute has the same one, a loaded one has none."""
    attached.model.exporter = attached.exporter
    for copied in (copy.copy, copy.deepcopy, pickled, saved):
        twin = copied(attached.model)
        assert twin.exporter is (attached.exporter if copied in (copy.copy, copy.deepcopy) else None)
        assert same_state(twin, attached.model)
    attached.goes_on()


@pytest.mark.slow
@each_way
def test_a_copy_is_not_watched(attached: Attached) -> None:
    """A copy of any kind is equal, trains without reaching the exporter, and can have an exporter of its own."""
    for copied in (copy.deepcopy, saved):
        attached.model(batch())  # which no backward follows
        twin = copied(attached.model)
        assert same_state(twin, attached.model)
        assert repr(twin) == repr(attached.model)
        before = attached.counted()
        with start_exporter(twin, None, every=1) as second:
            of_twin = Attached(attached.way, twin, sgd(twin), second)
            for _ in range(7):
                of_twin.step()
            of_twin.goes_on()
            assert not same_state(twin, attached.model)
            assert attached.counted() == before
            assert errors(attached.exporter) == {}
        attached.goes_on()


def test_state_dicts(attached: Attached) -> None:
    """State dicts of model and optimizer have the same keys as without an exporter, and load with `weights_only`."""
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


WITHOUT_THE_PACKAGE = """
import pathlib, pickle, sys
import torch

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch_grad_exporter":
            raise ImportError(name)

for name in [name for name in sys.modules if name.partition(".")[0] == "torch_grad_exporter"]:
    del sys.modules[name]
sys.meta_path.insert(0, Refuse())
where = pathlib.Path(sys.argv[1])
x = torch.load(where / "inputs", weights_only=True)
for path in sorted([*where.glob("*.pickle"), *where.glob("*.saved")]):
    model = pickle.loads(path.read_bytes()) if path.suffix == ".pickle" else torch.load(path, weights_only=False)
    assert torch.equal(model.eval()(x), torch.load(path.with_suffix(".expected"), weights_only=True)), path
    model.train()(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    print(path.name)
print([batch.tolist() for (batch,) in pickle.loads((where / "loader").read_bytes())])
"""


@pytest.mark.process
def test_loads_where_this_package_is_not(tmp_path: Path, starter: Starter) -> None:
    """A model that was pickled or saved runs and trains in a process that cannot import the package; a watched loader yields."""
    x, loader = batch(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(3.0)), batch_size=2)
    for way in WAYS:
        one = attach(way)
        with one.exporter:
            for moment in ("step", "forward"):
                (tmp_path / f"{way}-{moment}.pickle").write_bytes(pickle.dumps(one.model))
                torch.save(one.model, tmp_path / f"{way}-{moment}.saved")
                torch.save(copy.deepcopy(one.model).eval()(x).detach(), tmp_path / f"{way}-{moment}.expected")
                one.model(x)
            (tmp_path / "loader").write_bytes(pickle.dumps(one.exporter.watch_loader(loader)))
    torch.save(x, tmp_path / "inputs")
    program = starter.start(WITHOUT_THE_PACKAGE, str(tmp_path))
    assert program.wait() == 0, program.err.read_text()
    *paths, batches = program.out.read_text().splitlines()
    assert len(paths) == 2 * 2 * len(WAYS)
    assert batches == "[[0.0, 1.0], [2.0]]"


# Other forms of the model


def exported(model: torch.nn.Module) -> str:
    """Return the graph of `torch.export`."""
    return torch.export.export(model, (torch.ones(5, 6),), strict=False).graph_module.code


def exported_strictly(model: torch.nn.Module) -> str:
    """Return the graph of `torch.export` through dynamo."""
    return torch.export.export(model, (torch.ones(5, 6),), strict=True).graph_module.code


def symbolic(model: torch.nn.Module) -> str:
    """Return the graph of `torch.fx`."""
    return torch.fx.symbolic_trace(model).code


@pytest.mark.slow
@pytest.mark.parametrize("form", [exported, pytest.param(exported_strictly, marks=pytest.mark.full), symbolic])
def test_other_forms_have_nothing_of_us(attached: Attached, form: Callable[[torch.nn.Module], str]) -> None:
    """Each way to turn a model into a graph gives the same graph as without an exporter, and training goes on."""
    before = attached.counted()
    assert form(attached.model) == form(copy.deepcopy(build()))
    assert attached.counted() == before
    attached.goes_on()


def per_sample(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the gradients of each row, by `vmap` over `grad`."""
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


@pytest.mark.slow
def test_function_transforms(attached: Attached) -> None:
    """Transforms of functions over the model give the same as without an exporter, and are not training."""
    x = batch()
    twin = copy.deepcopy(attached.model).eval()
    before = attached.counted()[key("torch_train_backward_passes_total")]
    attached.model.eval()
    for name, transform in TRANSFORMS.items():
        assert torch.equal(transform(attached.model, x), transform(twin, x)), name
        assert attached.counted()[key("torch_train_backward_passes_total")] == before, name
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
    """Put other memory of another type into the same parameters."""
    model.to(torch.float64)
    model.to(torch.float32)


def assigned(model: torch.nn.Module) -> None:
    """Replace the parameters."""
    model.load_state_dict({k: v.detach().clone() for k, v in model.state_dict().items()}, assign=True)


def refrozen(model: torch.nn.Module) -> None:
    """Freeze and thaw."""
    model.requires_grad_(False).requires_grad_(True)


@pytest.mark.slow
@pytest.mark.parametrize("attached", ["root", "parts"], indirect=True)
def test_changed_in_place(attached: Attached) -> None:
    """Training is seen as before after all parameters were changed in place, after a step or after a forward."""
    for change in (converted, assigned, refrozen):
        for after_forward in (False, True):
            if after_forward:
                attached.model(batch())
            change(attached.model)
            attached.optimizer = sgd(attached.model)
            if attached.way == "parts":
                attached.step()  # the hooks of this round may be on nodes that are no longer there: it may be lost
            attached.goes_on()


def test_parameters_are_replaced_between_samples() -> None:
    """Where few rounds are sampled, parameters and their optimizer may be replaced: each step counts, and samples go on."""
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


# Other processes


def facts() -> list[float]:
    """Return how many threads, listening sockets and hooks of optimizers this process has from an exporter."""
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return [float(len(threads_of_ours())), float(len(listening)), float(len(global_step_hooks()))]


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows made in the worker with the model that is being trained, and what of an exporter there is in the worker."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.model(torch.full((2, 6), float(index)))
        return out.detach().new_ones(6) * index, torch.tensor(facts())


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_loader_workers(method: str) -> None:
    """Workers of each kind that carry the model end, hold no socket and start nothing; the parent's exporter goes on."""
    one = attach("root", 0)
    with one.exporter:
        loader = torch.utils.data.DataLoader(Rows(one.model), batch_size=4, num_workers=1, multiprocessing_context=method)
        before = one.counted()[key("torch_train_samples_total")]
        found = []
        for inputs, in_worker in one.exporter.watch_loader(loader):
            one.step(inputs + torch.randn(4, 6))
            found.append(in_worker)
        threads, listening, step_hooks = torch.cat(found).amax(dim=0).tolist()
        assert (threads, listening) == (0, 0)
        # A forked child has the parent's hooks, which do nothing there.
        assert step_hooks == (len(global_step_hooks()) if method == "fork" else 0)
        assert multiprocessing.active_children() == []
        assert one.counted()[key("torch_train_samples_total")] == before + 16
        one.goes_on()
        assert threads_of_ours()
