"""View: the history of this run, the page that shows it, and the file that keeps it."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch_grad_exporter.collectors.of_sample import OfSample
from torch_grad_exporter.collectors.outcomes import Happened
from torch_grad_exporter.errors import Guard
from torch_grad_exporter.inspection.activation_totals import ActivationSnapshot
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.http.message import Request, Response
from torch_grad_exporter.outputs.live.history import ACTIVATIONS, MOMENTS, QUANTITIES, History
from torch_grad_exporter.outputs.live.live import Live, Run
from torch_grad_exporter.outputs.live.pages import Pages
from torch_grad_exporter.outputs.live.recorder import ActivationMoments, GradientMoments, Looks, Recorder, unless_late
from torch_grad_exporter.rules import Record, Values
from torch_grad_exporter.store.snapshots import Reading
from torch_grad_exporter.store.worker import Worker

CLOSE_SECONDS = 0.5
"""How long the end waits for the last record, at most."""


class View:
    """Records from `start` until `close`, and shows what it has recorded as long as it exists.

    `steps`: of the optimizer that took the most. `scrape`: all metrics; `for_rules`: those that rules read. `happened`: what
    actions have done. `now`: Unix time. `of_sample`: the metrics of a sample. `dead_from`: samples from which on a dead ratio means
    anything. `moments`: whether they are measured. `activations`: what was seen of inner modules, if anybody asks.
    """

    def __init__(
        self,
        run: Run,
        host: Worker,
        steps: Callable[[], int],
        scrape: Callable[[], Iterable[Family]],
        *,
        for_rules: Callable[[], Iterable[Family]],
        targets: Callable[[], bytes],
        happened: Callable[[], Sequence[Happened]],
        of_sample: OfSample,
        dead_from: int,
        now: Callable[[], float],
        on_error: Callable[[BaseException], None],
        moments: bool = False,
        activations: Callable[[], ActivationSnapshot] | None = None,
    ) -> None:
        quantities = QUANTITIES + MOMENTS * moments
        inside = None if activations is None else ActivationMoments(activations)
        record = Record()
        judging = Guard(unless_late(on_error))

        def judge(reading: Reading, step: int) -> None:
            """At each of the first samples, on the thread that drains."""
            judging(of_sample.take, reading)
            judging(record.of_sample, reading.snapshot.gradients.samples, step, lambda: Values(of_sample()))

        looks = Looks(host, GradientMoments(dead_from, quantities), inside, steps, now, judge=judge)
        self.history = History(looks.gradients, now=now, quantities=quantities, quiet=looks.is_quiet)
        self._histories = [self.history]
        inner = None
        if inside is not None:
            inner = History(looks.activations, now=now, quantities=ACTIVATIONS, quiet=looks.is_quiet_inside)
            self._histories.append(inner)
        self.live = Live(
            run,
            self.history,
            scrape,
            targets=targets,
            happened=happened,
            now=now,
            activations=inner,
            record=record,
            for_rules=for_rules,
        )
        self._pages = Pages(self.live)
        self._recorder = Recorder(self._record, self.live.remember, steps, on_error=on_error, last=self._finish)

    def _record(self) -> None:
        for history in self._histories:
            history.record_if_due()

    def _finish(self) -> None:
        for history in self._histories:
            history.finish()
        self.live.conclude()

    def start(self) -> None:
        """Starts to record. Raises `RuntimeError` where there are no more threads to be had."""
        self._recorder.start()

    def close(self, error: str | None = None) -> None:
        """Marks the run as ended, by an exception of type `error` if there is one, and takes a last record. Idempotent."""
        self.live.end(error)
        self._recorder.close(CLOSE_SECONDS)

    def page(self, request: Request) -> Response | None:
        """The page's answer to a request, `None` where it has none."""
        answer = self._pages.answer(request)
        if answer is not None:
            self._recorder.looked_at()
        return answer

    def save(self, path: str) -> None:
        """Writes all of it as JSON, compressed where the name ends in `.gz`; the file is whole or not there. Raises `OSError`."""
        content = json.dumps(self.live.everything(fresh=True), allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
        part = Path(f"{path}.part")
        try:
            part.write_bytes(gzip.compress(content, 6) if path.endswith(".gz") else content)
            part.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
