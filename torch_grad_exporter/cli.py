"""The command line: `torch-grad-exporter demo` and `torch-grad-exporter --version`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from torch_grad_exporter import demo
from torch_grad_exporter.version import __version__

PROGRAM = "torch-grad-exporter"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, by default the process's own. Returns the exit code; wrong arguments exit with 2."""
    options = parse(arguments)
    try:
        return demo.run(options)
    except demo.DemoError as error:
        print(f"{PROGRAM} demo: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parse(arguments: Sequence[str] | None = None) -> demo.Options:
    """The demo's options; whatever is wrong with the arguments is told on standard error and exits with 2."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Prometheus exporter for PyTorch training: gradients, progress and its own cost."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    demo_parser = commands.add_parser(
        "demo",
        help="train a small model with the exporter on",
        description="Trains a small transformer on the source of Python's standard library and serves its metrics.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(demo_parser)
    chosen = vars(parser.parse_args(arguments))
    options = demo.Options(**{**chosen, "inject": tuple(chosen["inject"])})
    _check_together(options, demo_parser)
    return options


def _epilog() -> str:
    kinds = "\n".join(f"  {name:<8} {kind.effect};\n           see {kind.watch}" for name, kind in demo.KINDS.items())
    return f"faults that --inject knows:\n{kinds}\n\nA fault is sure to be seen with --every 1."


def _add_options(parser: argparse.ArgumentParser) -> None:
    default = demo.Options(device="cuda" if torch.cuda.is_available() else "cpu")
    add = parser.add_argument
    add("--steps", type=_whole(0), default=default.steps, metavar="N", help="steps to train; 0, the default, until Ctrl-C")
    add("--port", type=_whole(0, 65535), default=default.port, metavar="PORT",
        help=f"port of /metrics, 0 for any free one (default {default.port})")  # fmt: skip
    add("--every", type=_every, default=default.every, metavar="N|auto",
        help="sample every Nth step; auto, the default, adapts to a budget of 1 %% of the training time")  # fmt: skip
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
    add("--device", choices=("cpu", "cuda"), default=default.device, help=f"where to train (default here: {default.device})")


def _check_together(options: demo.Options, parser: argparse.ArgumentParser) -> None:
    """What no argument shows by itself."""
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


if __name__ == "__main__":
    sys.exit(main())
