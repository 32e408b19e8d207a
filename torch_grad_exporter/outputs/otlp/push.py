"""Push: the metrics on their way to an OTLP receiver, in a thread of their own.

A receiver may be dead, slow or faulty: each export runs in a thread that may hang, and one that takes too long is left behind. No
export waits in a queue: the next one has the same totals, and newer ones. An export of several requests may arrive in part; the
next one has the differences that have not arrived. The end of the run has an export of its own, with the state of the run.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import platform
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, OTELResourceDetector

from torch_grad_exporter.collectors.scrape import Scrape
from torch_grad_exporter.collectors.training import TRAIN_STEP_DURATION
from torch_grad_exporter.distributed import identity as distributed
from torch_grad_exporter.errors import ErrorLog, Guard, caught, inform, warn
from torch_grad_exporter.lifecycle import BackgroundLoop, BackgroundThread
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.otlp.delivery import Delivery, RejectedError, TooLargeError
from torch_grad_exporter.outputs.otlp.delta import Deltas
from torch_grad_exporter.outputs.otlp.points import POINTS, SOURCE, Points, Portion
from torch_grad_exporter.outputs.otlp.push_settings import PushSettings, without_password

# The `service.name` of a process that has none: the name of the job in the shipped configuration of Prometheus.
SERVICE = "training"

# Until the first export, if the interval is longer: a wrong endpoint is logged while the user still watches the start.
FIRST_SECONDS = 2.0

# For the last export of a run, all of its requests together.
LAST_SECONDS = 1.1

# The part of these seconds that one more request needs.
LAST_REQUEST_SECONDS = 0.05

# For an export that is under way when the run ends: its differences must not be sent twice.
GRACE = 0.25

# Exports that hang, at most; then no further one begins until one of them has finished.
LEFT_BEHIND = 3

# In a forked child: connections of the parent, which gRPC must not end here.
_inherited: list[object] = []


def inherit(connection: object) -> None:
    """Keep a connection of the parent process for as long as this one lives."""
    _inherited.append(connection)


class Push(BackgroundLoop):
    """Exports all metrics: soon after `start`, every `interval` seconds, and once more at `close`.

    Args:
        scrape: Returns the metrics.
        settings: Where to, and how often.
        labels: Of every point.
        errors: Counts failures of exports.
        labels_on: Whether points have the labels, or only the resource, which else has `run` and `rank`.

    Raises:
        Exception: See `Delivery`.
    """

    def __init__(
        self,
        scrape: Scrape,
        settings: PushSettings,
        labels: Mapping[str, str],
        errors: ErrorLog,
        *,
        labels_on: Literal["series", "target"] = "series",
    ) -> None:
        self._scrape = scrape
        self._settings = settings
        self._errors = errors

        self._at = time.time_ns()
        self._deltas = Deltas(settings.delta, began=self._at)
        own, attributes = identified(labels, labels_on)
        self._points = Points(own, attributes, self._deltas, errors, start=self._at)
        self._delivery: Delivery | None = Delivery(settings, settings.timeout)
        for warning in self._delivery.warnings:
            warn("OpenTelemetry's exporter: %s", warning)
        self._hanging: list[BackgroundThread] = []
        self._due = math.inf
        guard = Guard(functools.partial(errors.report_first, SOURCE))
        super().__init__("push", self._export_in_turn, guard=guard, pause=self._until_due, last=self._export_last)

    def start(self) -> None:
        """Start the thread. Raises `RuntimeError` if no more threads can be started."""
        self._due = time.monotonic() + min(self._settings.interval, FIRST_SECONDS)
        super().start()
        endpoint = without_password(self._settings.endpoint)
        inform("pushing metrics to %s every %g s", endpoint, self._settings.interval)

    def after_fork_in_child(self) -> None:
        """Keep the parent's connection, which must not be touched; the child has no thread that would send anything."""
        inherit(self._delivery)

    # The thread

    def _until_due(self) -> float:
        return self._due - time.monotonic()

    def _export_in_turn(self) -> None:
        # Missed exports are not made up for.
        self._due = max(self._due, time.monotonic() - self._settings.interval) + self._settings.interval
        self._export()

    def _export(self) -> None:
        """Export once, in a thread that is left behind if it takes too long, or the run is over."""
        self._hanging = [thread for thread in self._hanging if thread.running]
        if len(self._hanging) >= LEFT_BEHIND:
            raise TimeoutError(f"{LEFT_BEHIND} exports hang in {without_password(self._settings.endpoint)}")
        way = self._delivery = self._delivery or Delivery(self._settings, self._settings.timeout)
        transfer = self._transfer()
        thread = BackgroundThread("export", functools.partial(transfer.run, way))
        thread.start()
        limit = 2 * self._settings.timeout + 1
        while thread.running and not self.stopping and time.monotonic() < transfer.began_at + limit:
            thread.join(0.05)
        if self.stopping:
            thread.join(GRACE)
        # Without the failures that closing the connection causes.
        transfer.stopped, late, outcomes = True, None, list(transfer.outcomes)
        if thread.running:
            self._hanging.append(thread)
            if not self.stopping:  # else the last export closes the connection, which ends a pause between two tries
                self._delivery = None
                way.close()
                late = TimeoutError(f"a request did not finish within {limit:g} s")
        self._judge(outcomes, late)

    def _export_last(self) -> None:
        """Export the end of the run.

        Each request has a connection of its own and the remaining time: the earlier connection may be in use, or in a pause between
        two tries.
        """
        transfer, late = self._transfer(), None
        with ExitStack() as ways:
            if self._delivery is not None:
                ways.callback(self._delivery.close)
            give_up_at = time.monotonic() + LAST_SECONDS
            while (portion := transfer.next()) is not None:
                left = give_up_at - time.monotonic()
                if left < LAST_REQUEST_SECONDS:
                    late = TimeoutError("there was no time left for all of the last export")
                    break
                way = Delivery(self._settings, left)
                ways.callback(way.close)
                if not transfer.sent(way, portion):
                    break
            self._judge(transfer.outcomes, late)

    def _transfer(self) -> _Transfer:
        """Return an export of all present metrics. If the clock is set back, their time is that of the export before."""
        self._at = max(time.time_ns(), self._at)
        families = self._scrape()
        families = [family if self._as_it_is(family) else replace(family, exponential=None) for family in families]
        return _Transfer(self, self._points, self._deltas.of(families, at=self._at), self._at)

    def _as_it_is(self, family: Family) -> bool:
        # Rules and dashboards read the buckets, sum and count of step durations, which a receiver would not have.
        return family.exponential is None or (self._settings.exponential and family.spec is not TRAIN_STEP_DURATION)

    def _judge(self, outcomes: list[Outcome], late: TimeoutError | None) -> None:
        """Note the outcome of an export until now. Later requests of a thread that is left behind are not noted."""
        for family, rows in (row for portion, failure in outcomes if _arrived(failure) for row in portion.rows):
            self._deltas.arrived(family, rows)
        failures = [failure for _, failure in [*outcomes, (None, late)] if failure is not None]
        if failures:
            self._errors.report_first(SOURCE, failures[0])


