"""RunState: what a run has reached, and where its time went, in a small file that a restart reads.

Each rank has a file of its own. It is replaced as a whole, by a thread that nothing waits for.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from torch_grad_exporter import files
from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.errors import ErrorLog, say, warn
from torch_grad_exporter.inspection.time_by_cause import CAUSES, TimeByCause
from torch_grad_exporter.lifecycle import BackgroundLoop, Ending

logger = logging.getLogger("torch_grad_exporter")

SOURCE = "state"
VERSION = 1

# Between two writes, and how long the end waits for the last one.
WRITE_SECONDS, CLOSE_SECONDS = 5.0, 2.0

# Between the processes of a run, from what the last one has written to the start of the next.
DOWN = "down"


class RunState:
    """The state of a run's earlier processes, read when this is made, and of all of them, written from `start` to `close`.

    Attributes:
        step: Number of the last step of earlier processes.
        processes: How many of them there were.
        seconds: Their time by cause, and that between them; empty if there were none.
    """

    def __init__(
        self, path: Path, *, run: str, clock: StepClock, times: TimeByCause, ending: Ending, errors: ErrorLog,
        pause: float = WRITE_SECONDS,
    ) -> None:  # fmt: skip
        self._path, self._run, self._clock, self._times, self._ending = path, run, clock, times, ending
        self.step, self.processes, self.seconds = 0, 0, dict[str, float]()
        self._known = True  # how far earlier processes came
        self._gap = 0.0  # seconds since the last one, where it had finished
        guard = errors.boundary(SOURCE, limit=None)
        self._thread = BackgroundLoop(SOURCE, self.write, guard=guard, pause=pause, last=self.write)
        self._known = errors.boundary(SOURCE, limit=None)(self._read) and self._known
        if self._known and not self.processes:
            times.recomputed_to = 0  # there is nothing to recompute

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after a last write; it may hang, and is then left behind. Idempotent."""
        self._thread.close(CLOSE_SECONDS)

    def resumed(self, step: int) -> None:
        """Note that the training goes on after this step, so that those which were computed already are computed again."""
        if not self._known:
            return
        if step and self.processes:  # then the last one had not finished, but was asked to end
            self.seconds[DOWN] += self._gap
            self._gap = 0.0
        self._times.recomputed_to = self.step
        if step < self.step:
            message = "the run goes on after step %d: it computes %d steps again, and was down for %.0f s"
            say(logger, logging.INFO, message, step, self.step - step, self.seconds[DOWN])

    def _read(self) -> None:
        try:
            state = json.loads(self._path.read_bytes())
            seconds = _seconds_of(state)
            step, processes, at = (_number(state[name]) for name in ("step", "processes", "at"))
        except FileNotFoundError:
            return
        except IsADirectoryError:
            raise
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._known = False
            aside = self._path.with_suffix(".unreadable")
            message = "state_dir=: %s is not what an exporter has written (%s: %s); renamed to %s; what is recomputed is unknown"
            warn(message, self._path, type(error).__name__, error, aside.name)
            self._path.replace(aside)
            return
        gap = max(0.0, self._clock.started - at)
        # A run that has ended as it should was not down since, unless this process goes on with it.
        if state.get("ended") == "finished":
            self._gap = gap
        else:
            seconds[DOWN] += gap
        self.step, self.processes, self.seconds = int(step), int(processes), seconds

    def write(self) -> None:
        """Replace the file. Raises `OSError`."""
        state = self._ending.state
        now = self._times.seconds(over=state is not None)
        seconds = {cause: self.seconds.get(cause, 0.0) + now.get(cause, 0.0) for cause in (*CAUSES, DOWN)}
        content = {
            "version": VERSION,
            "run": self._run,
            "step": max(self.step, self._clock.number),
            "processes": self.processes + 1,
            "at": self._clock.started + sum(now.values()),  # up to which the seconds are known
            "ended": state,
            "seconds": seconds,
        }
        files.write(self._path, json.dumps(content, indent=1).encode())


def _seconds_of(state: Any) -> dict[str, float]:  # noqa: ANN401 - whatever the file holds
    if state["version"] != VERSION:
        raise ValueError(f"its version is {state['version']!r}")
    return {cause: _number(state["seconds"][cause]) for cause in (*CAUSES, DOWN)}


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} must be a number from 0 on")
    return float(value)
