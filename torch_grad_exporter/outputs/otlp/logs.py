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
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from torch_grad_exporter.errors import ErrorLog, caught, inform
from torch_grad_exporter.outputs.otlp.delivery import SOURCE, Delivery, DeliveryLoop, NotTakenError, RejectedError, TooLargeError
from torch_grad_exporter.outputs.otlp.points import SCOPE, resource, text
from torch_grad_exporter.outputs.otlp.push import identified
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
        self._journal = journal
        self._labels, attributes = identified(labels, labels_on)
        self._resource = resource(attributes)
        self._waiting: deque[ReadableLogRecord] = deque(maxlen=MOST)
        self._taken, self._accepted, self._due = True, False, 0.0
        self._most = TOGETHER  # records that the receiver accepts in one request, as far as is known
        super().__init__(settings, errors, min(LOOK_SECONDS, settings.interval))

    def start(self) -> None:
        """Start the thread. Raises `RuntimeError` if no more threads can be started."""
        super().start()
        inform("pushing problems and actions to %s as log records", without_password(self._settings.endpoint))

    def send(self, way: Delivery) -> None:
        """Send all records, up to a request that fails."""
        if not self._taken or (time.monotonic() < self._due and not self.stopping):
            return
        self._waiting.extend(map(self._record, self._journal.take()))
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
