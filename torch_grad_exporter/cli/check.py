"""The command `check`: the verdict on a run, for a gate in CI, as a table, as JSON and as JUnit's XML."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from torch_grad_exporter.cli.terminal import show
from torch_grad_exporter.errors import UserError
from torch_grad_exporter.files import write_output
from torch_grad_exporter.gate.baseline import TOLERANCES
from torch_grad_exporter.gate.limits import limit
from torch_grad_exporter.gate.rows import RunVerdict, as_json, junit, table
from torch_grad_exporter.gate.verdict import FAIL_ON, Terms, check_tolerance, verdict
from torch_grad_exporter.outputs.live.fetch import loaded


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments."""
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
    add("--tolerance", type=tolerance, action="append", default=[], metavar="NAME=SHARE",
        help="by what share the run may be worse than the baseline; "
        + ", ".join(f"{name} (default {share:g})" for name, share in TOLERANCES.items()))  # fmt: skip
    add("--fail-on", default=",".join(FAIL_ON), metavar="ALERT,...",
        help="alerts and severities that make a run unhealthy, or none; others are only shown (default %(default)s)")  # fmt: skip
    example = "'torch_grad_norm{layer=\"head\"}=10'"
    for kind, text in (("max", "highest value at the end"), ("min", "lowest value at the end"), ("peak", "highest value ever")):
        add(f"--{kind}", action="append", default=[], metavar="METRIC=VALUE",
            help=f"{text} of a gauge or counter, such as {example}; may be given several times")  # fmt: skip
    add("--json", action="store_true", help="print the verdict as JSON, see docs/json-api.md")
    add("--junit", type=Path, metavar="FILE", help="write the verdict as JUnit's XML, too")
    add("--cacert", metavar="FILE", help="certificate authority of the exporter's certificate")
    parser.set_defaults(run=run)


def tolerance(text: str) -> tuple[str, float]:
    """Return the comparison and its share that a text such as `final_loss=0.05` stands for."""
    name, _, share = text.partition("=")
    try:
        value = float(share)
    except ValueError:
        value = math.nan
    try:
        check_tolerance(name, value)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name, value


def run(values: argparse.Namespace) -> int:
    """Judge each run, print and write. Returns the worst exit code: 0 healthy, 1 not, 2 if a run says nothing.

    Raises `UserError` for wrong options, a file that cannot be written, and at the end for a run that cannot be read.
    """
    fail_on = [name.strip() for name in values.fail_on.split(",") if name.strip()]
    limits = [limit(kind, text) for kind in ("max", "min", "peak") for text in getattr(values, kind)]
    verdicts, errors = [], []
    for source in values.sources:
        try:
            saved = loaded(source, values.cacert)
            baseline = None if values.baseline is None else loaded(values.baseline, values.cacert)
            verdicts.append(verdict(saved, Terms(fail_on, limits, baseline, dict(values.tolerance))))
        except UserError as error:
            verdicts.append(RunVerdict("", (), str(error)))
            errors.append(str(error))
    if values.junit is not None:
        try:
            write_output(values.junit, junit(verdicts))
        except OSError as error:
            raise UserError(f"cannot write {values.junit}: {error}") from None
    if values.json:
        show(as_json(verdicts))
    for judged in verdicts:
        if judged.about and not values.json:
            show(table(judged))
    if errors:
        raise UserError("; ".join(dict.fromkeys(errors)))
    return max(result.code for result in verdicts)
