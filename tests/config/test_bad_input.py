"""Bad input of `start_exporter`: an error that says what to do, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import prometheus_client
import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from tests.config.test_settings import WRONG, WRONG_TEXT
from tests.support.tools import lasting_threads
from torch_grad_exporter import start_exporter
from torch_grad_exporter.config.option import PREFIX

MODEL = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
OTHER = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)
FOREIGN = torch.optim.Adam(OTHER.parameters())

# The model, and what its error says.
WRONG_MODELS: list[tuple[object, type[Exception], str]] = [
    (None, TypeError, "model=NoneType.*torch.nn.Module"),
    ("linear", TypeError, "model=str.*torch.nn.Module"),
    (nn.Linear, TypeError, "model=type.*torch.nn.Module"),
    ([MODEL], TypeError, "model=list.*mapping"),
    (MODEL.parameters(), TypeError, "model=generator.*torch.nn.Module"),
    (OPTIMIZER, TypeError, "model=SGD.*torch.nn.Module"),
    ({}, ValueError, "model={}.*at least one"),
    ({"a": 3}, TypeError, r"model\['a'\]=int.*torch.nn.Module"),
    ({3: MODEL}, TypeError, r"model\[3\]=.*strings"),
    ({"a": MODEL, "": OTHER}, ValueError, r"model\[''\].*a name"),
    ({"a": MODEL, "b": MODEL}, ValueError, "model.*two names.*once"),
    (nn.ReLU(), ValueError, "model.*no parameters.*pass the module that is trained"),
    ({"a": nn.ReLU(), "b": nn.Sequential()}, ValueError, "model.*no parameters"),
]

# Other arguments that are checked against the model, and what their error says.
WRONG_FOR_THE_MODEL: list[tuple[Mapping[str, object], type[Exception], str]] = [
    ({"include": "encoder"}, ValueError, "include='encoder'.*none of the 2 layers.*'0'"),
    ({"exclude": ["0", "encoder"]}, ValueError, "exclude='encoder'.*none of the 2 layers.*'0'"),
    ({"exclude": "."}, ValueError, "exclude.*no layer.*loosen"),
    ({"include": "0", "exclude": "^0$"}, ValueError, "include and exclude.*no layer.*loosen"),
    ({"optimizers": FOREIGN}, ValueError, r"optimizers\['Adam'\]=Adam.*owns no parameter.*of this model"),
    ({"optimizers": [OPTIMIZER, FOREIGN]}, ValueError, r"optimizers\['Adam'\]=Adam.*of this model"),
    ({"optimizers": {"main": FOREIGN}}, ValueError, r"optimizers\['main'\]=Adam.*of this model"),
    ({"optimizers": "sgd"}, TypeError, "optimizers='sgd'.*expected an optimizer"),
    ({"optimizers": 3}, TypeError, "optimizers=3.*expected an optimizer"),
    ({"optimizers": [MODEL]}, TypeError, r"optimizers\['Sequential'\]=Sequential.*exporter.step\(\)"),
    ({"optimizers": {3: OPTIMIZER}}, TypeError, r"optimizers\[3\]"),
    ({"optimizers": {"main": None}}, TypeError, r"optimizers\['main'\]=NoneType"),
    ({"grad_scaler": 3}, TypeError, "grad_scaler=int.*GradScaler"),
    ({"grad_scaler": "on"}, TypeError, "grad_scaler=str.*GradScaler"),
    ({"registry": "default"}, TypeError, "registry='default'.*CollectorRegistry"),
    ({"registry": 3}, TypeError, "registry=3.*CollectorRegistry"),
    ({"colour": "red"}, TypeError, "colour"),
]


def sockets() -> int:
    """The sockets that this process has open."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found += str(descriptor.readlink()).startswith("socket:")
        except FileNotFoundError:  # the one that lists the folder
            continue
    return found


def registered() -> dict[str, object]:
    """Everything that an exporter registers, starts or opens."""
    modules = [*MODEL.modules(), *OTHER.modules()]
    parameters = [*MODEL.parameters(), *OTHER.parameters()]
    return {
        "module hooks": [len(hooks) for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)],
        "parameter hooks": [bool(hooks) for p in parameters for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)],
        "optimizer hooks": (
            len(torch_optimizer._global_optimizer_pre_hooks),
            len(torch_optimizer._global_optimizer_post_hooks),
            len(OPTIMIZER._optimizer_step_pre_hooks) + len(FOREIGN._optimizer_step_pre_hooks),
        ),
        "threads": [name for name in lasting_threads() if name.startswith("torch-grad-exporter")],
        "sockets": sockets(),
    }


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After each test the process is as it was before it."""
    before = registered()
    yield
    assert registered() == before


def test_the_fixture_here_sees_an_exporter() -> None:
    """What the other tests look for is really there while an exporter runs, and gone when it is closed."""
    before = registered()
    exporter = start_exporter(MODEL, 0, addr="127.0.0.1", optimizers=OPTIMIZER)
    during = registered()
    exporter.close()
    assert {name for name in before if during[name] != before[name]} == {"module hooks", "optimizer hooks", "threads", "sockets"}
    assert registered() == before


@pytest.mark.parametrize(("name", "value", "kind"), WRONG, ids=repr)
def test_a_wrong_argument_leaves_nothing_behind(name: str, value: object, kind: type[Exception]) -> None:
    """Every wrong setting raises from `start_exporter` itself, named, before anything is registered."""
    with pytest.raises(kind, match=f"^{name}="):
        start_exporter(MODEL, **({"port": 0} | {name: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "text"), WRONG_TEXT, ids=repr)
def test_a_wrong_variable_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """Every wrong environment variable raises from `start_exporter` itself, named, before anything is registered."""
    monkeypatch.setenv(PREFIX + name.upper(), text)
    with pytest.raises(ValueError, match=f"^environment variable {PREFIX}{name.upper()}="):
        start_exporter(MODEL)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_launchers_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A launcher's variable that is no number is named."""
    for other in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(other, "1")
    monkeypatch.setenv(name, "first")
    with pytest.raises(ValueError, match=f"environment variable {name}='first'.*whole number"):
        start_exporter(MODEL, 0)


