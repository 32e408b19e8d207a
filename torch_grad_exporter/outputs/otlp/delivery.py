"""Requests on their way to a receiver: what delivery over HTTP and over gRPC have in common.

That is the loop of tries, among others. `urllib3.Retry` could repeat posts only, knows no time limit for all tries together, and
sleeps where nothing can wake it.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import threading
import time
from collections.abc import Iterator

from opentelemetry.context import attach, create_key, detach, get_value, set_value
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from torch_grad_exporter.version import __version__

AGENT = f"torch_grad_exporter/{__version__}"
"""The user agent of all requests."""

TRIES = 6
"""At most, whatever a receiver says."""

FIRST_PAUSE = 1.0
"""Seconds between the first two tries, give or take a fifth; each further pause is twice as long."""

GROWING = -1.0
"""As the pause of a `DeliveryError`: the receiver has given none."""


class DeliveryError(Exception):
    """A request has not arrived, as far as is known. `permanent`: the receiver refuses it permanently; else a retry may work.

    `pause`: seconds after which to try again, or `GROWING`; `None` where another try would fail as well.
    """

    def __init__(self, message: str, *, permanent: bool = False, pause: float | None = None) -> None:
        super().__init__(re.sub(r"//[^/?#\s]*@", "//...@", message))  # without the user and the password of a URL
        self.permanent = permanent
        self.pause = pause


class RejectedError(DeliveryError):
    """A request has arrived, and the receiver did not take all of its points: it must not be sent again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, permanent=True)


class Delivery:
    """The way to one receiver: sends a request again and again while that may help, for so many seconds.

    To be used by one thread at a time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._closed = threading.Event()

    def send(self, body: bytes) -> None:
        """Returns when a request has arrived. Raises `DeliveryError`; takes as long as there is time for tries, or longer."""
        give_up_at = time.monotonic() + self._seconds
        prepared = self.prepared(body)
        with unheard():
            for number in range(TRIES):
                try:
                    self.attempt(prepared, give_up_at)
                except DeliveryError as error:
                    if not self._waited(error.pause, number, give_up_at):
                        raise
                else:
                    return

    def _waited(self, pause: float | None, number: int, give_up_at: float) -> bool:
        """Waits until another try is due; at once False where there is to be none."""
        if pause == GROWING:
            pause = FIRST_PAUSE * 2**number * random.uniform(0.8, 1.2)  # noqa: S311 - no secret
        if pause is None or number + 1 == TRIES or time.monotonic() + pause > give_up_at:
            return False
        return not self._closed.wait(pause)

    def close(self) -> None:
        """Gives the connection back; ends a pause between two tries."""
        self._closed.set()

    def prepared(self, body: bytes) -> bytes:
        """What is sent in each try."""
        return body

    def attempt(self, body: bytes, give_up_at: float) -> None:
        """One try. Raises `DeliveryError`."""
        raise NotImplementedError


def check_rejected(answer: ExportMetricsServiceResponse) -> None:
    """Raises `RejectedError` where the receiver did not take all points of a request that has arrived."""
    partial = answer.partial_success
    if partial.rejected_data_points > 0:
        raise RejectedError(f"{partial.rejected_data_points} points were rejected: {partial.error_message[:500]!r}")


# Beside the user's own OpenTelemetry, and the user's log

_HERE = create_key("torch_grad_exporter")


class _Unheard(logging.Filter):
    """Drops what libraries log of requests of ours: a dead receiver would fill the log of the training, and show its keys."""

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002 - as logging has it
        return get_value(_HERE) is None


_FILTER = _Unheard()


def mute(library: str) -> None:
    """Keeps what a library logs of our requests out of the log."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(f"{library}."):
            filters = logging.getLogger(name).filters
            if _FILTER not in filters:
                filters.insert(0, _FILTER)  # before one that drops repeated lines: a line of ours must not cost the user theirs


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """What this thread does meanwhile is in no log and in no trace of the user's."""
    token = attach(set_value("suppress_instrumentation", True, set_value(_HERE, True)))
    try:
        yield
    finally:
        detach(token)
