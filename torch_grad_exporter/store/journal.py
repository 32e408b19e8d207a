"""Journal: beginnings and ends of problems, and actions, between those who judge or act and the one who sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from torch_grad_exporter.store.records import TraceIds

# Events that wait, at most: as many as OpenTelemetry's SDKs keep. Of more, the latest.
MOST = 2048


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """Something that happened.

    Attributes:
        time: Unix time.
        name: Which kind of event, such as `torch.problem.start`.
        severity: "info", "warning" or "critical".
        text: A sentence.
        attributes: Further facts by name; None for one that is unknown.
        trace: The active span, None without one.
    """

    time: float
    name: str
    severity: str
    text: str
    attributes: Mapping[str, str | float | None]
    trace: TraceIds | None = None


class Journal:
    """Events that were not taken yet, the oldest first. From any thread, also in signal handlers: it has no lock."""

    def __init__(self) -> None:
        self._events: deque[JournalEvent] = deque(maxlen=MOST)

    def add(self, event: JournalEvent) -> None:
        """Add an event."""
        self._events.append(event)

    def take(self) -> list[JournalEvent]:
        """Return all events, which are then no longer here. For one thread at a time."""
        return [self._events.popleft() for _ in range(len(self._events))]
