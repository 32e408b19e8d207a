"""One rendering for all scrapers.

Guarantees: one scrape runs at a time; whoever asks while it runs gets its body; a body is handed out
for `max_age` seconds at most; a scrape that raises leaves nothing behind and the next one starts anew.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterable

from torch_grad_exporter.exposition.text import Format, Renderer
from torch_grad_exporter.families import Family


class ScrapeBusyError(Exception):
    """Another scrape has been running for longer than `patience`."""


class SharedScrape:
    """The bodies of the last scrape, by format and encoding, made when first asked for.

    `max_age` and `patience` in seconds.
    """

    def __init__(
        self,
        scrape: Callable[[], Iterable[Family]],
        renderer: Renderer,
        *,
        max_age: float = 1.0,
        patience: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scrape = scrape
        self._renderer = renderer
        self._max_age = max_age
        self._patience = patience
        self._clock = clock
        self._lock = threading.Lock()
        self._families: list[Family] = []
        self._bodies: dict[tuple[Format, bool], bytes] = {}
        self._finished = 0.0

    def body(self, form: Format, *, compressed: bool) -> bytes:
        """The scrape in this format. Raises what the scrape raises, and `ScrapeBusyError`."""
        # A scrape that hangs must not collect all workers behind its lock: then not even /healthz would answer.
        if not self._lock.acquire(timeout=self._patience):
            raise ScrapeBusyError
        try:
            if not self._bodies or self._clock() - self._finished >= self._max_age:
                self._refresh(form)
            return self._made(form, compressed=compressed)
        finally:
            self._lock.release()

    def _refresh(self, form: Format) -> None:
        self._bodies = {}
        self._families = list(self._scrape())
        self._made(form, compressed=False)
        # The age counts from the end, else a scrape of more than a second would run once for everyone waiting.
        self._finished = self._clock()

    def _made(self, form: Format, *, compressed: bool) -> bytes:
        key = (form, compressed)
        if key not in self._bodies:
            if compressed:
                self._bodies[key] = gzip.compress(self._made(form, compressed=False), compresslevel=1, mtime=0)
            else:
                self._bodies[key] = self._renderer.render(self._families, form)
        return self._bodies[key]
