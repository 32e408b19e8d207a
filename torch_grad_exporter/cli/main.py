"""The command line: `torch-grad-exporter demo`, `assets`, `plot` and `--version`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from torch_grad_exporter.cli import assets, demo, plot
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.config.option import options_of
from torch_grad_exporter.config.settings import Settings
from torch_grad_exporter.outputs.live.history import QUANTITIES
from torch_grad_exporter.version import __version__

PROGRAM = "torch-grad-exporter"

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_SERVING = ("addr", "web_config_file", "collectors")
"""Options that go to `start_exporter` as they are; where one is not given, the environment decides."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, by default the process's own. Returns the exit code; wrong arguments exit with 2."""
    try:
        return _run(parse(arguments))
    except demo.DemoError as error:
        print(f"{PROGRAM} demo: error: {error}", file=sys.stderr)
        return 2
    except assets.AssetsError as error:
        print(f"{PROGRAM} assets: error: {error}", file=sys.stderr)
        return 2
    except plot.PlotError as error:
        print(f"{PROGRAM} plot: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(options: demo.Options | assets.Options | plot.Options) -> int:
    if isinstance(options, demo.Options):
        return demo.run(options)
    if isinstance(options, plot.Options):
        print(plot.run(options))
        return 0
    print(*assets.write(options), sep="\n")
    return 0


def parse(arguments: Sequence[str] | None = None) -> demo.Options | assets.Options | plot.Options:
    """The command's options; wrong arguments print a message on standard error and exit with 2."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Prometheus exporter for PyTorch training: gradients, progress and its own cost."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_assets(commands)
    _add_plot(commands)
    chosen = parser.parse_args(arguments)
    options: demo.Options | assets.Options | plot.Options = chosen.options(chosen)
    return options


def _add_demo(commands: _Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small model with the exporter on",
        description="Trains a small transformer on the source of Python's standard library and serves its metrics.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_demo_options(parser)

    def options(chosen: argparse.Namespace) -> demo.Options:
        found = _demo_options(chosen)
        _check_together(found, parser)
        return found

    parser.set_defaults(options=options)


def _demo_options(chosen: argparse.Namespace) -> demo.Options:
    values = {name: value for name, value in vars(chosen).items() if name != "options"}
    serving = {name: value for name in _SERVING if (value := values.pop(name)) is not None}
    return demo.Options(**{**values, "inject": tuple(values["inject"]), "serving": serving})


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
    parser.set_defaults(options=lambda chosen: assets.Options(chosen.out, chosen.prometheus_job, chosen.runbook_url, chosen.force))


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
    add("--recent", action="store_true", help="the last records instead of the whole run, in a PNG")
    add("--cacert", metavar="FILE", help="certificate authority of the exporter's certificate")
    parser.set_defaults(
        options=lambda chosen: plot.Options(chosen.source, chosen.out, chosen.quantity, chosen.recent, chosen.cacert)
    )


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".html"):
        raise argparse.ArgumentTypeError(f"{text!r} ends neither in .png nor in .html")
    return path


def _epilog() -> str:
    kinds = "\n".join(f"  {name:<8} {kind.effect};\n           see {kind.watch}" for name, kind in demo.KINDS.items())
    return f"faults that --inject knows:\n{kinds}\n\nA fault is sure to be seen with --every 1."


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    default = demo.Options(device="cuda" if torch.cuda.is_available() else "cpu")
    add = parser.add_argument
    add("--steps", type=_whole(0), default=default.steps, metavar="N", help="steps to train; 0, the default, until Ctrl-C")
    add("--port", type=_whole(0, 65535), default=default.port, metavar="PORT", help=_help("port", default.port))
    add("--every", type=_every, default=default.every, metavar="N|auto", help=_help("every", default.every))
    add("--inject", type=_injection, action="append", default=[], metavar="KIND@STEP",
        help=f"spoil the training from a step on: {', '.join(demo.KINDS)}; may be given several times")  # fmt: skip
    add("--seed", type=_whole(0, 2**63 - 1), default=default.seed, metavar="N", help=f"random seed (default {default.seed})")
    add("--batch-size", type=_whole(1), default=default.batch_size, metavar="N",
        help=f"texts in a step (default {default.batch_size})")  # fmt: skip
    add("--context", type=_whole(1, 4096), default=default.context, metavar="N",
        help=f"bytes in a text (default {default.context})")  # fmt: skip
    add("--width", type=_width, default=default.width, metavar="N",
        help=f"width of the model, a multiple of {demo.HEADS} (default {default.width})")  # fmt: skip
    add("--layers", type=_whole(1), default=default.layers, metavar="N", help=f"layers of the model (default {default.layers})")
    add("--addr", metavar="ADDRESS", help=_help("addr"))
    add("--web-config-file", metavar="FILE", help=_help("web_config_file"))
    add("--device", choices=("cpu", "cuda"), default=default.device, help=f"where to train (default here: {default.device})")
    switches = parser.add_argument_group("collectors", "all of these are on by default")
    for name in (name for name in REGISTRY.names if name in REGISTRY.on_by_default):
        switches.add_argument(f"--no-collector.{name}", dest="collectors", action=_SwitchOff, const=name, nargs=0,
                              help=f"switch off the collector {name!r}")  # fmt: skip


def _help(name: str, default: object = None) -> str:
    """What an option of `start_exporter` is declared with; `default`: the command's own."""
    option = next(one for one in options_of(Settings) if one.name == name)
    return f"{option.help} (default: {option.shown if default is None else default})".replace("`", "").replace("%", "%%")


class _SwitchOff(argparse.Action):
    """Adds one more collector to those that are off."""

    def __call__(self, _parser: object, namespace: argparse.Namespace, _values: object, _option: str | None = None) -> None:
        namespace.collectors = {**(namespace.collectors or {}), str(self.const): False}


def _check_together(options: demo.Options, parser: argparse.ArgumentParser) -> None:
    """Checks the arguments that depend on each other or on the machine."""
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: no CUDA device is there; use --device cpu")
    for injection in options.inject:
        if 0 < options.steps < injection.step:
            parser.error(f"argument --inject: {injection.kind}@{injection.step} is never reached with --steps {options.steps}")


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argument type: a whole number from `least` to `most`."""
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        number = _integer(text)
        if number is None or number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limits}")
        return number

    return parse


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _job(text: str) -> str:
    # It goes into YAML and JSON as it is.
    if not re.fullmatch(r"[A-Za-z_][\w./-]*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name of letters, digits and any of _ . / -, with a letter first")
    return text


def _address(text: str) -> str:
    # As above; an anchor is put behind it.
    if not re.fullmatch(r"https?://[^\s\"'#{}$\\]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the address of a page")
    return text


def _every(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    number = _integer(text)
    if number is None or number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'auto' nor a whole number of at least 1")
    return number


def _width(text: str) -> int:
    number = _whole(1)(text)
    if number % demo.HEADS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of {demo.HEADS}, the number of attention heads")
    return number


def _injection(text: str) -> demo.Injection:
    kind, at, place = text.partition("@")
    if kind not in demo.KINDS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: there is no fault {kind!r}; choose from {', '.join(demo.KINDS)}, as in nan@100"
        )
    place, colon, length = place.partition(":")
    step = _integer(place)
    if not at or step is None or step < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: the step after @ is a whole number of at least 1, as in {kind}@100")
    if not colon:
        return demo.Injection(kind, step)
    if kind != "stall":
        raise argparse.ArgumentTypeError(f"{text!r}: only stall takes a length, as in stall@100:30")
    return demo.Injection(kind, step, _seconds(text, length))


def _seconds(text: str, length: str) -> float:
    try:
        seconds = float(length)
    except ValueError:
        seconds = -1.0
    # A day's limit keeps the number within what the system's clock can sleep.
    if not 0.0 < seconds <= 86400.0:
        raise argparse.ArgumentTypeError(f"{text!r}: a stall's length is a number of seconds up to 86400, as in stall@100:30")
    return seconds
