"""Options are declared once: what the user calls, reads and types follows from the declarations."""

from __future__ import annotations

import inspect
import pathlib
import pydoc
import re
import runpy
import typing
from dataclasses import fields

import pytest
import torch

from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Alertmanager, Webhook
from torch_grad_exporter.cli import main as cli
from torch_grad_exporter.config.option import options_of
from torch_grad_exporter.config.settings import PREFIX, Arguments, Settings

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
OPTIONS = options_of(Settings) + options_of(Arguments)
DOC = runpy.run_path(str(ROOT / "scripts" / "options_doc.py"))


def test_the_signature_has_the_declared_options() -> None:
    """`start_exporter` shows the declared options in their order, with the default of each that the exporter has a variable for."""
    _, *parameters = inspect.signature(start_exporter).parameters.values()
    expected = [(option.name, option.shown if option.variable.startswith(PREFIX) else "None") for option in OPTIONS]
    assert [(parameter.name, repr(parameter.default)) for parameter in parameters] == expected
    assert "UNSET" not in pydoc.render_doc(start_exporter).upper()
    assert {one.kind for one in parameters[1:]} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("path", ["docs/options.md", "torch_grad_exporter/start.py"])
def test_docs_follow_the_declarations(path: str) -> None:
    """The page of options and the docstring of `start_exporter` are what `make golden` generates."""
    written = {str(file.relative_to(ROOT)): text for file, text in DOC["written"]().items()}
    assert (ROOT / path).read_text(encoding="utf-8") == written[path]


@pytest.mark.parametrize("command", ["demo", "run"])
def test_help_says_what_is_declared(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """`--help` of `demo` and `run` describes their options of `start_exporter` in the words of the table."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    offered = ("port", "every", "addr", "web_config_file") if command == "demo" else [one.name for one in OPTIONS if one.is_text]
    for option in OPTIONS:
        if option.name in offered:
            assert option.help.replace("`", "") in text


def test_the_shown_defaults_are_the_real_ones() -> None:
    """The default of a number that the docs show is that number, or begins with it."""
    numbers = {one.name: one for one in options_of(Settings) if isinstance(one.default, int | float) and one.default is not False}
    assert set(numbers) == {"port", "overhead_budget", "max_layers", "dead_window"}
    assert all(re.match(rf"{one.default:g}\b", one.shown) for one in numbers.values())
    assert {one.shown for one in OPTIONS if one.default is False} == {"off"}


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_docs_name_only_declared_variables(page: pathlib.Path) -> None:
    """Every variable of the exporter that a page names belongs to an option or a notifier."""
    named = set(re.findall(rf"{PREFIX}[A-Z_]*[A-Z]", page.read_text(encoding="utf-8")))
    assert named <= {one.variable for one in (*OPTIONS, Webhook, Alertmanager)}


def test_the_otlp_page_has_every_variable() -> None:
    """docs/otlp.md names each option of the push beside its variable."""
    lines = (ROOT / "docs" / "otlp.md").read_text(encoding="utf-8").splitlines()
    pushing = [one for one in OPTIONS if one.name.startswith("otlp_")]
    assert len(pushing) == 4
    for one in pushing:
        assert any(line.startswith(f"| `{one.name}`") and f"`{one.variable}`" in line for line in lines)


def test_arguments_reach_the_exporter() -> None:
    """Each option that is given by name reaches the settings of the started exporter, and the others have their defaults."""
    chosen: dict[str, typing.Any] = {
        "port": None,
        "every": 3,
        "max_layers": 7,
        "moments": True,
        "run": "one",
        "labels": {"team": "a"},
    }
    with start_exporter(torch.nn.Linear(2, 2), **chosen) as exporter:
        assert {name: getattr(exporter.settings, name) for name in chosen} == chosen
        left = {one.name for one in fields(Settings)} - set(chosen)
        assert all(getattr(exporter.settings, name) == getattr(Settings(), name) for name in left)
