"""Latest: the last scrapes that the page and the judging by rules share, from any thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable

from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.http.shared import ScrapeBusyError
from torch_grad_exporter.rules.values import Values

MAX_AGE = 1.0
"""Seconds for which a scrape is shown."""

FIRST_SECONDS = 1.0
"""How long a request waits for the first scrape, if another request runs it."""

SHOWN_SECONDS = 30.0
"""How long a scrape of everything is shown while another one is under way, rather than a newer one of what rules read."""

# Of this many scrapes for the rules the last one has everything, so that a collector which no rule needs shows if it fails. Not the
# first: memory takes milliseconds to read, and nobody may ever look at it.
WHOLE_TURNS = 20

Scrape = Callable[[], Iterable[Family]]


class Latest:
    """Takes scrapes when they are asked for, one at a time. `taken`: is told of each, with its time. `now` is Unix time.

    `scrape`: of everything; `for_rules`: of what rules read, `None` where that is not known.
    """

    def __init__(
        self, scrape: Scrape, for_rules: Scrape | None, taken: Callable[[Values, float], None], now: Callable[[], float]
    ) -> None:
        self._scrape = scrape
        self._for_rules = for_rules
        self._tell = taken
        self._now = now
        self._turns = itertools.count(1)
        self._scraping = threading.Lock()
        self._values: Values | None = None
        self._at = float("-inf")
        self.newest: Values | None = None
        """The values of the last scrape, whichever it was."""

    def values(self, *, fresh: bool = False) -> Values:
        """Everything, no older than `MAX_AGE`, or as of the scrape before while another thread scrapes. `fresh`: of now.

        Raises `ScrapeBusyError` where there was none yet and the first one is slow: the server has few workers.
        """
        now, values = self._now(), self._values
        if values is not None and not fresh and self._is_young(now):
            return values
        recent = fresh or now - self._at < SHOWN_SECONDS
        return self._taken(now, values if recent and values is not None else self.newest)

    def of_rules(self) -> Values:
        """What rules read, no older than `MAX_AGE`; most often without the rest, at which nobody may ever look. Raises the same."""
        now = self._now()
        whole = self._for_rules is None or next(self._turns) % WHOLE_TURNS == 0
        return self.values() if whole or self._is_young(now) else self._taken(now, self.newest, self._for_rules)

    def _is_young(self, now: float) -> bool:
        return 0 <= now - self._at < MAX_AGE

    def _taken(self, now: float, otherwise: Values | None, for_rules: Scrape | None = None) -> Values:
        """The values of a scrape of now; while another thread scrapes, `otherwise`."""
        if not self._scraping.acquire(timeout=0 if otherwise is not None else FIRST_SECONDS):
            if otherwise is None:
                raise ScrapeBusyError
            return otherwise
        try:
            self.newest = values = Values((for_rules or self._scrape)())
            self._tell(values, now)
            if for_rules is None:
                self._values, self._at = values, now
            return values
        finally:
            self._scraping.release()
