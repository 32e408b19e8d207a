"""View: the history of this run, the page that shows it, and the file that keeps it."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable

from torch_grad_exporter.capture.progress import StepClock
from torch_grad_exporter.collectors.outcomes import ActionMarks
from torch_grad_exporter.collectors.sample_families import SampleFamilies
from torch_grad_exporter.collectors.scrape import Scrape
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.inspection.activations import ActivationTotals
from torch_grad_exporter.outputs.http.message import Request, Response
from torch_grad_exporter.outputs.live.encoding import encoded
from torch_grad_exporter.outputs.live.history import ACTIVATIONS, LOGGED, MOMENTS, QUANTITIES, History
from torch_grad_exporter.outputs.live.live import Live, Run
from torch_grad_exporter.outputs.live.moments import ActivationMoments, GradientMoments, LoggedMoments
from torch_grad_exporter.outputs.live.pages import Pages
from torch_grad_exporter.outputs.live.recorder import Looks, Recorder
from torch_grad_exporter.outputs.live.track import Together
from torch_grad_exporter.rules import Record
from torch_grad_exporter.store.logged_values import LoggedValues
from torch_grad_exporter.store.worker import Worker

# The end waits this long for the last record, at most.
CLOSE_SECONDS = 0.5


class View:
    """The history of a run and its page. Records from `start` until `close`, and shows its records as long as it exists.

    Args:
        run: The process.
        host: The worker.
        clock: Counts steps.
        scrape: All metrics, or those that rules read.
        targets: Returns the ranks in the form of http_sd.
        marks: What actions have done.
        sample_families: Returns the metrics of a sample.
        dead_from: Samples from which on a dead ratio means anything.
        errors: Counts failures.
        moments: Whether mean and standard deviation are measured.
        logged: Values that the user logs.
        activations: What was seen of inner modules, if the option is on.
    """

    def __init__(
        self,
        run: Run,
        host: Worker,
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
    ) -> None:
        quantities = QUANTITIES + MOMENTS * moments
        inside = None if activations is None else ActivationMoments(activations)
        record = Record()
        gradients = GradientMoments(dead_from, quantities)
        looks = Looks(host, gradients, inside, clock, sample_families=sample_families, record=record, errors=errors)
        self.history = History(looks.gradients, now=time.time, quantities=quantities)
        inner = None if inside is None else History(looks.activations, now=time.time, quantities=ACTIVATIONS)
        values = History(LoggedMoments(logged).take, now=time.time, quantities=LOGGED, together=Together.MEAN)
        self.live = Live(run, self.history, scrape, targets=targets, marks=marks, record=record, activations=inner, logged=values)
        self._pages = Pages(self.live)
        # In this order: a look at gradients takes everything else as well.
        histories = [history for history in (self.history, inner, values) if history is not None]
        self._recorder = Recorder(histories, self.live, clock, errors)

    def start(self) -> None:
        """Start to record. Raises `RuntimeError` if no thread can be started."""
        self._recorder.start()

    def close(self, error: str | None = None) -> None:
        """Mark the run as ended, by an exception of type `error` if there is one, and take a last record. Idempotent."""
        self.live.end(error)
        self._recorder.close(CLOSE_SECONDS)

    def page(self, request: Request) -> Response | None:
        """Return the page's answer to a request, None if it has none."""
        answer = self._pages.answer(request)
        if answer is not None:
            self._recorder.looked_at()
        return answer

    def saved(self, *, packed: bool) -> bytes:
        """Return everything as JSON, as it is saved."""
        content = encoded(self.live.everything(fresh=True))
        return gzip.compress(content, 6) if packed else content
