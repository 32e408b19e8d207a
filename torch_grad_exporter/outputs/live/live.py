"""The JSON behind the live page; its shape is in `docs/live.md`.

Everything is read-only and comes from the history and from one scrape that all viewers share for a second.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from torch_grad_exporter.collectors import clipping, exporter, gradients, training
from torch_grad_exporter.collectors.outcomes import Happened
from torch_grad_exporter.metrics.families import Family, Spec
from torch_grad_exporter.outputs.live.encoding import FORMAT, VERSION, Json, cells, columns, frame, number
from torch_grad_exporter.outputs.live.history import ACTIVATIONS, VIEWS, History, Window
from torch_grad_exporter.outputs.live.judged import judged, metrics
from torch_grad_exporter.outputs.live.latest import Latest
from torch_grad_exporter.outputs.live.resources import resources
from torch_grad_exporter.outputs.live.rows import SCALARS
from torch_grad_exporter.outputs.live.track import Part
from torch_grad_exporter.rules import THRESHOLDS, JudgedAt, Problem, Record, Values, Watch
from torch_grad_exporter.rules.watch import OVER

LONGER = 1.001
"""A clip coefficient above this comes not from clipping, but from something that makes gradients longer."""


@dataclass(frozen=True, slots=True)
class Run:
    """Which process the page shows."""

    run: str
    rank: int
    world_size: int
    host: str
    version: str


@dataclass(frozen=True, slots=True)
class Judged:
    """What a scrape shows, and what is wrong by it, the worst first."""

    values: Values
    problems: list[Problem]


class Live:
    """Answers of the page's interface, from any thread.

    `targets`: the ranks as http_sd has them. `happened`: what actions have done. `now` is Unix time.
    `activations`: the history of the outputs of inner modules, if there is one. `record`: what was wrong so far. `for_rules`: a
    scrape without what the package's rules do not read; by default it has everything.
    """

    def __init__(
        self,
        run: Run,
        history: History,
        scrape: Callable[[], Iterable[Family]],
        *,
        targets: Callable[[], bytes] = lambda: b"[]",
        happened: Callable[[], Sequence[Happened]] = tuple,
        now: Callable[[], float] = time.time,
        activations: History | None = None,
        record: Record | None = None,
        for_rules: Callable[[], Iterable[Family]] | None = None,
    ) -> None:
        self._run = run
        self._record = record or Record()
        self._concluded = False
        self._activations = activations
        self._happened = happened
        self._targets = targets
        self._history = history
        self._scrape = scrape
        self._now = now
        self._watch = Watch()
        self._lock = threading.Lock()  # of the watch, held for moments
        # What rules of others read is not known.
        self._latest = Latest(scrape, None if self._watch.has_foreign else for_rules, self._remember, now)
        self._ended: float | None = None
        self._ended_by: str | None = None

    def end(self, error: str | None = None) -> None:
        """Marks the run as ended, by an exception of type `error` if there is one; the page stays readable. Idempotent."""
        if self._ended is None:
            self._ended, self._ended_by = self._now(), error

    def remember(self) -> None:
        """Remembers the counters by which problems are judged, and judges, whether the page is open or not."""
        self._judge(self._latest.of_rules())

    def _remember(self, values: Values, now: float) -> None:
        with self._lock:
            self._watch.remember(values, now)

    def conclude(self) -> None:
        """Judges for the last time: of a run that is over, nothing goes wrong any more."""
        self._judge(Values(self._scrape()))  # of its own: what was shown last is shown for a moment longer
        self._concluded = True

    def _judge(self, values: Values) -> None:
        if self._concluded:
            return
        now, over = self._now(), values.state() in OVER
        with self._lock:
            problems = self._watch.problems(values, now, going=True)
            ended = self._watch.problems(values, now) if over else []
        self._record.of_scrape(values, JudgedAt(now, self._history.samples, int(_step(values))), problems, ended)

    def problems(self) -> list[Problem]:
        """What is wrong now, the worst first."""
        return self._problems(self._latest.values(), self._now())

    def judged(self, *, last: bool = False) -> Judged:
        """What is wrong by a scrape of now. `last`: the run is over.

        Until then one that ends is judged as if it went on: between its end and the last judgement there may be another one,
        and what the end has brought is told once.
        """
        values = Values(self._scrape()) if last else self._latest.values(fresh=True)  # of its own: nobody else's is shown instead
        return Judged(values, self._problems(values, self._now(), going=not last))

    def _problems(self, values: Values, now: float, *, going: bool = False) -> list[Problem]:
        with self._lock:
            return self._watch.problems(values, now, going=going)

    def status(self) -> Json:
        """`api/v1/status`."""
        values, now = self._latest.values(), self._now()
        state, problems = values.state(), self._problems(values, now)
        with self._lock:
            rates = self._watch.rates(values, now if self._ended is None else min(now, self._ended))
        found: Json = {
            "now": now,
            **asdict(self._run),
            "state": state,
            "step": None if state is None else _step(values),
            "ended": self._ended,
            "ended_by": self._ended_by,
            "samples": self._history.samples,
            **{f"{name}_per_second": number(rates.get(name)) for name in ("steps", "samples", "tokens")},
            **{name: number(values.one(spec)) for name, spec in _NUMBERS.items()},
            **{name: number(_sum(values, spec)) for name, spec in _SUMS.items()},
            "dead_layers": sum(1 for _, ratio in values.rows(gradients.GRAD_DEAD_RATIO) if ratio > THRESHOLDS["LayerDead"]),
            "resources": list(resources(values)),
            "problems": [_shown(one) for one in problems],
            "quantities": list(self.quantities),
            "actions": [asdict(one) for one in self._happened()],
            "ranks": list(self._others()),
        }
        return found

    def run(self, window: Window) -> Json:
        """`api/v1/run`."""
        part = self._history.run(window)
        return {**frame(part, window), **columns(self._clipped(part), SCALARS)}

    @property
    def quantities(self) -> tuple[str, ...]:
        """Those of layers that there are."""
        return self._history.quantities + ACTIVATIONS * (self._activations is not None)

    def layers(self, quantity: str, window: Window) -> Json:
        """`api/v1/layers`. Raises `ValueError` where there is no such quantity."""
        history = self._history if self._activations is None or quantity not in ACTIVATIONS else self._activations
        names, part = history.grid(quantity, window)
        flags = np.packbits(part.nonfinite).tobytes() if part.nonfinite.any() else b""
        sharded = history.sharded
        return {
            "quantity": quantity,
            **frame(part, window),
            "layers": names,
            "sharded": [name for name in names if name in sharded],
            **cells(part, quantity),
            "nonfinite": base64.b64encode(flags).decode(),
        }

    def layer(self, name: str) -> Json:
        """`api/v1/layer`. Raises `UnknownLayerError` where there is no such layer."""
        parts = {view: self._history.layer(name, window) for view, window in VIEWS.items()}
        series = {
            view: {
                "stride": part.stride,
                "times": part.times.tolist(),
                "steps": part.steps.tolist(),
                **columns(part, self._history.quantities),
            }
            for view, part in parts.items()
        }
        return {**self._of_layer(self._latest.values(), name), **series}

    def everything(self, *, fresh: bool = False) -> Json:
        """All of it, as it is saved. `fresh`: with a scrape of now, as the run may have ended within the last second."""
        values = self._latest.values(fresh=fresh)
        with contextlib.suppress(TimeoutError):  # another thread judges, which is as good
            self._judge(values)
        return {
            "format": FORMAT,
            "version": VERSION,
            "status": self.status(),
            "run": {view: self.run(window) for view, window in VIEWS.items()},
            "layers": {name: {view: self.layers(name, window) for view, window in VIEWS.items()} for name in self.quantities},
            "layer": {name: self._of_layer(values, name) for name in self._history.layers},
            "judged": judged(self._record),
            "metrics": metrics(values),
        }

    def _clipped(self, part: Part) -> Part:
        """The same, with norms that are no smaller than those after clipping, unless what is there makes gradients longer.

        A record may have one of the norms without the other, and the other may come with the record before.
        """
        newest = self._latest.newest
        coefficient = None if newest is None else newest.one(clipping.GRAD_CLIP_COEFFICIENT)
        if coefficient is not None and coefficient > LONGER:
            return part
        values, (norm, after) = part.values.copy(), (SCALARS.index(name) for name in ("norm", "norm_after_clip"))
        higher = np.isfinite(values[:, after]) & (values[:, norm] < values[:, after])
        values[higher, norm] = values[higher, after]
        return replace(part, values=values)

    def _of_layer(self, values: Values, name: str) -> Json:
        """What is known of a layer in addition to its history."""
        return {**_of_layer(values, name), "sharded": name in self._history.sharded}

    def _others(self) -> Iterable[Json]:
        """The other ranks as links, as they have published themselves."""
        for group in json.loads(self._targets()):
            labels = group["labels"]
            if labels.get("rank") != str(self._run.rank):
                scheme = labels.get("__scheme__", "http")
                yield {"rank": int(labels["rank"]), "host": labels.get("host", ""), "url": f"{scheme}://{group['targets'][0]}/"}


_NUMBERS: Mapping[str, Spec] = {
    "started": training.TRAIN_START_TIMESTAMP,
    "epoch": training.TRAIN_EPOCH,
    "loss": training.TRAIN_LOSS,
    "learning_rate": training.TRAIN_LEARNING_RATE,
    "global_norm": gradients.GRAD_GLOBAL_NORM,
    "global_norm_after_clip": clipping.GRAD_GLOBAL_NORM_AFTER_CLIP,
    "clip_coefficient": clipping.GRAD_CLIP_COEFFICIENT,
    "skipped_steps": training.TRAIN_SKIPPED_STEPS,
    "loss_spikes": training.TRAIN_LOSS_SPIKES,
    "layers": exporter.EXPORTER_LAYERS,
    "last_step": training.TRAIN_LAST_STEP_TIMESTAMP,
    "last_sample_step": gradients.GRAD_SAMPLE_STEP,
    "overhead_ratio": exporter.EXPORTER_OVERHEAD_RATIO,
    "overhead_budget_ratio": exporter.EXPORTER_OVERHEAD_BUDGET,
    "sampling_interval_steps": exporter.EXPORTER_SAMPLING_INTERVAL,
    "series": exporter.EXPORTER_SERIES,
}
"""What is shown as it is, of the first optimizer where there are several."""

_SUMS: Mapping[str, Spec] = {
    "nonfinite_elements": gradients.GRAD_NONFINITE_ELEMENTS,
    "nonfinite_steps": gradients.GRAD_NONFINITE_STEPS,
    "spikes": gradients.GRAD_GLOBAL_NORM_SPIKES,
}


def _step(values: Values) -> float:
    """The number of the last step in the whole training."""
    here = max((steps for _, steps in values.rows(training.TRAIN_STEPS)), default=0)
    return here + (values.one(training.TRAIN_EARLIER_STEPS) or 0)


def _sum(values: Values, spec: Spec) -> float:
    return sum(value for _, value in values.rows(spec))


def _shown(problem: Problem) -> Json:
    """A problem as the page has it: its sentence has the number."""
    return {name: list(part) if isinstance(part, tuple) else part for name, part in asdict(problem).items() if name != "value"}


def _of_layer(values: Values, name: str) -> Json:
    bounds, counts = gradients.GRAD_NORM_DISTRIBUTION.buckets, values.histogram(gradients.GRAD_NORM_DISTRIBUTION, name)
    kinds = [values.one(gradients.GRAD_NONFINITE_ELEMENTS, name, kind) or 0.0 for kind in ("nan", "inf")]
    return {
        "layer": name,
        "distribution": None if counts is None else {"bounds": list(bounds), "counts": counts.tolist()},
        "nonfinite_elements": sum(kinds),
        **{key: number(values.one(spec, name)) for key, spec in _LAYER_NUMBERS.items()},
    }


_LAYER_NUMBERS: Mapping[str, Spec] = {
    "captures": gradients.GRAD_CAPTURES,
    "spikes": gradients.GRAD_NORM_SPIKES,
    "units": gradients.GRAD_UNITS,
    "dead_ratio": gradients.GRAD_DEAD_RATIO,
    "zero_ratio": gradients.GRAD_ZERO_RATIO,
    "max_magnitude": gradients.GRAD_MAX_MAGNITUDE,
    "norm": gradients.GRAD_NORM,
    "shard_norm": gradients.GRAD_SHARD_NORM,
}
