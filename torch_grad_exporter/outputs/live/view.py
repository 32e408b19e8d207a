"""View: the history of this run, the page that shows it, and the file that keeps it; a thread fills it, page open or not."""

from __future__ import annotations

import gzip
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.collectors.outcomes import ActionMarks
from torch_grad_exporter.collectors.sample_families import SampleFamilies
from torch_grad_exporter.collectors.scrape import Scrape
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.inspection.activations import ActivationTotals
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.outputs.http.messages import Request, Response
from torch_grad_exporter.outputs.live import pages
from torch_grad_exporter.outputs.live.encoding import encoded
from torch_grad_exporter.outputs.live.history import (
    ACTIVATIONS,
    LOGGED,
    MEAN_AND_STDDEV,
    QUANTITIES,
    RECORD_SECONDS,
    History,
    Moment,
)
from torch_grad_exporter.outputs.live.live import Live, Run
from torch_grad_exporter.outputs.live.moments import ActivationMoments, GradientMoments, LoggedMoments
from torch_grad_exporter.outputs.live.step_rows import scalars
from torch_grad_exporter.outputs.live.track import RECENT
from torch_grad_exporter.rules import Record
from torch_grad_exporter.store.journal import Journal
from torch_grad_exporter.store.logged_values import LoggedValues
from torch_grad_exporter.store.records import PLACED
from torch_grad_exporter.store.snapshots import Reading
from torch_grad_exporter.store.worker import Worker

# Seconds between two judgements of problems.
JUDGE_SECONDS = 15.0

# Seconds between two looks while the page is closed, at a training that is idle or does this many steps a second and more. A look
# costs half a millisecond.
UNSEEN_SECONDS, FAST = 5.0, 4.0

# Seconds for which the page counts as open after a request, of which it makes one every other second; and for the last record.
OPEN_SECONDS, CLOSE_SECONDS = 10.0, 0.5

# Of failures.
SOURCE = "history"


class View:
    """The history of a run and its page. Records from `start` until `close`, and shows its records as long as it exists.

    A thread records every second or less often, and judges every 15 seconds, and at the end. The first `RECENT` samples have a
    moment each, made on the thread that drains; the others share that of a look.

    Args:
        scrape: All metrics, or those that rules read.
        targets: Returns the ranks in the form of http_sd.
        marks: What actions have done.
        sample_families: Returns the metrics of a sample.
        dead_from: Samples from which on a dead ratio means anything.
        moments: Whether mean and standard deviation are measured.
        journal: Takes beginnings and ends of problems.
    """

    def __init__(
        self,
        run: Run,
        worker: Worker,
        clock: StepClock,
        scrape: Scrape,
        *,
        targets: Callable[[], bytes],
        marks: ActionMarks,
        sample_families: SampleFamilies,
        dead_from: int,
        errors: ErrorLog,
        logged: LoggedValues,
        moments: bool = False,
        activations: ActivationTotals | None = None,
        journal: Journal | None = None,
    ) -> None:
        quantities = QUANTITIES + MEAN_AND_STDDEV * moments
        self._clock, self._families = clock, sample_families
        self._gradients = GradientMoments(dead_from, quantities)
        self._inside = None if activations is None else ActivationMoments(activations)
        self._samples, self._inner = deque[tuple[float, Moment]](), deque[tuple[float, Moment]]()
        self._last_inside = Moment(0, 0, (), np.zeros((0, len(ACTIVATIONS)), dtype=np.float32), scalars())
        self._guard = errors.boundary(SOURCE, limit=None)
        self._problems = Record(journal=journal)
        self._cursor = worker.cursor(singles=PLACED)
        self._each = worker.each_sample(self._cursor, self._sampled, RECENT)
        self.history = History(lambda: worker.read_as(self._cursor, self._present), now=time.time, quantities=quantities)
        inner = None if activations is None else History(self._moment_inside, now=time.time, quantities=ACTIVATIONS)
        values = History(LoggedMoments(logged).take, now=time.time, quantities=LOGGED, means=True)
        self.live = Live(
            run, self.history, scrape, targets=targets, marks=marks, record=self._problems, activations=inner, logged=values
        )
        # In this order: a look at gradients takes everything else as well.
        histories = [history for history in (self.history, inner, values) if history is not None]
        self._judge_at, self._open_until = -math.inf, -math.inf
        self._stepped, self._fast = (time.monotonic(), 0), False  # time and number of the last new step
        work = [history.record_if_due for history in histories]

        def finish() -> None:
            for history in histories:
                history.finish()
            self.live.conclude()

        self._loop = BackgroundLoop("history", *work, self._judge, guard=self._guard, pause=self._pause, last=finish)

    def start(self) -> None:
        """Start to record. Raises `RuntimeError` if no thread can be started."""
        self._loop.start()

    def close(self, error: str | None = None) -> None:
        """Mark the run as ended, by an exception of type `error` if there is one, and take a last record. Idempotent."""
        self.live.end(error)
        self._loop.close(CLOSE_SECONDS)

    def page(self, request: Request) -> Response | None:
        """Return the page's answer to a request, None if it has none."""
        answer = pages.answer(self.live, request)
        if answer is not None:
            now = time.monotonic()
            if now > self._open_until:
                self._loop.wake()
            self._open_until = now + OPEN_SECONDS
        return answer

    def saved(self, *, packed: bool) -> bytes:
        """Return everything as JSON, as it is saved."""
        content = encoded(self.live.everything(fresh=True))
        return gzip.compress(content, 6) if packed else content

    # The moments that the histories record

    def _sampled(self, at: float, reading: Reading) -> None:
        """Take a sample."""
        moment = self._gradients.of_sample(reading, self._clock.number)
        self._guard(self._families.take, reading)
        self._guard(self._problems.of_sample, moment.samples, moment.steps, self._families)
        self._samples.append((at, moment))
        self._look_inside(at, moment)

    def _present(self, reading: Reading) -> Moment:
        by_step = self._each.left > 0
        moment = self._gradients.of(reading, self._clock.number)
        self._look_inside(time.time(), moment)
        return replace(moment, earlier=_taken(self._samples), by_step=by_step)

    def _moment_inside(self) -> Moment:
        """Return the moment of the activations at the last look at gradients."""
        earlier = _taken(self._inner)
        return replace(earlier[-1][1] if earlier else self._last_inside, earlier=earlier)

    def _look_inside(self, at: float, moment: Moment) -> None:
        """Take the activations of a sample: they are always known before its gradients."""
        if self._inside is not None:
            inner = self._inside.of(moment.steps, moment.sample_step)
            if inner.samples != self._last_inside.samples:
                self._inner.append((at, inner))
                self._last_inside = inner

    # The thread

    def _judge(self) -> None:
        now = time.monotonic()
        if now >= self._judge_at:
            self._judge_at = now + JUDGE_SECONDS
            self.live.remember()

    def _pause(self) -> float:
        now, steps = time.monotonic(), self._clock.number
        before, known = self._stepped
        if steps != known:
            self._fast, self._stepped = steps - known >= FAST * (now - before), (now, steps)
        idle = now - self._stepped[0] >= UNSEEN_SECONDS
        return UNSEEN_SECONDS if now > self._open_until and (self._fast or idle) else RECORD_SECONDS


def _taken(line: deque[tuple[float, Moment]]) -> list[tuple[float, Moment]]:
    """Remove and return all moments, the first one first."""
    return [line.popleft() for _ in range(len(line))]
