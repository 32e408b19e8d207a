"""The JSON behind the live page, from the history and from one scrape that all viewers share for a second.

Its shape is in `docs/live.md`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from torch_grad_exporter.capture.progress import active_trace
from torch_grad_exporter.collectors.clipping import GRAD_CLIP_COEFFICIENT
from torch_grad_exporter.collectors.outcomes import ActionMarks
from torch_grad_exporter.collectors.scrape import Scrape
from torch_grad_exporter.errors import BusyError
from torch_grad_exporter.outputs.live import encoding
from torch_grad_exporter.outputs.live.encoding import Json
from torch_grad_exporter.outputs.live.history import ACTIVATIONS, VIEWS, History, Window
from torch_grad_exporter.outputs.live.saved import FORMAT, VERSION
from torch_grad_exporter.outputs.live.step_rows import SCALARS
from torch_grad_exporter.outputs.live.track import Track
from torch_grad_exporter.rules import JudgedAt, Problem, Record, Values, Watch, Wrong
from torch_grad_exporter.rules.watch import OVER
from torch_grad_exporter.store.records import TraceIds

# A clip coefficient above this comes from something that makes gradients longer, not from clipping.
LONGER = 1.001

# Seconds for which a scrape is shown; for which a request waits for the first one, if another request runs it; and for which one of
# everything is shown while another one is under way, instead of a newer one of what rules read.
MAX_AGE, FIRST_SECONDS, SHOWN_SECONDS = 1.0, 1.0, 30.0

# Of a run without logged values.
EMPTY = Track(0, means=True, recent=1, whole=2)


@dataclass(frozen=True, slots=True)
class Run:
    """The process that the page shows."""

    run: str
    rank: int
    world_size: int
    host: str
    version: str


@dataclass(frozen=True, slots=True)
class Judged:
    """A scrape, and what is wrong by it, the worst first."""

    values: Values
    problems: list[Problem]


class Live:
    """The answers of the page's interface, from any thread; see `View`. `now`: returns Unix time."""

    def __init__(
        self,
        run: Run,
        history: History,
        scrape: Scrape,
        *,
        targets: Callable[[], bytes],
        marks: ActionMarks,
        record: Record,
        activations: History | None = None,
        logged: History | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._run, self._record, self._marks, self._targets = run, record, marks, targets
        self._history, self._activations, self._logged = history, activations, logged
        self._scrape, self._now, self._concluded = scrape, now, False
        self._watch = Watch()
        self._lock = threading.Lock()  # of the watch, held for moments
        self._scraping = threading.Lock()
        self._values: Values | None = None  # of everything, at this time
        self._at = float("-inf")
        self._newest: Values | None = None  # of everything, or of what rules read
        self._ended: float | None = None
        self._ended_by: str | None = None
        self._ended_in: TraceIds | None = None  # the span that was active then

    def end(self, error: str | None = None) -> None:
        """Mark the run as ended, by an exception of type `error` if there is one; the page stays readable. Idempotent."""
        if self._ended is None:
            self._ended, self._ended_by, self._ended_in = self._now(), error, active_trace()

    def remember(self) -> None:
        """Remember the metrics by which problems are judged, and judge, whether the page is open or not."""
        self._judge(self._latest(whole=False))

    def conclude(self) -> None:
        """Judge for the last time: nothing can go wrong in a run that is over."""
        self._judge(Values(self._scrape()), last=True)  # a scrape of its own: the shared one may be a second old
        self._concluded = True

    def _judge(self, values: Values, *, last: bool = False) -> None:
        if self._concluded:
            return
        now, over = self._now(), values.state() in OVER
        with self._lock:
            problems = self._watch.problems(values, now, going=True)
            ended = self._watch.problems(values, now) if over else []
        moment = JudgedAt(now, self._history.samples, int(encoding.step(values)), self._ended_in)
        self._record.of_scrape(values, moment, problems, ended, last=last)

    def problems(self) -> list[Problem]:
        """Return what is wrong now, the worst first."""
        return self._problems(self._latest(), self._now())

    @property
    def wrong(self) -> list[Wrong]:
        """Everything that was wrong until now."""
        return self._record.wrong

    def judged(self, *, last: bool = False) -> Judged:
        """Return what is wrong by a new scrape. `last`: the run is over; until then it is judged as if it went on.

        Between its end and the last judgement there may be another one, and problems of the end are reported once.
        """
        values = Values(self._scrape()) if last else self._latest(fresh=True)  # the last one is never shared
        return Judged(values, self._problems(values, self._now(), going=not last))

    def _problems(self, values: Values, now: float, *, going: bool = False) -> list[Problem]:
        with self._lock:
            return self._watch.problems(values, now, going=going)

    def status(self, *, fresh: bool = False) -> Json:
        """Return `api/v1/status`. `fresh`: by a new scrape."""
        values, now = self._latest(fresh=fresh), self._now()
        state, problems = values.state(), self._problems(values, now)
        with self._lock:
            rates = self._watch.rates(values, now if self._ended is None else min(now, self._ended))
        alerts = {problem.alert for problem in problems}
        return {
            "now": now,
            **asdict(self._run),
            "state": state,
            "step": None if state is None else encoding.step(values),
            "ended": self._ended,
            "ended_by": self._ended_by,
            "samples": self._history.samples,
            **{f"{name}_per_second": encoding.json_number(rates.get(name)) for name in ("steps", "samples", "tokens")},
            **encoding.numbers(values),
            # Without the number, which is in the sentence.
            "problems": [
                {name: list(part) if isinstance(part, tuple) else part for name, part in asdict(problem).items() if name != "value"}
                for problem in problems
            ],
            # What was critical and is over: a NaN of ten minutes ago may be in the weights still.
            "earlier": [
                {name: getattr(wrong, name) for name in ("alert", "severity", "text", "layer", "first", "last")}
                for wrong in self._record.wrong
                if wrong.severity == "critical" and wrong.alert not in alerts
            ],
            "quantities": list(self.quantities),
            "values": 0 if self._logged is None else self._logged.samples,
            "actions": [asdict(action) for action in self._marks.latest()],
            "ranks": [
                # As they have published themselves.
                {
                    "rank": int(of["rank"]),
                    "host": of.get("host", ""),
                    "url": f"{of.get('__scheme__', 'http')}://{group['targets'][0]}/",
                }
                for group in json.loads(self._targets())
                if (of := group["labels"]).get("rank") != str(self._run.rank)
            ],
        }

    def wrong_now(self) -> Json:
        """Return `api/v1/problems`: the part of the status that says what is wrong."""
        status = self.status()
        return {name: status[name] for name in ("run", "rank", "now", "state", "step", "ended", "ended_by", "problems", "earlier")}

    def run(self, window: Window) -> Json:
        """Return `api/v1/run`."""
        part, newest = self._history.run(window), self._newest
        coefficient = None if newest is None else newest.one(GRAD_CLIP_COEFFICIENT)
        if coefficient is None or coefficient <= LONGER:
            # A record may have one of the norms without the other, which then came with the record before. The one before clipping
            # is at least as large, unless something makes gradients longer.
            values, (norm, after) = part.values.copy(), (SCALARS.index(name) for name in ("norm", "norm_after_clip"))
            higher = np.isfinite(values[:, after]) & (values[:, norm] < values[:, after])
            values[higher, norm] = values[higher, after]
            part = replace(part, values=values)
        return {**encoding.frame(part, window), **encoding.columns(part, SCALARS)}

    def values(self, window: Window) -> Json:
        """Return `api/v1/values`: those that the user logs, by name."""
        names, part = ([], window.of(EMPTY)) if self._logged is None else self._logged.grid("value", window)
        return {**encoding.frame(part, window), **encoding.named(part, names)}

    @property
    def quantities(self) -> tuple[str, ...]:
        """The quantities of layers."""
        return self._history.quantities + ACTIVATIONS * (self._activations is not None)

    def layers(self, quantity: str, window: Window) -> Json:
        """Return `api/v1/layers`. Raises `ValueError` if there is no such quantity."""
        history = self._history if self._activations is None or quantity not in ACTIVATIONS else self._activations
        names, part = history.grid(quantity, window)
        flags = np.packbits(part.nonfinite).tobytes() if part.nonfinite.any() else b""
        sharded = history.sharded
        return {
            "quantity": quantity,
            **encoding.frame(part, window),
            "layers": names,
            "sharded": [name for name in names if name in sharded],
            **encoding.cells(part, quantity),
            "nonfinite": base64.b64encode(flags).decode(),
        }

    def layer(self, name: str) -> Json:
        """Return `api/v1/layer`. Raises `UnknownLayerError` if there is no such layer."""
        series: Json = {}
        for view, window in VIEWS.items():
            part = self._history.layer(name, window)
            records = {key: value for key, value in encoding.frame(part, window).items() if key in ("stride", "times", "steps")}
            series[view] = {**records, **encoding.columns(part, self._history.quantities)}
        return {**self._layer_now(self._latest(), name), **series}

    def everything(self, *, fresh: bool = False) -> Json:
        """Return everything, as it is saved. `fresh`: by a new scrape, as the run may have ended within the last second."""
        values = self._latest(fresh=fresh)
        with contextlib.suppress(BusyError):  # another thread judges, which is as good
            self._judge(values)
        return {
            "format": FORMAT,
            "version": VERSION,
            "status": self.status(),
            "run": {view: self.run(window) for view, window in VIEWS.items()},
            "layers": {name: {view: self.layers(name, window) for view, window in VIEWS.items()} for name in self.quantities},
            "layer": {name: self._layer_now(values, name) for name in self._history.layers},
            "values": {view: self.values(window) for view, window in VIEWS.items()},
            "judged": encoding.judged(self._record),
            "metrics": encoding.metrics(values),
        }

    def _layer_now(self, values: Values, name: str) -> Json:
        return {**encoding.of_layer(values, name), "sharded": name in self._history.sharded}

    def _latest(self, *, whole: bool = True, fresh: bool = False) -> Values:
        """Return a scrape of everything, or of what rules read, no older than `MAX_AGE`; the page and judging share it.

        One runs at a time. While another thread scrapes, the one before is returned; `BusyError` is raised if there was none yet
        and the first one is slow, as the server has few workers. `fresh`: a new one.
        """
        now, values = self._now(), self._values
        if values is not None and not fresh and 0 <= now - self._at < MAX_AGE:
            return values
        shown = whole and values is not None and (fresh or now - self._at < SHOWN_SECONDS)
        otherwise = values if shown else self._newest
        if not self._scraping.acquire(timeout=0 if otherwise is not None else FIRST_SECONDS):
            if otherwise is None:
                raise BusyError("the first scrape is still running")
            return otherwise
        try:
            whole = whole or self._watch.has_foreign  # rules of other packages may read any metric
            self._newest = values = Values(self._scrape() if whole else self._scrape.for_rules())
            with self._lock:
                self._watch.remember(values, now)
            if whole:
                self._values, self._at = values, now
            return values
        finally:
            self._scraping.release()
