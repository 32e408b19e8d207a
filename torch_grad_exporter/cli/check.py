"""Check: the verdict on a run, for a gate in CI. Prints a table, and writes JUnit's XML where that is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_grad_exporter.gate.baseline import TOLERANCES
from torch_grad_exporter.gate.limits import Limit, limit
from torch_grad_exporter.gate.rows import GateError, Verdict
from torch_grad_exporter.gate.shown import junit, one_line, table
from torch_grad_exporter.gate.terms import FAIL_ON, Terms, check_tolerance, read
from torch_grad_exporter.gate.verdict import verdict

__all__ = ["FAIL_ON", "TOLERANCES", "GateError", "Options", "limit", "run", "tolerance"]


@dataclass(frozen=True, slots=True)
class Options:
    """`sources`: each the address of an exporter, or a file that `exporter.save` has written. `baseline`: another one.

    `fail_on`: severities and alerts. `tolerance`: pairs of what is compared and by which share it may be worse. `junit`: the file
    to write. `cacert`: to trust in addition to the system's.
    """

    sources: Sequence[str]
    baseline: str | None = None
    tolerance: Sequence[tuple[str, float]] = ()
    fail_on: Sequence[str] = FAIL_ON
    limits: Sequence[Limit] = ()
    junit: Path | None = None
    cacert: str | None = None


def run(options: Options) -> int:
    """Judges each run, prints and writes. Returns the worst exit code: 0 healthy, 1 not, 2 where a run says nothing.

    Raises `GateError` for wrong options, for a run that cannot be read, once the others are judged, and where the file cannot be
    written.
    """
    found, errors = [], []
    for source in options.sources:
        try:
            found.append(_verdict(source, options))
            print(table(found[-1]))
        except GateError as error:
            found.append(Verdict("", (), str(error)))
            errors.append(str(error))
    _write(options.junit, found)
    if errors:
        raise GateError(one_line("; ".join(dict.fromkeys(errors))))
    return max(one.code for one in found)


def tolerance(text: str) -> tuple[str, float]:
    """What a text such as `final_loss=0.05` stands for. Raises `GateError`."""
    name, _, share = text.partition("=")
    try:
        found = float(share)
    except ValueError:
        found = math.nan
    check_tolerance(name, found)
    return name, found


def _verdict(source: str, options: Options) -> Verdict:
    saved = read(source, options.cacert)
    baseline = None if options.baseline is None else read(options.baseline, options.cacert)
    return verdict(saved, Terms(options.fail_on, options.limits, baseline, dict(options.tolerance)))


def _write(path: Path | None, found: Sequence[Verdict]) -> None:
    if path is not None:
        try:
            path.write_bytes(junit(found))
        except OSError as error:
            raise GateError(f"cannot write {path}: {error}") from None
