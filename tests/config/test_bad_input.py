"""Bad input of `start_exporter`: an error that says what to do, and nothing left behind."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import torch
from torch import nn

from tests.config.test_settings import WRONG, WRONG_TEXT
from tests.support.scrape import value, values
from tests.support.tools import eventually, lasting_threads
from tests.support.torch_hooks import global_step_hooks, module_hooks, optimizer_hooks, tensor_hooks
from torch_grad_exporter import record, start_exporter
from torch_grad_exporter.actions import AGC, Freeze, MaxNorm, ScaleLearningRate, Stop, Webhook, ZClip
from torch_grad_exporter.config.settings import PREFIX

MODEL = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
OTHER = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)
FOREIGN = torch.optim.Adam(OTHER.parameters())

# The model, and what its error says.
WRONG_MODELS: list[tuple[object, type[Exception], str]] = [
    (None, TypeError, "model=NoneType.*torch.nn.Module"),
    (nn.Linear, TypeError, r"model=class Linear.*torch.nn.Module.*call the class: Linear\("),
    (OPTIMIZER, TypeError, "model=SGD.*torch.nn.Module.*pass the model whose parameters it has"),
    (9100, TypeError, "model=int.*torch.nn.Module.*the model comes first"),
    ([MODEL], TypeError, "model=list.*mapping"),
    ({}, ValueError, "model={}.*at least one"),
    ({"a": 3}, TypeError, r"model\['a'\]=int.*torch.nn.Module"),
    ({3: MODEL}, TypeError, r"model\[3\]=.*strings"),
    ({"a": MODEL, "": OTHER}, ValueError, r"model\[''\].*a name"),
    ({"a": MODEL, "b": MODEL}, ValueError, "model.*two names.*once"),
    (nn.ReLU(), ValueError, "model.*no parameters.*pass the module that is trained"),
]

# Other arguments that are checked against the model, and what their error says.
WRONG_FOR_THE_MODEL: list[tuple[Mapping[str, object], type[Exception], str]] = [
    ({"include": "encoder"}, ValueError, "include='encoder'.*none of the 2 layers.*'0'"),
    ({"exclude": ["0", "encoder"]}, ValueError, "exclude='encoder'.*none of the 2 layers.*'0'"),
    ({"exclude": "."}, ValueError, "exclude.*no layer.*loosen"),
    ({"include": "0", "exclude": "^0$"}, ValueError, "include and exclude.*no layer.*loosen"),
    ({"optimizers": [OPTIMIZER, FOREIGN]}, ValueError, r"optimizers\['Adam'\]=Adam.*of this model"),
    ({"optimizers": {"main": FOREIGN}}, ValueError, r"optimizers\['main'\]=Adam.*of this model"),
    ({"optimizers": "sgd"}, TypeError, "optimizers='sgd'.*expected an optimizer"),
    ({"optimizers": [MODEL]}, TypeError, r"optimizers\['Sequential'\]=Sequential.*exporter.step\(\)"),
    ({"optimizers": {3: OPTIMIZER}}, TypeError, r"optimizers\[3\]"),
    ({"optimizers": {"main": None}}, TypeError, r"optimizers\['main'\]=NoneType"),
    ({"grad_scaler": 3}, TypeError, "grad_scaler=int.*GradScaler"),
    ({"registry": "default"}, TypeError, "registry='default'.*CollectorRegistry"),
    ({"colour": "red"}, TypeError, "colour"),
    ({"evry": 3}, TypeError, "^evry=: .*did you mean every"),
]


def sockets() -> int:
    """Return the number of sockets that this process has open."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found += str(descriptor.readlink()).startswith("socket:")
        except FileNotFoundError:  # the one that lists the folder
            continue
    return found


