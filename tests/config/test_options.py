"""Options are declared once: what the user calls, reads and types follows from the declarations."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
import runpy
import typing
from dataclasses import dataclass, fields

import pytest
import torch

from torch_grad_exporter import start, start_exporter
from torch_grad_exporter.actions import Alertmanager, Webhook
from torch_grad_exporter.cli import main as cli
from torch_grad_exporter.config import kinds
from torch_grad_exporter.config.option import PREFIX, UNSET, Unset, option, options_of, resolve
from torch_grad_exporter.config.settings import Arguments, Settings

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
OPTIONS = options_of(Settings) + options_of(Arguments)
DOC = runpy.run_path(str(ROOT / "scripts" / "options_doc.py"))


def test_the_signature_is_what_is_declared() -> None:
    """`start_exporter` takes the model and every declared option, under its name, with its annotation and its default."""
    model, *parameters = inspect.signature(start_exporter).parameters.values()
    assert (model.name, model.default) == ("model", inspect.Parameter.empty)
    found = [(one.name, one.annotation, one.default) for one in parameters]
    assert found == [(one.name, ast.unparse(ast.parse(one.annotation)), one.absent) for one in OPTIONS]  # quotes as Python has them
    assert [one.name for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY] == ["port"]


def test_every_annotation_is_a_type() -> None:
    """The annotations name types that exist, and leave room for an argument that is not given."""
    decisions = typing.get_type_hints(start_exporter, vars(start))
    for one in OPTIONS:
        assert (Unset if one.read else type(None)) in typing.get_args(decisions[one.name])


@pytest.mark.parametrize("path", ["docs/options.md", "torch_grad_exporter/start.py"])
def test_what_is_written_of_options_follows_the_declarations(path: str) -> None:
    """The page of options, and signature and docstring of `start_exporter`, are what `make golden` makes of the declarations."""
    written = {str(file.relative_to(ROOT)): text for file, text in DOC["written"]().items()}
    assert (ROOT / path).read_text(encoding="utf-8") == written[path]


def test_nothing_else_is_written() -> None:
    """The test above leaves no file out."""
    assert {file.name for file in DOC["written"]()} == {"options.md", "start.py"}


def test_help_says_what_is_declared(capsys: pytest.CaptureFixture[str]) -> None:
    """`demo --help` describes the options that it shares with `start_exporter` in the words of their declarations."""
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for one in options_of(Settings):
        if one.name in ("port", "every", "addr", "web_config_file"):
            assert one.help.replace("`", "") in text


def test_the_defaults_that_are_shown_are_those_that_hold() -> None:
    """What the docs show as the default of a number is that number, or begins with it."""
    numbers = {one.name: one for one in options_of(Settings) if isinstance(one.default, int | float) and one.default is not False}
    assert set(numbers) == {"port", "overhead_budget", "max_layers", "dead_window", "linger"}
    assert all(re.match(rf"{one.default:g}\b", one.shown) for one in numbers.values())
    assert {one.shown for one in OPTIONS if one.default is False} == {"off"}


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_the_docs_name_no_variable_that_is_not_declared(page: pathlib.Path) -> None:
    """Every variable of the exporter's own that a page names is that of an option, or of a notifier."""
    named = set(re.findall(rf"{PREFIX}[A-Z_]*[A-Z]", page.read_text(encoding="utf-8")))
    assert named <= {one.variable for one in (*OPTIONS, Webhook, Alertmanager)}


def test_the_page_about_pushing_has_every_variable_of_opentelemetrys() -> None:
    """docs/otlp.md names each option of the push beside its variable."""
    lines = (ROOT / "docs" / "otlp.md").read_text(encoding="utf-8").splitlines()
    pushing = [one for one in OPTIONS if one.name.startswith("otlp_")]
    assert len(pushing) == 4
    for one in pushing:
        assert any(line.startswith(f"| `{one.name}`") and f"`{one.variable}`" in line for line in lines)


def test_every_option_says_what_it_is_for() -> None:
    """The help of an option is one phrase, which the tables can take, and no two options have the same."""
    helps = [one.help for one in OPTIONS]
    assert len(set(helps)) == len(helps)
    assert all(text and not text.endswith(".") and "\n" not in text for text in helps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """Options of these tests only."""

    colour: str = option(kinds.name(5), "red", "colour of the page")
    depth: int | None = option(kinds.rank(), None, "depth of the pool", "In metres.", shown="unknown")
    tags: typing.Mapping[str, str] = option(kinds.labels(), dict, "tags", shown="none")
    handle: object = option(kinds.given("object | None", lambda value: value), None, "a handle", variable="")


def test_a_declaration_is_all_that_an_option_takes() -> None:
    """From one declaration come the argument, the variable, the default, the check and the error that names the source."""
    assert resolve(Toy, {}, {}) == Toy()
    assert resolve(Toy, {"colour": "blue"}, {PREFIX + "COLOUR": "green", PREFIX + "DEPTH": " 3 "}) == Toy(colour="blue", depth=3)
    assert resolve(Toy, {"colour": UNSET}, {PREFIX + "COLOUR": "green"}).colour == "green"
    with pytest.raises(ValueError, match=r"^colour='turquoise': expected a name of 1 to 5 characters$"):
        resolve(Toy, {"colour": "turquoise"}, {})
    with pytest.raises(ValueError, match=f"^environment variable {PREFIX}DEPTH='deep': expected a whole number from 0$"):
        resolve(Toy, {}, {PREFIX + "DEPTH": "deep"})


def test_a_variable_that_an_option_does_not_have_is_not_read() -> None:
    """An option without a variable is an argument only, whatever the environment says."""
    assert resolve(Toy, {}, {PREFIX + "HANDLE": "x", "": "x"}).handle is None


def test_defaults_are_not_shared() -> None:
    """Two sets of options have mappings of their own where none was given."""
    assert resolve(Toy, {}, {}).tags is not resolve(Toy, {}, {}).tags


def test_a_declaration_gives_its_line_of_the_signature() -> None:
    """What is to be written into a signature and a table follows from the declaration."""
    colour, depth, _, handle = options_of(Toy)
    assert (colour.annotation, colour.absent, colour.variable) == ("str | Unset", UNSET, "TORCH_GRAD_EXPORTER_COLOUR")
    assert (depth.annotation, depth.shown, colour.shown) == ("int | Unset", "unknown", "red")
    assert (handle.annotation, handle.absent, handle.variable) == ("object | None", None, "")
    assert (DOC["meaning"](colour), DOC["meaning"](depth)) == ("colour of the page.", "depth of the pool. In metres.")


def test_arguments_reach_the_exporter() -> None:
    """Each option that is given by name reaches the settings of the exporter that is started."""
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
