"""Push: the metrics on their way to an OTLP receiver, in a thread of their own.

No export waits in a queue: the next one has the same totals, and newer ones. An export of several requests may arrive in part; the
next one has the differences that have not arrived. The end of the run has an export of its own, with the state of the run.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, OTELResourceDetector

from torch_grad_exporter.collectors.scrape import Scrape
from torch_grad_exporter.collectors.training import TRAIN_STEP_DURATION
from torch_grad_exporter.distributed import identity as distributed
from torch_grad_exporter.errors import ErrorLog, caught, inform, warn
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.otlp.delivery import LAST_SECONDS, SOURCE, Delivery, DeliveryLoop, RejectedError, TooLargeError
from torch_grad_exporter.outputs.otlp.delta import Deltas
from torch_grad_exporter.outputs.otlp.points import POINTS, Points
from torch_grad_exporter.outputs.otlp.push_settings import PushSettings, without_password

# The `service.name` of a process that has none: the name of the job in the shipped configuration of Prometheus.
SERVICE = "training"

# Until the first export, if the interval is longer: a wrong endpoint is logged while the user still watches the start.
FIRST_SECONDS = 2.0


class Push(DeliveryLoop):
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
        self._at = time.time_ns()
        self._deltas = Deltas(settings.delta, began=self._at)
        own, attributes = identified(labels, labels_on)
        self._points = Points(own, attributes, self._deltas, errors, start=self._at)
        self._due = math.inf
        super().__init__(settings, errors, lambda: self._due - time.monotonic())

    def start(self) -> None:
        """Start the thread. Raises `RuntimeError` if no more threads can be started."""
        self._due = time.monotonic() + min(self._settings.interval, FIRST_SECONDS)
        super().start()
        inform("pushing metrics to %s every %g s", without_password(self._settings.endpoint), self._settings.interval)

    def send(self, way: Delivery) -> None:
        """Export once, one request after the other, up to one that fails."""
        now, last = time.monotonic(), self.stopping
        self._due = max(self._due, now - self._settings.interval) + self._settings.interval  # missed exports are not made up for
        self._at = max(time.time_ns(), self._at)  # if the clock is set back, the time of the export before
        families = [family if self._as_it_is(family) else replace(family, exponential=None) for family in self._scrape()]
        portions = self._points.portions(self._deltas.of(families, at=self._at), self._at)
        failures: list[Exception] = []
        while (last or not self.stopping) and (portion := next(portions, None)) is not None:
            if last and time.monotonic() - now > LAST_SECONDS:
                failures.append(TimeoutError("there was no time left for all of the last export"))
                break
            failure = caught(way.send, portion.data)
            if isinstance(failure, TooLargeError):
                if self._points.most == POINTS:
                    warn("otlp: requests are too large, smaller ones follow: %s", failure)
                if (smaller := self._points.halved(portion, self._at)) is not None:
                    portions = itertools.chain(smaller, portions)
                    continue
            if failure is not None:
                failures.append(failure)
            if failure is not None and not isinstance(failure, RejectedError):
                break
            for family, rows in portion.rows:
                self._deltas.arrived(family, rows)
        if failures and (last or not self.stopping):  # else closing the connection may be why
            self._errors.report_first(SOURCE, failures[0])

    def _as_it_is(self, family: Family) -> bool:
        # Rules and dashboards read the buckets, sum and count of step durations, which a receiver would not have.
        return family.exponential is None or (self._settings.exponential and family.spec is not TRAIN_STEP_DURATION)


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