def registered() -> dict[str, object]:
    """Return everything that an exporter registers, starts or opens."""
    return {
        "module hooks": [len(module_hooks(module)) for model in (MODEL, OTHER) for module in model.modules()],
        "parameter hooks": [len(tensor_hooks(parameter)) for model in (MODEL, OTHER) for parameter in model.parameters()],
        "optimizer hooks": (len(global_step_hooks()), len(optimizer_hooks(OPTIMIZER)), len(optimizer_hooks(FOREIGN))),
        "threads": [name for name in lasting_threads() if name.startswith("torch-grad-exporter")],
        "sockets": sockets(),
    }


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After each test the process is as it was before it."""
    before = registered()
    yield
    # On a busy machine the end of an exporter does not wait for its last record.
    assert eventually(lambda: registered() == before), registered()


def test_the_fixture_sees_an_exporter() -> None:
    """What these tests look for is there while an exporter runs, and gone when it is closed."""
    before = registered()
    exporter = start_exporter(MODEL, 0, addr="127.0.0.1", optimizers=OPTIMIZER)
    during = registered()
    exporter.close()
    assert {name for name in before if during[name] != before[name]} == {"module hooks", "optimizer hooks", "threads", "sockets"}
    assert eventually(lambda: registered() == before), registered()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value", "kind"), WRONG, ids=repr)
def test_a_wrong_argument_leaves_nothing_behind(name: str, value: object, kind: type[Exception]) -> None:
    """A wrong argument raises, with its name, its value and what to pass instead, before anything is registered."""
    with pytest.raises((TypeError, ValueError), match=f"^{name}=.*(expected|use letters|choose another)") as caught:
        start_exporter(MODEL, **({"port": 0} | {name: value}))  # type: ignore[arg-type]
    assert caught.type is kind
    named = [value, *value] if isinstance(value, list) else [value]
    assert any(repr(one) in str(caught.value) for one in named)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), WRONG_TEXT, ids=repr)
def test_a_wrong_variable_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """A wrong variable raises, with its name, its text and what to set instead, before anything is registered."""
    monkeypatch.setenv(PREFIX + name.upper(), text)
    expected = f"^environment variable {PREFIX}{name.upper()}=.*(expected|use letters|choose another)"
    with pytest.raises(ValueError, match=expected) as caught:
        start_exporter(MODEL)
    assert text in str(caught.value) or all(part in str(caught.value) for part in text.split("="))


@pytest.mark.parametrize("name", ["RANK", "LOCAL_WORLD_SIZE"])
def test_a_launchers_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A launcher's variable that is not a number is named."""
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
    """An argument that is not a module, or has nothing to train, raises and says what to pass."""
    with pytest.raises(kind, match=message):
        start_exporter(model, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("arguments", "kind", "message"), WRONG_FOR_THE_MODEL, ids=lambda value: str(value)[:40])
def test_arguments_that_do_not_fit_the_model(arguments: Mapping[str, object], kind: type[Exception], message: str) -> None:
    """Patterns without a layer, foreign optimizers and wrong helpers raise and say what to pass."""
    with pytest.raises(kind, match=message):
        start_exporter(MODEL, 0, **arguments)  # type: ignore[arg-type]


def test_errors_do_not_print_a_model() -> None:
    """A model in the place of another argument raises with its class, not with its layers."""
    large = nn.Sequential(*[nn.Linear(1, 1) for _ in range(20)])
    names = set(inspect.signature(start_exporter).parameters) - {"model", "alerts"}
    for name in names:
        with pytest.raises(TypeError, match=f"^{name}=.*Sequential.*expected") as caught:
            start_exporter(MODEL, **{"port": None, name: large})  # type: ignore[arg-type]
        assert len(str(caught.value)) < 250
    for arguments in ((9100, large), (large, OPTIMIZER), ([large], 9100), ({"a": [large]},)):
        with pytest.raises(TypeError, match="expected") as caught:
            start_exporter(*arguments)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 250
    wrong: Any = large
    calls = (
        lambda: MaxNorm(wrong), lambda: AGC(wrong), lambda: ZClip(wrong), lambda: Freeze(wrong), lambda: Freeze(layers=[wrong]),
        lambda: Freeze(revive=wrong), lambda: ScaleLearningRate(wrong), lambda: Webhook("http://localhost", timeout=wrong),
        lambda: Webhook(url_file=wrong), lambda: record(MODEL, include=wrong), lambda: record(MODEL, limit=wrong),
        lambda: exporter.on("GradientExploding", Stop(), for_=wrong), lambda: exporter.on("LayerDead", Stop(), name=wrong),
        lambda: exporter.watch(wrong, torch.ones(1)), lambda: exporter.watch("a", torch.ones(1), wrong),
        lambda: exporter.resume(wrong),
    )  # fmt: skip
    with start_exporter(MODEL, None) as exporter:
        for call in calls:
            with pytest.raises(TypeError, match=r"Sequential|list.*expected") as caught:
                call()
            assert len(str(caught.value)) < 250


