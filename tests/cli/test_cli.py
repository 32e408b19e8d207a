"""The command line's arguments: what they become, and what is said when they are wrong."""

from __future__ import annotations

import pytest

from torch_grad_exporter import version
from torch_grad_exporter.cli import demo
from torch_grad_exporter.cli import main as cli


def test_demo_defaults() -> None:
    """`demo` trains without end, serves on 9100 and samples within the budget."""
    options = cli.parse(["demo"])
    assert (options.steps, options.port, options.every, options.inject) == (0, 9100, "auto", ())


def test_demo_arguments_reach_the_options() -> None:
    """Each argument sets the option of its name."""
    arguments = "demo --steps 7 --port 0 --every 3 --seed 5 --batch-size 2 --context 16 --width 8 --layers 1 --device cpu"
    assert cli.parse(arguments.split()) == demo.Options(
        steps=7, port=0, every=3, seed=5, batch_size=2, context=16, width=8, layers=1, device="cpu"
    )


def test_demo_leaves_serving_to_the_environment() -> None:
    """Address, web configuration and collectors reach `start_exporter` only where they are given."""
    assert cli.parse(["demo"]).serving == {}
    arguments = ["demo", "--addr", "::1", "--web-config-file", "web.yml", "--no-collector.host", "--no-collector.gpu"]
    collectors = {"host": False, "gpu": False}
    assert cli.parse(arguments).serving == {"addr": "::1", "web_config_file": "web.yml", "collectors": collectors}


def test_injections_keep_their_order() -> None:
    """`--inject` may be given several times, and a stall may have a length."""
    options = cli.parse(["demo", "--inject", "nan@5", "--inject", "stall@7", "--inject", "stall@9:1.5"])
    assert options.inject == (demo.Injection("nan", 5), demo.Injection("stall", 7, 600.0), demo.Injection("stall", 9, 1.5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "arguments are required: COMMAND"),
        ("train", "invalid choice: 'train'"),
        ("demo --steps -1", "argument --steps: '-1' is not a whole number of at least 0"),
        ("demo --steps many", "argument --steps: 'many' is not a whole number of at least 0"),
        ("demo --port 65536", "argument --port: '65536' is not a whole number from 0 to 65535"),
        ("demo --every 0", "argument --every: '0' is neither 'auto' nor a whole number of at least 1"),
        ("demo --every often", "argument --every: 'often' is neither 'auto' nor a whole number"),
        ("demo --width 30", "argument --width: '30' is not a multiple of 4"),
        ("demo --inject nan", "argument --inject: 'nan': the step after @ is a whole number of at least 1, as in nan@100"),
        ("demo --inject nan@0", "argument --inject: 'nan@0': the step after @"),
        ("demo --inject flood@3", "there is no fault 'flood'; choose from nan, explode, vanish, dead, stall"),
        ("demo --inject nan@3:9", "only stall takes a length"),
        ("demo --inject stall@3:nan", "a stall's length is a number of seconds"),
        ("demo --inject stall@3:", "a stall's length is a number of seconds"),
        ("demo --steps 4 --inject nan@5", "argument --inject: nan@5 is never reached with --steps 4"),
        ("demo --no-collector.hosts", "unrecognized arguments: --no-collector.hosts"),
        ("demo --color red", "unrecognized arguments: --color red"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong argument is named with its valid values, and nothing is started."""
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
    """`demo --help` explains each kind of `--inject`."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["demo", "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for name, kind in demo.KINDS.items():
        assert f"  {name} " in text
        assert kind.watch in text
