"""A token bucket: how many requests are answered in which time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch_grad_exporter.outputs.http.web_settings import RateLimit


class TokenBucket:
    """Full at the start, refilled by one token per interval. From any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._limit: RateLimit | None = None
        self._tokens = 0.0
        self._counted_at = 0.0

    def wait(self, limit: RateLimit | None) -> float:
        """Takes a token: 0.0, or the seconds until there is one. Another limit than before starts with a full bucket."""
        if limit is None:
            return 0.0
        with self._lock:
            now = self._clock()
            if limit != self._limit:
                self._limit, self._tokens, self._counted_at = limit, float(limit.burst), now
            self._tokens = min(float(limit.burst), self._tokens + (now - self._counted_at) / limit.interval)
            self._counted_at = now
            if self._tokens < 1.0:
                return (1.0 - self._tokens) * limit.interval
            self._tokens -= 1.0
            return 0.0
