"""The rows of a verdict: one for each rule, each limit and each comparison."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Result(enum.Enum):
    """The result of a row; only `FAILED` makes a run unhealthy."""

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
    """The verdict on a run. `about`: which run, in a sentence. `unusable`: why nothing can be said of it, else None.

    `remark`: what the verdict does not cover and how to cover it, else empty.
    """

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
