"""Settings: every argument and every environment variable, right and wrong."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from tests.support.catalogue import CATALOGUE
from torch_grad_exporter.actions.clip.options import OnFailure
from torch_grad_exporter.collectors.process import PYTHON_INFO
from torch_grad_exporter.collectors.training import TRAIN_INFO
from torch_grad_exporter.config import option
from torch_grad_exporter.config.option import UNSET
from torch_grad_exporter.config.settings import PREFIX, Settings
from torch_grad_exporter.config.values import RESERVED_LABELS
from torch_grad_exporter.model.replicas import Ranks
from torch_grad_exporter.statistics.kernels.choice import Implementation

DEFAULT = frozenset(
    {
        "gradients", "optimizer_state", "activations", "attention", "layer_times", "logged", "reinforcement", "watched", "routers",
        "goodput",
        "nan_origin", "replicas", "training", "cuda_memory", "gpu", "process", "host", "container", "extra", "exporter",
        "rollbacks",
    }
)  # fmt: skip

RIGHT: list[tuple[str, object, object]] = [
    *[("flops_per_step", value, value) for value in (6e15, 1, None)],
    *[("peak_flops", value, value) for value in (989e12, 1, None)],
    ("port", 0, 0),
    ("port", None, None),
    ("addr", "127.0.0.1", "127.0.0.1"),
    ("addr", "", ""),
    ("every", "auto", "auto"),
    ("every", 4096, 4096),
    ("overhead_budget", 1e-6, 1e-6),
    ("include", "a", ("a",)),
    ("include", ["a", "b$"], ("a", "b$")),
    ("exclude", re.compile("a"), ("a",)),
    ("max_layers", 1, 1),
    ("dead_window", 1, 1),
    *[
        (name, value, value)
        for name in (
            "moments",
            "weights",
            "optimizer_state",
            "attention",
            "layer_times",
            "local_norm",
            "routers",
            "nan_origin",
            "replicas",
        )
        for value in (True, False)
    ],
    *[("activations", value, value) for value in (True, False)],
    *[("activations", value, "a$") for value in ("a$", re.compile("a$"))],
    ("statistics", "torch", Implementation.TORCH),
    ("statistics", "Auto", Implementation.AUTO),
    ("statistics", "triton", Implementation.TRITON),
    ("nan_origin", "Always", "always"),
    ("collectors", {}, DEFAULT),
    ("collectors", {"host": False, "gpu": True}, DEFAULT - {"host"}),
    ("web_config_file", "web.yml", "web.yml"),
    ("web_config_file", pathlib.Path("a") / "web.yml", "a/web.yml"),
    ("run", "größe 7", "größe 7"),
    ("rank", 0, 0),
    *[("ranks", value, Ranks(value.lower())) for value in ("auto", "all", "FIRST")],
    *[("on_failure", value, OnFailure(value.lower())) for value in ("continue", "RAISE")],
    *[
        (name, value, str(value))
        for name in ("sd_dir", "textfile_dir", "state_dir", "black_box")
        for value in ("/run/sd", pathlib.Path("sd"))
    ],
    *[("advertise", value, value) for value in ("node-7.cluster", "10.0.0.7", "2001:db8::7", "[fe80::1%eth0]")],
    *[("linger", value, value) for value in (0, 0.5, 3600, "auto")],
    *[("labels_on", value, value.lower()) for value in ("series", "Target")],
    ("labels", {"team": 'a "b"', "_x9": ""}, {"team": 'a "b"', "_x9": ""}),
]

WRONG: list[tuple[str, object, type[Exception]]] = [
    *[(name, value, TypeError) for name in ("flops_per_step", "peak_flops") for value in (True, "1")],
    *[(name, value, ValueError) for name in ("flops_per_step", "peak_flops") for value in (0, -1.0, math.nan, math.inf)],
    *[("port", value, TypeError) for value in ("9100", 9100.0, True)],
    *[("port", value, ValueError) for value in (-1, 65536)],
    *[("addr", value, TypeError) for value in (None, b"127.0.0.1")],
    *[("addr", value, ValueError) for value in ("no such address", "a" * 300)],
    *[("every", value, TypeError) for value in (None, 1.0, True, [1])],
    *[("every", value, ValueError) for value in ("automatic", "8", 0, 4097)],
    *[("overhead_budget", value, TypeError) for value in (None, "0.01", True)],
    *[("overhead_budget", value, ValueError) for value in (0, 1, math.nan)],
    *[(name, value, TypeError) for name in ("include", "exclude") for value in (None, [3], b"a", [re.compile(b"a")])],
    *[(name, value, ValueError) for name in ("include", "exclude") for value in ("(", ["a", "[z"], "*")],
    *[(name, value, TypeError) for name in ("max_layers", "dead_window") for value in (None, "10", 10.0, True)],
    *[("max_layers", value, ValueError) for value in (0, 100_001)],
    *[("dead_window", value, ValueError) for value in (0, 1_000_001)],
    *[
        (name, value, TypeError)
        for name in (
            "moments",
            "weights",
            "optimizer_state",
            "attention",
            "layer_times",
            "local_norm",
            "routers",
            "nan_origin",
            "replicas",
        )
        for value in (None, 1, 0)
    ],
    *[
        (name, "yes", TypeError)
        for name in ("moments", "weights", "optimizer_state", "attention", "layer_times", "local_norm", "routers", "replicas")
    ],
    ("nan_origin", "yes", ValueError),
    *[("statistics", value, TypeError) for value in (None, True)],
    *[("statistics", value, ValueError) for value in ("", "kernels")],
    *[("activations", value, TypeError) for value in (None, 1, ["a"], re.compile(b"a"))],
    *[("activations", value, ValueError) for value in ("", "(")],
    *[("collectors", value, TypeError) for value in (None, "host", ["host"], {"host": 0}, {"host": None})],
    *[("collectors", value, ValueError) for value in ({"hosts": False}, {3: True})],
    *[("web_config_file", value, TypeError) for value in (None, 3, b"web.yml")],
    ("web_config_file", "", ValueError),
    *[("run", value, TypeError) for value in (None, 7, b"r")],
    *[("run", value, ValueError) for value in ("", "x" * 201)],
    *[("rank", value, TypeError) for value in ("0", 1.0, True)],
    *[("rank", value, ValueError) for value in (-1, 10_000_001)],
    *[("ranks", value, TypeError) for value in (None, 0, True)],
    *[("on_failure", value, TypeError) for value in (None, False)],
    *[("on_failure", value, ValueError) for value in ("", "stop")],
    *[("ranks", value, ValueError) for value in ("", "none", "0")],
    *[("labels_on", value, TypeError) for value in (None, True)],
    *[("labels_on", value, ValueError) for value in ("", "info")],
    *[(name, value, TypeError) for name in ("sd_dir", "textfile_dir", "state_dir", "black_box") for value in (None, 3, b"sd")],
    *[(name, "", ValueError) for name in ("sd_dir", "textfile_dir", "state_dir", "black_box")],
    *[("advertise", value, TypeError) for value in (None, 7)],
    *[("advertise", value, ValueError) for value in ("", "host:http", "10.0.0.7:9100", "a b", "http://host", "x" * 254)],
    *[("linger", value, TypeError) for value in (None, True)],
    *[("linger", value, ValueError) for value in ("5", -1, 3601, math.nan, math.inf)],
    *[("labels", value, TypeError) for value in (None, "team=a", [("team", "a")], {"team": 3}, {3: "team"})],
    *[("labels", {name: "x"}, ValueError) for name in ("", "1a", "a-b", "größe", "__name__", "run", "rank", "layer", "le", "job")],
]

WRONG_TEXT: list[tuple[str, str]] = [
    *[(name, text) for name in ("flops_per_step", "peak_flops") for text in ("much", "0", "nan")],
    *[("port", text) for text in ("http", "9100.5", "-1", "70000")],
    ("addr", "no such address"),
    *[("every", text) for text in ("always", "0", "1.5", "5000")],
    *[("overhead_budget", text) for text in ("1%", "0", "1", "nan", "-0.1")],
    *[(name, text) for name in ("include", "exclude") for text in ("(", "a[")],
    *[(name, text) for name in ("max_layers", "dead_window") for text in ("many", "0", "1e3")],
    *[
        (name, text)
        for name in (
            "moments",
            "weights",
            "optimizer_state",
            "attention",
            "layer_times",
            "local_norm",
            "routers",
            "nan_origin",
            "replicas",
        )
        for text in ("maybe", "2")
    ],
    ("activations", "("),
    ("statistics", "kernels"),
    *[("collectors", text) for text in ("host", "host=maybe", "hosts=off")],
    ("run", "x" * 201),
    *[("rank", text) for text in ("first", "-1", "0.0")],
    *[("ranks", text) for text in ("some", "1")],
    ("on_failure", "ignore"),
    ("labels_on", "resource"),
    ("advertise", "a b"),
    *[("linger", text) for text in ("long", "-1", "nan")],
    *[("labels", text) for text in ("team", "team=a,b", "run=x", "1a=b")],
]

RIGHT_TEXT: list[tuple[str, str, object]] = [
    *[(name, text, value) for name in ("flops_per_step", "peak_flops") for text, value in (("6e15", 6e15), ("off", None))],
    ("port", "0", 0),
    ("port", " 9200 ", 9200),
    ("port", "OFF", None),
    ("addr", "::1", "::1"),
    ("every", "auto", "auto"),
    ("every", "16", 16),
    ("overhead_budget", "0.05", 0.05),
    ("include", "^encoder", ("^encoder",)),
    ("exclude", "a,b", ("a,b",)),
    ("max_layers", "12", 12),
    ("dead_window", "50", 50),
    ("moments", "1", True),
    ("statistics", "torch", Implementation.TORCH),
    ("weights", "true", True),
    ("optimizer_state", "true", True),
    ("local_norm", "on", True),
    ("routers", "on", True),
    ("activations", "on", True),
    ("attention", "on", True),
    ("layer_times", "on", True),
    ("replicas", "on", True),
    ("activations", r"^encoder\.", r"^encoder\."),
    ("nan_origin", "on", True),
    ("nan_origin", "ALWAYS", "always"),
    ("collectors", "host=off, gpu = on,cuda_memory=0", DEFAULT - {"host", "cuda_memory"}),
    ("web_config_file", "web.yml", "web.yml"),
    ("run", "run 7", "run 7"),
    *[("ranks", text, Ranks(text.lower())) for text in ("all", "First")],
    ("on_failure", "Raise", OnFailure.RAISE),
    ("sd_dir", "sd", "sd"),
    ("textfile_dir", "prom", "prom"),
    ("black_box", "boxes", "boxes"),
    ("state_dir", "state", "state"),
    ("advertise", "10.1.2.3", "10.1.2.3"),
    *[("linger", text, value) for text, value in (("2.5", 2.5), ("Auto", "auto"))],
    ("rank", "3", 3),
    *[("labels_on", text, text.lower()) for text in ("series", "Target")],
    ("labels", "team=vision, cost = 7 , x=a=b", {"team": "vision", "cost": "7", "x": "a=b"}),
]


def resolve(arguments: Mapping[str, object], environment: Mapping[str, str]) -> Settings:
    """Return the settings that were chosen."""
    return option.resolve(arguments, environment)


def value_of(settings: Settings, name: str) -> Any:  # noqa: ANN401 - any setting's
    """Return one setting, patterns by their text."""
    found = getattr(settings, name)
    if isinstance(found, re.Pattern):
        return found.pattern
    if name == "collectors":
        return settings.enabled_collectors
    return tuple(pattern.pattern for pattern in found) if name in ("include", "exclude") else found


def test_the_defaults_are_those_documented() -> None:
    """Without arguments and environment every setting has its documented default."""
    found = {f.name: value_of(resolve({}, {}), f.name) for f in fields(Settings)}
    assert found == {
        "port": 9100, "addr": "", "every": "auto", "overhead_budget": 0.01, "include": (), "exclude": (), "max_layers": 300,
        "dead_window": 100, "moments": False, "weights": False, "optimizer_state": False, "activations": False,
        "attention": False, "layer_times": False, "local_norm": False, "routers": False, "nan_origin": False, "replicas": False,
        "black_box": "",
        "flops_per_step": None, "peak_flops": None,
        "statistics": Implementation.AUTO, "collectors": DEFAULT,
        "web_config_file": "",
        "run": "", "rank": None, "ranks": Ranks.AUTO, "labels": {}, "labels_on": "series", "sd_dir": "",
        "advertise": "", "linger": "auto", "textfile_dir": "", "state_dir": "", "on_failure": OnFailure.CONTINUE,
    }  # fmt: skip


def test_the_tables_here_leave_no_setting_out() -> None:
    """The tables of this file have a right and a wrong case for each setting and each variable."""
    names = {f.name for f in fields(Settings)}
    assert all({name for name, *_ in table} == names for table in (RIGHT, WRONG, RIGHT_TEXT))
    # Any text may be a path; what is wrong with such a file, test_web_config.py and test_black_box.py tell.
    assert {name for name, *_ in WRONG_TEXT} == names - {"web_config_file", "sd_dir", "textfile_dir", "state_dir", "black_box"}


def spelled(value: object) -> str:
    """Spell a value the same in each process, in which sets have orders of their own."""
    return repr(sorted(value)) if isinstance(value, frozenset) else repr(value)


@pytest.mark.parametrize(("name", "value", "expected"), RIGHT, ids=spelled)
def test_right_arguments(name: str, value: object, expected: object) -> None:
    """A valid argument is taken as it is."""
    assert value_of(resolve({name: value}, {}), name) == expected


@pytest.mark.parametrize(("name", "text", "expected"), RIGHT_TEXT, ids=spelled)
def test_right_variables(name: str, text: str, expected: object) -> None:
    """A valid environment variable means what its text stands for."""
    assert value_of(resolve({}, {PREFIX + name.upper(): text}), name) == expected


@pytest.mark.parametrize("name", [f.name for f in fields(Settings)])
def test_an_argument_wins_over_the_environment(name: str) -> None:
    """For every setting the argument wins over the variable, and the variable over the default."""
    default = value_of(resolve({}, {}), name)
    text, from_text = next((t, e) for n, t, e in RIGHT_TEXT if n == name and e != default)
    given, from_argument = next((v, e) for n, v, e in RIGHT if n == name and e != from_text)
    environment = {PREFIX + name.upper(): text}
    assert value_of(resolve({name: UNSET}, environment), name) == from_text != default
    assert value_of(resolve({name: given}, environment), name) == from_argument != from_text


def test_an_argument_hides_a_wrong_variable() -> None:
    """A variable that an argument overrides is not even read."""
    assert resolve({"port": 1}, {PREFIX + "PORT": "nonsense"}).port == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [f.name for f in fields(Settings)])
@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_variable_is_not_set(name: str, text: str) -> None:
    """A variable that is empty or blank is as good as not set."""
    assert value_of(resolve({}, {PREFIX + name.upper(): text}), name) == value_of(Settings(), name)


def test_a_kubernetes_service_sets_no_port(caplog: pytest.LogCaptureFixture) -> None:
    """The variable that Kubernetes sets for a Service of the exporter's name is ignored, with a warning; an argument counts."""
    environment = {PREFIX + "PORT": "tcp://10.96.14.7:9100"}
    assert resolve({}, environment).port == Settings().port
    assert "Kubernetes" in caplog.text
    assert resolve({"port": 7}, environment).port == 7


def test_labels_of_metrics_are_reserved() -> None:
    """Label names that the metrics use cannot be given as labels, but for the facts of the info metrics."""
    used = {label for spec in CATALOGUE.values() if spec not in (TRAIN_INFO, PYTHON_INFO) for label in spec.labels}
    assert len(used) > 10
    for label in (*used, *RESERVED_LABELS):
        with pytest.raises(ValueError, match=f"'{label}' is a label of the exporter's own"):
            resolve({"labels": {label: "x"}}, {})


def test_the_removed_collector_names_its_successor() -> None:
    """Asking for the view of the whole run on rank 0 is refused, and the message says what does the same."""
    with pytest.raises(ValueError, match=r"^collectors=.*whole_run was removed.*recording rules.*ranks.rules\.yml"):
        resolve({"collectors": {"whole_run": True}}, {})
    with pytest.raises(ValueError, match=r"COLLECTORS=.*whole_run was removed"):
        resolve({}, {PREFIX + "COLLECTORS": "whole_run=on"})
