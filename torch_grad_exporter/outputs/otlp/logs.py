"""LogPush: problems and actions on their way to an OTLP receiver as log records, in a thread of their own.

OpenTelemetry's own batch processor starts a thread in each forked child and waits 30 seconds at the end. So only its exporter is
used, as for metrics. What could not be sent stays, and is sent with what follows.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Literal

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from torch_grad_exporter.errors import ErrorLog, caught, inform
from torch_grad_exporter.lifecycle import BackgroundLoop
from torch_grad_exporter.outputs.otlp.delivery import Delivery, NotTakenError, RejectedError, TooLargeError
from torch_grad_exporter.outputs.otlp.points import SCOPE, SOURCE, text
from torch_grad_exporter.outputs.otlp.push import GRACE, LAST_SECONDS, identified, inherit
from torch_grad_exporter.outputs.otlp.push_settings import PushSettings, without_password
from torch_grad_exporter.store.journal import MOST, Journal, JournalEvent
from torch_grad_exporter.store.records import TraceIds

try:
    from opentelemetry.sdk._logs import ReadableLogRecord
except ImportError:
    raise ImportError("log records need opentelemetry-sdk 1.39 or newer") from None

# Seconds between two looks at the journal, at most, as in OpenTelemetry's SDKs.
LOOK_SECONDS = 1.0

# Records of a request, at most, as in OpenTelemetry's SDKs.
TOGETHER = 512

SEVERITIES = {"info": SeverityNumber.INFO, "warning": SeverityNumber.WARN, "critical": SeverityNumber.ERROR}

WITHOUT_LOGS = "%s takes no log records, no more are sent: %s; OTEL_LOGS_EXPORTER=none avoids this line"


class LogPush(BackgroundLoop):
    """Sends what the journal has, each second, and once more at `close`.

    Args:
        journal: What happened.
        settings: Where to.
        labels: Of every record.
        errors: Counts failures.
        labels_on: See `Push`.

    Raises:
        Exception: See `Delivery`.
    """

    def __init__(
        self,
        journal: Journal,
        settings: PushSettings,
        labels: Mapping[str, str],
        errors: ErrorLog,
        *,
        labels_on: Literal["series", "target"] = "series",
    ) -> None:
        self._journal, self._settings, self._errors = journal, settings, errors
        self._labels, attributes = identified(labels, labels_on)
        self._resource = Resource({key: text(value) if isinstance(value, str) else value for key, value in attributes.items()})
        self._waiting: deque[ReadableLogRecord] = deque(maxlen=MOST)
        self._delivery: Delivery | None = Delivery(settings, settings.timeout)
        for warning in self._delivery.warnings:  # most were said for metrics
            inform("OpenTelemetry's exporter: %s", warning)
        self._taken, self._accepted, self._due = True, False, 0.0
        self._most = TOGETHER  # records that the receiver accepts in one request, as far as is known
        guard = errors.boundary(SOURCE, "log records", limit=None)
        super().__init__("logs", self._send, guard=guard, pause=min(LOOK_SECONDS, settings.interval), last=self._send_last)

    def start(self) -> None:
        """Start the thread. Raises `RuntimeError` if no more threads can be started."""
        super().start()
        inform("pushing problems and actions to %s as log records", without_password(self._settings.endpoint))

    def close(self, seconds: float) -> bool:
        """See `BackgroundLoop`. A pause between two tries of a request is ended, since the last request follows."""
        give_up_at = time.monotonic() + seconds
        self.stop()
        if not self.join(min(GRACE, seconds)) and (way := self._delivery) is not None:
            way.close()
        return self.join(give_up_at - time.monotonic())

    def after_fork_in_child(self) -> None:
        """Keep the parent's connection, which must not be touched; the child has no thread that would send anything."""
        inherit(self._delivery)

    # The thread

    def _send(self) -> None:
        if self._delivery is not None and self._taken and time.monotonic() >= self._due:
            self._look()
            self._send_all(self._delivery)

    def _send_last(self) -> None:
        """Send the rest. The connection is new: the earlier one may be closed already."""
        earlier, self._delivery = self._delivery, None
        if earlier is not None:
            earlier.close()
        self._look()
        if self._waiting and self._taken:
            way = Delivery(self._settings, LAST_SECONDS)
            self._send_all(way)
            way.close()

    def _look(self) -> None:
        self._waiting.extend(map(self._record, self._journal.take()))

    def _send_all(self, way: Delivery) -> None:
        while self._waiting and self._taken:
            batch = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
            failure = caught(way.send, batch)
            if failure is None:
                self._accepted, self._most = True, min(TOGETHER, 2 * self._most)
            elif isinstance(failure, TooLargeError) and len(batch) > 1:  # one of them may be large, so later ones grow again
                self._waiting.extendleft(reversed(batch))
                self._most = len(batch) // 2
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
        record = LogRecord(
            timestamp=int(event.time * 1e9),
            observed_timestamp=time.time_ns(),
            context=_context(event.trace),
            severity_text=event.severity,
            severity_number=SEVERITIES[event.severity],
            body=text(event.text),
            attributes=attributes,
            event_name=event.name,
        )
        return ReadableLogRecord(record, self._resource, SCOPE)


def _context(ids: TraceIds | None) -> Context:
    """Return a context with this span or none, whatever this thread has inherited."""
    trace, span = map(int.from_bytes, ids or (b"", b""))
    flags = TraceFlags(TraceFlags.SAMPLED if ids else TraceFlags.DEFAULT)
    return set_span_in_context(NonRecordingSpan(SpanContext(trace, span, is_remote=False, trace_flags=flags)), Context())
