"""The command line's arguments: what they become, and what is said when they are wrong."""

from __future__ import annotations

import pytest

from torch_grad_exporter import version
from torch_grad_exporter.cli import demo
from torch_grad_exporter.cli import main as cli
from torch_grad_exporter.cli.faults import KINDS, Injection
from torch_grad_exporter.collectors import REGISTRY


def test_demo_arguments_reach_the_options() -> None:
    """Each argument sets the option of its name; what is not given is left to the environment, or is without end at port 9100."""
    options = demo.options(cli.parse(["demo"]))
    assert (options.steps, options.port, options.every, options.inject, options.serving) == (0, 9100, "auto", (), {})
    arguments = "demo --steps 7 --port 0 --every 3 --seed 5 --batch-size 2 --context 16 --width 8 --layers 1 --device cpu"
    assert demo.options(cli.parse(arguments.split())) == demo.DemoOptions(
        steps=7, port=0, every=3, seed=5, batch_size=2, context=16, width=8, layers=1, device="cpu"
    )
    arguments = "demo --addr ::1 --web-config-file web.yml --no-collector.host --no-collector.gpu"
    collectors = {"host": False, "gpu": False}
    assert demo.options(cli.parse(arguments.split())).serving == {
        "addr": "::1",
        "web_config_file": "web.yml",
        "collectors": collectors,
    }


def test_injections_keep_their_order() -> None:
    """`--inject` may be given several times, and a stall may have a length."""
    options = demo.options(cli.parse(["demo", "--inject", "nan@5", "--inject", "stall@7", "--inject", "stall@9:1.5"]))
    assert options.inject == (Injection("nan", 5), Injection("stall", 7, 600.0), Injection("stall", 9, 1.5))


WRONG = [
    ("", "arguments are required: COMMAND"),
    ("train", "invalid choice: 'train'"),
    ("demo --steps -1", "argument --steps: '-1' is not a whole number of at least 0"),
    ("demo --port 65536", "argument --port: '65536' is not a whole number from 0 to 65535"),
    ("demo --every often", "argument --every: 'often' is neither 'auto' nor a whole number"),
    ("demo --width 30", "argument --width: '30' is not a multiple of 4"),
    ("demo --inject nan", "argument --inject: 'nan': the step after @ is a whole number of at least 1, as in nan@100"),
    ("demo --inject flood@3", "there is no fault 'flood'; choose from nan, explode, vanish, dead, stall"),
    ("demo --inject nan@3:9", "only stall takes a length"),
    ("demo --inject stall@3:nan", "a stall's length is a number of seconds"),
    ("demo --steps 4 --inject nan@5", "argument --inject: nan@5 is never reached with --steps 4"),
    ("demo --color red", "unrecognized arguments: --color red\n"),
    ("demo --evry=1", "unrecognized arguments: --evry=1; did you mean --every?"),
    ("check run.json --basline other.json", "did you mean --baseline?"),
]


def test_wrong_arguments_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong argument is named with its valid values, and nothing is started."""
    for arguments, message in WRONG:
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments.split())
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the package's version and exits with 0."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"torch-grad-exporter {version.__version__}\n"


def test_help_explains_every_injection(capsys: pytest.CaptureFixture[str]) -> None:
    """`demo --help-all` explains each kind of `--inject`, and lists each collector."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["demo", "--help-all"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for name, kind in KINDS.items():
        assert f"  {name} " in text
        assert kind.watch in text
    assert all(f"--no-collector.{name}" in text for name in REGISTRY.names)


@pytest.mark.parametrize("command", ["", "run", "check", "demo", "plot", "assets"])
def test_help_fits_a_screen(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The help of each command has at most 40 lines on a screen of 80 columns, and says how to see the rest."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit_:
        cli.main([*filter(None, [command]), "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert sum(max(1, -(-len(line) // 80)) for line in text.splitlines()) <= 40
    assert ("--help-all" in text) == (command in ("run", "demo"))


def test_a_misspelt_option_that_help_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    """An option that only `--help-all` shows is still suggested."""
    with pytest.raises(SystemExit):
        cli.main(["demo", "--no-collector.gup"])
    assert "did you mean --no-collector.gpu" in capsys.readouterr().err
