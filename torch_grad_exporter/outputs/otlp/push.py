"""The pushes to an OTLP receiver, each in a thread of its own: metrics, and problems and actions as log records.

No export waits in a queue: the next one has the same totals, and newer ones. An export of several requests may arrive in part; the
next one has the differences that have not arrived. The end of the run has an export of its own, with the state of the run. Log
records that could not be sent stay, and are sent with what follows: OpenTelemetry's own batch processor starts a thread in each
forked child and waits 30 seconds at the end, so only its exporter is used.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, OTELResourceDetector
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from torch_grad_exporter.collectors.scrape import Scrape
from torch_grad_exporter.collectors.training import TRAIN_STEP_DURATION
from torch_grad_exporter.distributed import identity as distributed
from torch_grad_exporter.errors import ErrorLog, caught
from torch_grad_exporter.outputs.otlp.delivery import (
    LAST_SECONDS,
    SOURCE,
    Delivery,
    DeliveryLoop,
    NotTakenError,
    RejectedError,
    TooLargeError,
)
from torch_grad_exporter.outputs.otlp.delta import Deltas
from torch_grad_exporter.outputs.otlp.points import SCOPE, Points, resource, text
from torch_grad_exporter.outputs.otlp.push_settings import PushSettings, without_password
from torch_grad_exporter.store.journal import MOST, Journal, JournalEvent

try:
    from opentelemetry.sdk._logs import ReadableLogRecord
except ImportError:  # the SDK is older than 1.39
    ReadableLogRecord = None  # type: ignore[assignment,misc]

# The `service.name` of a process that has none: the name of the job in the shipped configuration of Prometheus.
SERVICE = "training"

# Until the first export, if the interval is longer: a wrong endpoint is logged while the user still watches the start.
FIRST_SECONDS = 2.0


# Seconds between two looks at the journal, and records of a request, at most, as in OpenTelemetry's SDKs.
LOOK_SECONDS, TOGETHER = 1.0, 512

SEVERITIES = {"info": SeverityNumber.INFO, "warning": SeverityNumber.WARN, "critical": SeverityNumber.ERROR}

WITHOUT_LOGS = "%s takes no log records, no more are sent: %s; OTEL_LOGS_EXPORTER=none avoids this line"


class Push(DeliveryLoop):
    """Exports all metrics: soon after `start`, every `interval` seconds, and once more at `close`.

    `labels_on`: whether points have the labels, or only the resource, which else has `run` and `rank`. Raises like `Delivery`.
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
        self._due = time.monotonic() + min(settings.interval, FIRST_SECONDS)
        super().__init__(settings, errors, lambda: self._due - time.monotonic())

    def send(self, way: Delivery) -> None:
        """Export once, one request after the other, up to one that fails."""
        now, last = time.monotonic(), self.stopping
        self._due = max(self._due, now - self._settings.interval) + self._settings.interval  # missed exports are not made up for
        self._at = max(time.time_ns(), self._at)  # if the clock is set back, the time of the export before
        # Rules and dashboards read the buckets, sum and count of step durations, which a receiver would not have.
        families = [
            replace(family, exponential=None) if family.spec is TRAIN_STEP_DURATION or not self._settings.exponential else family
            for family in self._scrape()
        ]
        portions = self._points.portions(self._deltas.of(families, at=self._at), self._at)
        failures: list[Exception] = []
        while (last or not self.stopping) and (portion := next(portions, None)) is not None:
            if last and time.monotonic() - now > LAST_SECONDS:
                failures.append(TimeoutError("there was no time left for all of the last export"))
                break
            failure = caught(way.send, portion.data)
            if failure is not None:
                failures.append(failure)
            if failure is not None and not isinstance(failure, RejectedError):
                break
            for family, rows in portion.rows:
                self._deltas.arrived(family, rows)
        if failures and (last or not self.stopping):  # else closing the connection may be why
            self._errors.report_first(SOURCE, failures[0])


class LogPush(DeliveryLoop):
    """Sends what the journal has, each second, and once more at `close`; see `Push`."""

    def __init__(
        self,
        journal: Journal,
        settings: PushSettings,
        labels: Mapping[str, str],
        errors: ErrorLog,
        *,
        labels_on: Literal["series", "target"] = "series",
    ) -> None:
        if ReadableLogRecord is None:
            raise ImportError("log records need opentelemetry-sdk 1.39 or newer")
        self._journal = journal
        self._labels, attributes = identified(labels, labels_on)
        self._resource = resource(attributes)
        self._waiting: deque[ReadableLogRecord] = deque(maxlen=MOST)
        self._taken, self._accepted, self._due = True, False, 0.0
        super().__init__(settings, errors, min(LOOK_SECONDS, settings.interval))

    def send(self, way: Delivery) -> None:
        """Send all records, up to a request that fails."""
        if not self._taken or (time.monotonic() < self._due and not self.stopping):
            return
        self._waiting.extend(map(self._record, self._journal.take()))
        while self._waiting and self._taken:
            batch = [self._waiting.popleft() for _ in range(min(TOGETHER, len(self._waiting)))]
            failure = caught(way.send, batch)
            if failure is None:
                self._accepted = True
            elif isinstance(failure, NotTakenError) and not self._accepted:
                self._taken = False
                self._errors.report(SOURCE, NotTakenError(WITHOUT_LOGS % (without_password(self._settings.endpoint), failure)))
            else:
                self._errors.report_first(SOURCE, failure)
                if not isinstance(failure, RejectedError | NotTakenError | TooLargeError):
                    self._waiting.extendleft(reversed(batch))
                    self._due = time.monotonic() + self._settings.interval
                    return

    def _record(self, event: JournalEvent) -> ReadableLogRecord:
        attributes: dict[str, str | float] = {}
        for name, value in {**self._labels, **event.attributes}.items():
            if isinstance(value, str):
                attributes[name] = text(value)
            elif value is not None and math.isfinite(value):  # others are in the sentence; not every store can hold them
                attributes[name] = value
        # With this span or none, whatever this thread has inherited.
        trace, own = map(int.from_bytes, event.trace or (b"", b""))
        flags = TraceFlags(TraceFlags.SAMPLED if event.trace else TraceFlags.DEFAULT)
        span = SpanContext(trace, own, is_remote=False, trace_flags=flags)
        record = LogRecord(
            timestamp=int(event.time * 1e9),
            observed_timestamp=time.time_ns(),
            context=set_span_in_context(NonRecordingSpan(span), Context()),
            severity_text=event.severity,
            severity_number=SEVERITIES[event.severity],
            body=text(event.text),
            attributes=attributes,
            event_name=event.name,
        )
        return ReadableLogRecord(record, self._resource, SCOPE)


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
