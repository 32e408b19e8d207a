"""The summary of a run at its end, in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_grad_exporter.arguments import some
from torch_grad_exporter.rules import Wrong
from torch_grad_exporter.rules.context import times

# Alerts that are named, at most.
NAMED = 5


def summary(status: Mapping[str, Any], wrong: Sequence[Wrong], saved: Path | None) -> str:
    """Return what became of a run.

    Args:
        status: That of the live page.
        wrong: Everything that was wrong at some time.
        saved: Where the history is, None for nowhere.
    """
    state = f"failed by {status['ended_by']}" if status["ended_by"] else status["state"] or "ended"
    steps = "" if status["step"] is None else f" after {times(status['step'])}"
    norm, nonfinite = status["global_norm"], status["nonfinite_steps"]
    parts = [
        times(status["samples"], "sample"),
        "no gradient norm" if norm is None else f"last gradient norm {float(norm):.4g}",
        f"NaN or Inf in {times(nonfinite)}" if nonfinite else "no NaN or Inf seen",
        _problems(list(dict.fromkeys(problem.alert for problem in wrong))),
    ]
    kept = f"saved to {saved}" if saved else "nothing was saved: --save FILE keeps the history, --linger SECONDS the page"
    return f"{state}{steps}: {', '.join(parts)}; {kept}"


def _problems(alerts: list[str]) -> str:
    return f"problems: {some(alerts, NAMED)}" if alerts else "no problems"