def test_misspelt_variables_are_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A variable that is nearly one of the exporter's is named with that one; those that Kubernetes sets are not."""
    for name in ("EVRY", "OVERHEAD", "WEBHOOK_URL", "SERVICE_PORT", "SERVICE_HOST", "PORT_9100_TCP", "PORT_9100_TCP_PROTO"):
        monkeypatch.setenv(PREFIX + name, "1")
    start_exporter(MODEL, None).close()
    lines = sorted(record.getMessage().partition("variable ")[2] for record in caplog.records)
    meant = {"EVRY": "EVERY", "OVERHEAD": "OVERHEAD_BUDGET"}
    assert lines == [f"{PREFIX}{name} is unknown and ignored; did you mean {PREFIX}{meant[name]}?" for name in meant]


def test_a_registry_that_has_these_metrics_already() -> None:
    """A registry of another exporter raises, and the half-built exporter is taken apart again."""
    registry = prometheus_client.CollectorRegistry()
    with start_exporter(MODEL, None, registry=registry) as first:
        before = registered()
        with pytest.raises(ValueError, match=r"registry=|Duplicated"):
            start_exporter(OTHER, 0, registry=registry)
        assert registered() == before
        assert first.replaced_by([MODEL])


@pytest.mark.parametrize("arguments", [{"every": 0}, {"include": "encoder"}, {"optimizers": FOREIGN}], ids=str)
def test_a_failed_start_leaves_the_first_exporter(arguments: Mapping[str, object]) -> None:
    """A second start on the same model that fails leaves the first exporter running."""
    with start_exporter(MODEL, None) as first:
        with pytest.raises(ValueError, match=next(iter(arguments))):
            start_exporter(MODEL, None, **arguments)  # type: ignore[arg-type]
        assert module_hooks(MODEL)
        assert "closed" not in repr(first)


def test_a_good_start_after_a_bad_one() -> None:
    """After an error was corrected, the exporter starts and counts as ever."""
    with pytest.raises(ValueError, match="every="):
        start_exporter(MODEL, None, every=0)
    with start_exporter(MODEL, None, every=1, optimizers={"main": OPTIMIZER}) as exporter:
        MODEL(torch.ones(2, 3)).sum().backward()
        OPTIMIZER.step()
        OPTIMIZER.zero_grad()
        assert value(exporter, "torch_train_steps_total", optimizer="main") == 1


def test_model_names_whose_layers_would_collide() -> None:
    """A name that begins with another one and a dot is refused, as two layers might get one label."""
    with pytest.raises(ValueError, match=r"model\['g'\].*begins with it"):
        start_exporter({"g": torch.nn.Linear(2, 2), "g.x": torch.nn.Linear(2, 2)}, None)


def test_a_model_name_may_begin_with_another_one() -> None:
    """Without a dot between them the layers of both can be told apart."""
    with start_exporter({"gen": torch.nn.Linear(2, 2), "generator": torch.nn.Linear(2, 2)}, None) as exporter:
        layers = {dict(labels)["layer"] for name, labels in values(exporter) if name == "torch_grad_captures_total"}
    assert {layer.partition(".")[0] for layer in layers} == {"gen", "generator"}


def test_a_rank_of_0_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument wins over the launcher's rank, also where it is 0."""
    for name, text in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, text)
    for given in (0, 2):
        with start_exporter(MODEL, None, run="r1", rank=given) as exporter:
            assert exporter.rank == given
    with start_exporter(MODEL, None, run="r1") as exporter:
        assert exporter.rank == 3


def test_a_model_that_is_all_frozen_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A model without a trainable parameter is a warning and not an error."""
    with start_exporter(torch.nn.Linear(2, 2).requires_grad_(False), None):
        assert "no parameter of the model requires a gradient" in caplog.text