@pytest.mark.parametrize("name", ["include", "exclude"])
def test_a_variable_that_matches_no_layer_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A pattern from the environment that fits no layer of the model is named as the variable that it is."""
    monkeypatch.setenv(PREFIX + name.upper(), "encoder")
    with pytest.raises(ValueError, match=f"{PREFIX}{name.upper()}='encoder'"):
        start_exporter(MODEL, 0)


@pytest.mark.parametrize(("model", "kind", "message"), WRONG_MODELS, ids=lambda value: str(value)[:40])
def test_wrong_models(model: object, kind: type[Exception], message: str) -> None:
    """What is no module, names none, or has nothing to train raises and says what to pass."""
    with pytest.raises(kind, match=message):
        start_exporter(model, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("arguments", "kind", "message"), WRONG_FOR_THE_MODEL, ids=lambda value: str(value)[:40])
def test_arguments_that_do_not_fit_the_model(arguments: Mapping[str, object], kind: type[Exception], message: str) -> None:
    """Patterns without a layer, foreign' optimizers and wrong helpers raise and say what to pass."""
    with pytest.raises(kind, match=message):
        start_exporter(MODEL, 0, **arguments)  # type: ignore[arg-type]


def test_a_registry_that_has_these_metrics_already() -> None:
    """A registry in which another exporter stands raises, and the half-built exporter is taken apart again."""
    registry = prometheus_client.CollectorRegistry()
    with start_exporter(MODEL, None, registry=registry) as first:
        before = registered()
        with pytest.raises(ValueError, match=r"registry=|Duplicated"):
            start_exporter(OTHER, 0, registry=registry)
        assert registered() == before
        assert first.replaced_by([MODEL])


@pytest.mark.parametrize("arguments", [{"every": 0}, {"include": "encoder"}, {"optimizers": FOREIGN}], ids=str)
def test_a_failed_start_does_not_end_the_exporter_that_is_there(arguments: Mapping[str, object]) -> None:
    """A second start on the same model that fails leaves the first exporter running."""
    with start_exporter(MODEL, None) as first:
        with pytest.raises(ValueError, match=next(iter(arguments))):
            start_exporter(MODEL, None, **arguments)  # type: ignore[arg-type]
        assert len(MODEL._forward_hooks) == 1
        assert "closed" not in repr(first)


def test_a_good_start_after_a_bad_one() -> None:
    """After an error was corrected, the exporter starts and counts as ever."""
    with pytest.raises(ValueError, match="every="):
        start_exporter(MODEL, None, every=0)
    with start_exporter(MODEL, None, every=1, optimizers={"main": OPTIMIZER}) as exporter:
        MODEL(torch.ones(2, 3)).sum().backward()
        OPTIMIZER.step()
        OPTIMIZER.zero_grad()
        steps = next(family for family in exporter.collect() if family.spec.name == "torch_train_steps_total")
    assert steps.values.tolist() == [1]


def test_model_names_whose_layers_would_collide() -> None:
    """Two names of which one begins with the other and a dot could give two layers one label, so they are refused."""
    with pytest.raises(ValueError, match=r"model\['g'\].*begins with it"):
        start_exporter({"g": torch.nn.Linear(2, 2), "g.x": torch.nn.Linear(2, 2)}, None)


def test_a_model_name_may_begin_with_another_one() -> None:
    """Without a dot between them the layers of both can be told apart."""
    with start_exporter({"gen": torch.nn.Linear(2, 2), "generator": torch.nn.Linear(2, 2)}, None) as exporter:
        shown = next(family for family in exporter.collect() if family.spec.name == "torch_grad_captures_total")
    assert {layer.partition(".")[0] for (layer,) in shown.labels.rows} == {"gen", "generator"}


def test_a_rank_of_0_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument wins over what the launcher says, also where it is 0."""
    for name, text in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, text)
    for given in (0, 2):
        with start_exporter(MODEL, None, run="r1", rank=given) as exporter:
            assert exporter.rank == given
    with start_exporter(MODEL, None, run="r1") as exporter:
        assert exporter.rank == 3


def test_a_model_that_is_all_frozen_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing to watch yet is said in the log, and is no error: the layers may be unfrozen later."""
    with start_exporter(torch.nn.Linear(2, 2).requires_grad_(False), None):
        assert "no parameter of the model requires a gradient" in caplog.text
