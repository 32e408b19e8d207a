"""The command line: `torch-grad-exporter demo`, `assets`, `plot`, `run`, `check` and `--version`."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import torch

from torch_grad_exporter.cli import assets, check, demo, plot, run
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.config.option import options_of
from torch_grad_exporter.config.settings import Settings
from torch_grad_exporter.outputs.live.history import QUANTITIES
from torch_grad_exporter.version import __version__

PROGRAM = "torch-grad-exporter"

Options: TypeAlias = demo.Options | assets.Options | plot.Options | check.Options

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_Number = TypeVar("_Number", int, float)
_Chosen = TypeVar("_Chosen", bound=Options)

_SERVING = ("addr", "web_config_file", "collectors")
"""Options that go to `start_exporter` as they are; where one is not given, the environment decides."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, by default the process's own. Returns the exit code; wrong arguments exit with 2."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["run"]:  # all behind the script is the script's, whatever it looks like
        return run.main(given[1:])
    chosen = _parser().parse_args(given)
    options: Options = chosen.options(chosen)
    try:
        if isinstance(options, demo.Options):
            return demo.run(options)
        if isinstance(options, check.Options):
            return check.run(options)
        print(plot.run(options) if isinstance(options, plot.Options) else assets.write(options))
    except (demo.DemoError, assets.AssetsError, plot.PlotError, check.GateError) as error:
        print(f"{PROGRAM} {chosen.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The command's options; wrong arguments print a message on standard error and exit with 2."""
    chosen = _parser().parse_args(arguments)
    options: Options = chosen.options(chosen)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Prometheus exporter for PyTorch training: gradients, progress and its own cost."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    _add_demo(commands)
    _add_assets(commands)
    _add_plot(commands)
    _add_run(commands)
    _add_check(commands)
    return parser


def _chosen(kind: type[_Chosen], values: argparse.Namespace) -> _Chosen:
    """The options of a command: each argument is called as its field."""
    return kind(**{field.name: getattr(values, field.name) for field in fields(kind)})


def _add_assets(commands: _Commands) -> None:
    parser = commands.add_parser(
        "assets",
        help="write the dashboards, the rules and what runs them",
        description="Writes the Grafana dashboards, the rules of Prometheus, the configuration of Alertmanager, a compose file "
        "with all three, manifests for Kubernetes, and the runbook.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write to; made if it is not there")
    add("--prometheus-job", type=_job, default=assets.JOB, metavar="NAME",
        help=f"name of the scrape job, which the dashboards then begin with (default {assets.JOB})")  # fmt: skip
    add("--runbook-url", type=_address, metavar="URL",
        help="where you keep runbook.md, for links in alerts and dashboards (default: no links)")  # fmt: skip
    add("--force", action="store_true", help="overwrite files that have another content")
    parser.set_defaults(options=lambda values: _chosen(assets.Options, values))


def _add_run(commands: _Commands) -> None:
    """For the list of commands: `run` reads its arguments itself."""
    commands.add_parser(
        "run", help="run a training script with an exporter that watches what it trains; the script needs no change"
    )


def _add_plot(commands: _Commands) -> None:
    parser = commands.add_parser(
        "plot",
        help="draw a run: a PNG, or the live page as one HTML file",
        description="Draws what a running exporter shows on its live page, or what exporter.save(path) has kept of one.",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="address of a running exporter, such as http://localhost:9100, or a saved history")
    add("--out", type=_picture, required=True, metavar="FILE", help="a .png, which needs matplotlib, or a .html")
    add("--quantity", choices=QUANTITIES, default="norm", help="what the heatmap of a PNG shows (default norm)")
    add("--moments", action="append", default=[], metavar="LAYER",
        help="a panel with mean and standard deviation of a layer's gradient, in a PNG of a run with moments=True; may be given "
        "several times")  # fmt: skip
    add("--recent", action="store_true", help="the last records instead of the whole run, in a PNG")
    add("--cacert", metavar="FILE", help="certificate authority of the exporter's certificate")
    parser.set_defaults(options=lambda values: _chosen(plot.Options, values))


def _add_check(commands: _Commands) -> None:
    parser = commands.add_parser(
        "check",
        help="the verdict on a run, for CI: healthy or not",
        description="Judges a run, which may still go on or is saved, by the rules of the alerts, by limits, and against another "
        "run. Prints a table. The exit code is 0 where the run is healthy, 1 where it is not, 2 where nothing can be said of it.",
    )
    add = parser.add_argument
    add("sources", nargs="+", metavar="RUN",
        help="saved runs, or addresses of running exporters, such as http://localhost:9100; the worst counts")  # fmt: skip
    add("--baseline", metavar="RUN", help="another run, with which this one is compared")
    add("--tolerance", action="append", default=[], metavar="NAME=SHARE",
        help="by what share the run may be worse than the baseline; "
        + ", ".join(f"{name} (default {share:g})" for name, share in check.TOLERANCES.items()))  # fmt: skip
    add("--fail-on", default=",".join(check.FAIL_ON), metavar="ALERT,...",
        help="alerts and severities that make a run unhealthy, or none; others are only shown (default %(default)s)")  # fmt: skip
    example = "'torch_grad_norm{layer=\"head\"}=10'"
    for kind, what in (("max", "highest value at the end"), ("min", "lowest value at the end"), ("peak", "highest value ever")):
        add(f"--{kind}", action="append", default=[], metavar="METRIC=VALUE",
            help=f"{what} of a gauge or counter, such as {example}; may be given several times")  # fmt: skip
    add("--junit", type=Path, metavar="FILE", help="write the verdict as JUnit's XML, too")
    add("--cacert", metavar="FILE", help="certificate authority of the exporter's certificate")
    parser.set_defaults(options=lambda values: _check_options(values, parser))


def _check_options(values: argparse.Namespace, parser: argparse.ArgumentParser) -> check.Options:
    values.fail_on = [name.strip() for name in values.fail_on.split(",") if name.strip()]
    try:
        values.tolerance = [check.tolerance(text) for text in values.tolerance]
        values.limits = [check.limit(kind, text) for kind in ("max", "min", "peak") for text in getattr(values, kind)]
    except check.GateError as error:
        parser.error(str(error))
    return _chosen(check.Options, values)


def _add_demo(commands: _Commands) -> None:
    kinds = "\n".join(f"  {name:<8} {kind.effect};\n           see {kind.watch}" for name, kind in demo.KINDS.items())
    parser = commands.add_parser(
        "demo",
        help="train a small model with the exporter on",
        description="Trains a small transformer on the source of Python's standard library and serves its metrics.",
        epilog=f"faults that --inject knows:\n{kinds}\n\nA fault is sure to be seen with --every 1. --act answers explode and nan.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = demo.Options(device="cuda" if torch.cuda.is_available() else "cpu")
    add = parser.add_argument
    add("--steps", type=_whole(0), metavar="N", help="steps to train; 0, the default, until Ctrl-C")
    add("--port", type=_whole(0, 65535), metavar="PORT", help=_help("port", default.port))
    add("--every", type=_every, metavar="N|auto", help=_help("every", default.every))
    add("--inject", type=_injection, action="append", metavar="KIND@STEP",
        help=f"spoil the training from a step on: {', '.join(demo.KINDS)}; may be given several times")  # fmt: skip
    add("--clip", choices=demo.POLICIES, metavar="POLICY",
        help=f"clip by a policy of start_exporter(clip=), and try the others on the same run: "
        f"{', '.join(demo.POLICIES)}")  # fmt: skip
    add("--act", action="store_true",
        help="let actions answer faults: exploding gradients halve the learning rate, a NaN or Inf in them ends the run",
        )  # fmt: skip
    add("--notify", nargs="?", const="", metavar="URL",
        help="post problems to a webhook, by default to the one in TORCH_GRAD_EXPORTER_WEBHOOK_URL, which other users of this "
        "machine cannot read")  # fmt: skip
    add("--seed", type=_whole(0, 2**63 - 1), metavar="N", help="random seed (default %(default)s)")
    add("--batch-size", type=_whole(1), metavar="N", help="texts in a step (default %(default)s)")
    add("--context", type=_whole(1, 4096), metavar="N", help="bytes in a text (default %(default)s)")
    add("--width", type=_width, metavar="N", help=f"width of the model, a multiple of {demo.HEADS} (default %(default)s)")
    add("--layers", type=_whole(1), metavar="N", help="layers of the model (default %(default)s)")
    add("--addr", metavar="ADDRESS", help=_help("addr"))
    add("--web-config-file", metavar="FILE", help=_help("web_config_file"))
    add("--device", choices=("cpu", "cuda"), help="where to train (default here: %(default)s)")
    switches = parser.add_argument_group("collectors", "all of these are on by default")
    for name in REGISTRY.names:
        switches.add_argument(f"--no-collector.{name}", dest="off", action="append_const", const=name,
                              help=f"switch off the collector {name!r}")  # fmt: skip
    parser.set_defaults(**{field.name: getattr(default, field.name) for field in fields(default)})
    parser.set_defaults(inject=[], options=lambda values: _demo_options(values, parser))


def _demo_options(values: argparse.Namespace, parser: argparse.ArgumentParser) -> demo.Options:
    values.inject = tuple(values.inject)
    values.collectors = dict.fromkeys(values.off, False) if values.off else None
    values.serving = {name: value for name in _SERVING if (value := getattr(values, name)) is not None}
    options = _chosen(demo.Options, values)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: no CUDA device is there; use --device cpu")
    for injection in options.inject:
        if 0 < options.steps < injection.step:
            parser.error(f"argument --inject: {injection.kind}@{injection.step} is never reached with --steps {options.steps}")
    return options


def _help(name: str, default: object = None) -> str:
    """What an option of `start_exporter` is declared with; `default`: the command's own."""
    option = next(one for one in options_of(Settings) if one.name == name)
    return f"{option.help} (default: {option.shown if default is None else default})".replace("`", "").replace("%", "%%")


# What arguments may be


def _number(text: str, read: Callable[[str], _Number], least: float, most: float, wrong: str) -> _Number:
    """The number that a text stands for; `wrong` says what it should be."""
    with contextlib.suppress(ValueError):
        number = read(text)
        if least <= number <= most:
            return number
    raise argparse.ArgumentTypeError(wrong)


def _whole(least: int, most: float = float("inf")) -> Callable[[str], int]:
    """An argument type: a whole number from `least` to `most`."""
    limits = f"of at least {least}" if most == float("inf") else f"from {least} to {most}"
    return lambda text: _number(text, int, least, most, f"{text!r} is not a whole number {limits}")


def _every(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    return _number(text, int, 1, float("inf"), f"{text!r} is neither 'auto' nor a whole number of at least 1")


def _width(text: str) -> int:
    number = _whole(1)(text)
    if number % demo.HEADS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of {demo.HEADS}, the number of attention heads")
    return number


def _injection(text: str) -> demo.Injection:
    kind, _, place = text.partition("@")
    if kind not in demo.KINDS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: there is no fault {kind!r}; choose from {', '.join(demo.KINDS)}, as in nan@100"
        )
    step, colon, length = place.partition(":")
    wrong = f"{text!r}: the step after @ is a whole number of at least 1, as in {kind}@100"
    begin = _number(step, int, 1, float("inf"), wrong)
    if not colon:
        return demo.Injection(kind, begin)
    if kind != "stall":
        raise argparse.ArgumentTypeError(f"{text!r}: only stall takes a length, as in stall@100:30")
    # A day's limit keeps the number within what the system's clock can sleep.
    wrong = f"{text!r}: a stall's length is a number of seconds up to 86400, as in stall@100:30"
    return demo.Injection(kind, begin, _number(length, float, 1e-9, 86400.0, wrong))


def _matching(pattern: str, wrong: str) -> Callable[[str], str]:
    """An argument type: a text that goes into YAML and JSON as it is."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} is {wrong}")
        return text

    return parse


_job = _matching(r"[A-Za-z_][A-Za-z0-9_./-]*", "not a name of letters, digits and any of _ . / -, with a letter first")
_address = _matching(r"https?://[^\s\"'#{}$\\]+", "not the address of a page")  # an anchor is put behind it


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".html"):
        raise argparse.ArgumentTypeError(f"{text!r} ends neither in .png nor in .html")
    return path
