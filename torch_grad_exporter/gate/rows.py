"""The rows of a verdict, one for each rule, limit and comparison: for people as a table, for programs as JSON or JUnit's XML."""

from __future__ import annotations

import enum
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from xml.etree.ElementTree import Element, SubElement, indent, tostring


class Result(enum.Enum):
    """The result of a row, in the order of the table; only `FAILED` makes a run unhealthy."""

    FAILED = "FAILED"
    NOTED = "noted"  # it is wrong, but is not to fail the run
    OK = "ok"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """`group`: "rules", "limits" or "baseline". `name`: of the rule, the limit as it was given, or what is compared."""

    group: str
    name: str
    result: Result
    text: str


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The verdict on a run. `about`: which run. `unusable`: why nothing can be said of it. `remark`: what it does not cover."""

    about: str
    rows: tuple[VerdictRow, ...]
    unusable: str | None = None
    remark: str = ""

    @property
    def healthy(self) -> bool:
        """Whether nothing failed. A run that says nothing is never healthy."""
        return self.unusable is None and not self.of(Result.FAILED)

    @property
    def code(self) -> int:
        """The exit code: 0 healthy, 1 not, 2 unusable."""
        return 2 if self.unusable is not None else 0 if self.healthy else 1

    def of(self, result: Result) -> list[VerdictRow]:
        """Return the rows with this result."""
        return [row for row in self.rows if row.result is result]


WIDTH, INDENT = 120, " " * 10
SUITE = "torch-grad-exporter check"

# Characters that XML cannot have; a layer may have any name.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# Characters that end a line or steer a terminal: a line of a CI log that begins with :: is a command there.
_CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029]+")


def one_line(text: str) -> str:
    """Return a text of a run, whose names may be anything, as it can be printed."""
    return _clean(_CONTROLS.sub(" ", text))


def table(verdict: RunVerdict) -> str:
    """Return what was judged, the failures first, and the verdict in the last line."""
    rows = [row for result in Result for row in verdict.of(result)]
    by_reason: dict[str, list[str]] = {}
    for row in verdict.of(Result.NOT_JUDGED):
        by_reason.setdefault(row.text, []).append(row.name)
    lines = [one_line(verdict.about), *(_line(row) for row in rows if row.result is not Result.NOT_JUDGED)]
    for reason, names in by_reason.items():
        text = f"{one_line(f'not judged: {reason}')}: {one_line(', '.join(names))}"
        lines.append(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent=INDENT, break_on_hyphens=False))
    return "\n".join([*lines, _sum(verdict)])


def as_json(verdicts: Sequence[RunVerdict]) -> str:
    """Return the verdicts as `schemas/v1/check.json` describes them, with characters beyond ASCII as escapes."""
    runs = [
        {
            "about": verdict.about, "healthy": verdict.healthy, "unusable": verdict.unusable, "remark": verdict.remark,
            "rows": [{**asdict(row), "result": row.result.name.lower()} for row in verdict.rows],
        }
        for verdict in verdicts
    ]  # fmt: skip
    return json.dumps({"version": 1, "code": max(verdict.code for verdict in verdicts), "runs": runs}, indent=2)


def junit(verdicts: Sequence[RunVerdict]) -> bytes:
    """Return a suite for each run with a test case for each row, for Jenkins and GitLab; an unusable run has one with an error."""
    root = Element("testsuites")
    for number, verdict in enumerate(verdicts, 1):
        root.append(_suite(verdict, SUITE if len(verdicts) == 1 else f"{SUITE}: run {number} of {len(verdicts)}"))
    indent(root)
    text: bytes = tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _suite(verdict: RunVerdict, name: str) -> Element:
    cases = [_case(row) for row in verdict.rows]
    if verdict.unusable is not None:
        why = _clean(verdict.unusable)
        cases = [Element("testcase", {"classname": "torch_grad_exporter.run", "name": "usable", "time": "0"})]
        SubElement(cases[0], "error", {"message": why, "type": "unusable"}).text = why
    counts = {
        "tests": str(len(cases)),
        "failures": str(len(verdict.of(Result.FAILED))),
        "errors": str(int(verdict.unusable is not None)),
        "skipped": str(len(verdict.of(Result.NOT_JUDGED))),
    }
    suite = Element("testsuite", {"name": name, **counts, "time": "0"})
    suite.extend(cases)
    SubElement(suite, "system-out").text = _clean(f"{verdict.about}\n{_sum(verdict)}")
    return suite


def _line(row: VerdictRow) -> str:
    begin = f"  {row.result.value:<7} {one_line(row.name)}"
    if not row.text:
        return begin
    text = textwrap.fill(one_line(row.text), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    line = f"{begin}: {text.strip()}"
    return line if len(line) <= WIDTH else f"{begin}\n{text}"


def _sum(verdict: RunVerdict) -> str:
    if verdict.unusable is not None:
        return f"UNUSABLE: {one_line(verdict.unusable)}"
    failed, judged = len(verdict.of(Result.FAILED)), len(verdict.rows) - len(verdict.of(Result.NOT_JUDGED))
    begin = f"NOT HEALTHY: {failed} of {judged} failed" if failed else f"HEALTHY: {judged} of {judged} hold"
    remark = f"; {verdict.remark}" if verdict.remark else ""
    return f"{begin}, {len(verdict.rows) - judged} were not judged{remark}"


def _case(row: VerdictRow) -> Element:
    case = Element("testcase", {"classname": f"torch_grad_exporter.{row.group}", "name": _clean(row.name), "time": "0"})
    text = _clean(row.text)
    if row.result is Result.FAILED:
        SubElement(case, "failure", {"message": text.partition("\n")[0], "type": row.group}).text = text
    elif row.result is Result.NOT_JUDGED:
        SubElement(case, "skipped", {"message": text})
    elif text:
        SubElement(case, "system-out").text = text
    return case


def _clean(text: str) -> str:
    return _NO_XML.sub("?", text)