# A request, and its failure if it has failed.
Outcome = tuple[Portion, Exception | None]


class _Transfer:
    """An export on its way, one request after the other, until `stopped`. `loop`: ends with the run. `at`: time of the numbers.

    `began_at`: the monotonic time at which the present request was sent.
    """

    def __init__(self, loop: BackgroundLoop, points: Points, families: Iterable[Family], at: int) -> None:
        self._loop, self._points, self._at = loop, points, at
        self._portions = points.portions(families, at)
        self.outcomes: list[Outcome] = []
        self.stopped = False
        self.began_at = time.monotonic()

    def run(self, way: Delivery) -> None:
        """Send requests, up to one that fails, or until the run is over: the last export has what is left."""
        while not (self._loop.stopping or self.stopped):
            portion = self.next()
            if portion is None or not self.sent(way, portion):
                break

    def next(self) -> Portion | None:
        """Encode the next request, None after the last; one that was too large comes again in smaller ones."""
        return next(self._portions, None)

    def sent(self, way: Delivery, portion: Portion) -> bool:
        """Send a request. False where the next one would fail as well."""
        self.began_at = time.monotonic()
        failure = caught(way.send, portion.data)
        if isinstance(failure, TooLargeError):
            if self._points.most == POINTS:
                warn("otlp: requests are too large, smaller ones follow: %s", failure)
            if (smaller := self._points.halved(portion, self._at)) is not None:
                self._portions = itertools.chain(smaller, self._portions)
                return True
        self.outcomes.append((portion, failure))
        return _arrived(failure)


def _arrived(failure: Exception | None) -> bool:
    """Return whether a portion must not be sent again."""
    return failure is None or isinstance(failure, RejectedError)


def identified(labels: Mapping[str, str], labels_on: Literal["series", "target"]) -> tuple[Mapping[str, str], dict[str, Any]]:
    """Return the labels of each point or record, and the attributes of the resource.

    These are run and rank, with "target" all labels, those of OpenTelemetry's variables, and host, process and runtime.
    """
    process: dict[str, object] = {
        SERVICE_NAME: SERVICE,
        SERVICE_INSTANCE_ID: f"{labels['run']}/{labels['rank']}",
        "host.name": distributed.hostname(),
        "process.pid": os.getpid(),
        "process.runtime.name": platform.python_implementation().lower(),
        "process.runtime.version": platform.python_version(),
    }
    detected = {key: value for key, value in OTELResourceDetector().detect().attributes.items() if value != ""}
    attributes = {**process, **detected, "run": labels["run"], "rank": labels["rank"]}
    return (labels, attributes) if labels_on == "series" else ({}, {**attributes, **labels})
