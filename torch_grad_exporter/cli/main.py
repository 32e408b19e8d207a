"""The command line: `torch-grad-exporter demo`, `assets`, `plot`, `run`, `check` and `--version`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from torch_grad_exporter.arguments import near
from torch_grad_exporter.cli import assets, check, demo, plot, run
from torch_grad_exporter.cli.terminal import complain
from torch_grad_exporter.errors import UserError
from torch_grad_exporter.version import __version__

PROGRAM = "torch-grad-exporter"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default the process's own. Returns the exit code; wrong arguments exit with 2."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["run"]:  # everything behind the script is the script's, whatever it looks like
        return run.main(given[1:])
    values = parse(given)
    try:
        return int(values.run(values))
    except UserError as error:
        complain(f"{PROGRAM} {values.command}", error)
        return 2
    except KeyboardInterrupt:
        return 130


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command and its options; wrong arguments print a message on standard error and exit with 2."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Prometheus exporter for PyTorch training: gradients, progress and its own cost."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for command in (demo, assets, plot):
        command.add_to(commands)
    # For the list of commands: `run` reads its arguments itself.
    commands.add_parser(
        "run", help="run a training script with an exporter that watches what it trains; the script needs no change"
    )
    check.add_to(commands)
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        chosen = commands.choices[values.command]
        known = [*re.findall(r"--[\w.-]+", chosen.format_usage()), *getattr(values, "left_out", ())]
        meant = near(unknown[0].partition("=")[0], known, prefix="--")
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    return values
