"""Outputs: the server, its entries for discovery, the pushes, and the file at the end."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch_grad_exporter.collectors.scrape import Scrape
from torch_grad_exporter.collectors.training import TRAIN_INFO
from torch_grad_exporter.errors import ErrorLog, caught, inform, logger, show, warn
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.announcement import Announcement, Rank
from torch_grad_exporter.outputs.http.messages import Request, Response
from torch_grad_exporter.outputs.http.scrapers import Scrapers
from torch_grad_exporter.outputs.http.server import MetricsServer, candidate_ports
from torch_grad_exporter.outputs.http.web_config import WebConfigFile
from torch_grad_exporter.outputs.live.view import View
from torch_grad_exporter.outputs.otlp.push_settings import PushSettings, Signal
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer
from torch_grad_exporter.outputs.prometheus.text_file import LastValues, text_file
from torch_grad_exporter.store.journal import Journal

if TYPE_CHECKING:
    from torch_grad_exporter.outputs.otlp.push import LogPush, Push

# How long the end of a program waits for what is under way, at most, in addition to `linger`.
CLOSE_SECONDS = 1.4

ADDRESS = "serving %s (metrics at /metrics)"
OPEN = "metrics on port %d are readable by every host that can reach it; restrict with addr='127.0.0.1'%s"
WAITS = "the run has ended; waiting up to %d s for a scrape that shows it (Ctrl-C ends the wait, linger=0 avoids it)"
UNREAD = "nothing has read the metrics of this run; exporter.save(path) keeps its history, linger=600 its page"

# What this process has logged: addresses, `OPEN` and `UNREAD`.
_said: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """The user's choices; see `Settings`. A `port` of None serves nothing."""

    port: int | None
    addr: str = ""
    textfile_dir: str = ""
    web_config_file: str = ""
    linger: float | Literal["auto"] = "auto"
    labels_on: Literal["series", "target"] = "series"


class Outputs:
    """Serves metrics, announces where, and pushes them. It is the `Content` of the server.

    `health` returns the object of `/healthz`; `push`: where to push metrics, and where what the `journal` has.
    """

    def __init__(
        self,
        scrape: Scrape,
        rank: Rank,
        options: OutputOptions,
        errors: ErrorLog,
        *,
        health: Callable[[], Mapping[str, object]],
        announcement: Announcement,
        view: View,
        web_config: WebConfigFile | None = None,
        push: Iterable[PushSettings] = (),
        journal: Journal | None = None,
    ) -> None:
        self._scrape, self._rank, self._options, self._errors = scrape, rank, options, errors
        # The file with the last values has a target that is not this process', and so all labels.
        self._renderer = Renderer(rank.labels)
        only_on = TRAIN_INFO if options.labels_on == "target" else None
        self._served = Renderer(rank.labels, only_on=only_on, start=time.time())
        self.ended = self._was_read = False
        self._saw_end = threading.Event()
        self._scrapers = Scrapers()
        self._announcement = announcement
        self._last_values: LastValues | None = None
        self._pushes: list[Push | LogPush] = []
        self._server: MetricsServer | None = None
        self.health, self.targets, self._view = health, announcement.body, view
        try:
            self._start(web_config, push, journal)
        except BaseException:  # such as Ctrl-C while the name service is asked
            self.close(failed=False, hurried=True)
            raise

    def _start(self, web_config: WebConfigFile | None, push: Iterable[PushSettings], journal: Journal | None) -> None:
        options, rank = self._options, self._rank
        if options.textfile_dir:
            guard = self._errors.boundary("textfile", limit=None)
            path = text_file(options.textfile_dir, rank.run, rank.number)
            self._last_values = LastValues(path, lambda: self._renderer.render(self._scrape(), Format.TEXT), guard)
            guard(self._last_values.start)
        for settings in push:
            failure = caught(self._start_push, settings, journal)
            if failure is not None:  # some variables are read by OpenTelemetry's exporters only
                self._errors.report("otlp", RuntimeError(f"no {settings.signal.noun} are pushed: {failure}"))
        if options.port is not None:
            self._server = self._serve(options.port, web_config)
        if self._server is not None:
            self._errors.boundary("discovery", limit=None)(self._announcement.start, self._server.port, self._server.scheme)

    def _start_push(self, settings: PushSettings, journal: Journal | None) -> None:
        labels, labels_on = self._rank.labels, self._options.labels_on
        from torch_grad_exporter.outputs.otlp.push import LogPush, Push  # noqa: PLC0415 - OpenTelemetry's exporters are slow to import

        push: Push | LogPush
        if settings.signal is Signal.METRICS:
            push = Push(self._scrape, settings, labels, self._errors, labels_on=labels_on)
        else:
            push = LogPush(journal or Journal(), settings, labels, self._errors, labels_on=labels_on)
        push.start()
        self._pushes.append(push)

    def _serve(self, port: int, web_config: WebConfigFile | None) -> MetricsServer | None:
        addr, identity = self._options.addr, self._rank.identity
        ports = candidate_ports(port, identity.local_rank, identity.local_world_size)
        try:
            return MetricsServer(self, self._served, self._errors, addr=addr, ports=ports, web_config=web_config)
        except (OSError, RuntimeError) as error:  # no free port, or no more threads can be started
            message = "no metrics are served, training goes on: cannot serve on %s, port %d and on: %s"
            warn(message, addr or "all interfaces", port, error)
            return None

    def scrape(self) -> list[Family]:
        """See `Content`: a scrape of the server."""
        return self._scrape()

    def scraped(self, by: str, *, saw_end: bool) -> None:
        """See `Content`: who gets a scrape."""
        self._was_read = True
        if by:
            self._scrapers.note(by, saw_end=saw_end)
        if saw_end:
            self._saw_end.set()

    def page(self, request: Request) -> Response | None:
        """See `Content`: the live page, and the answers that it asks for."""
        answer = self._view.page(request)
        self._was_read |= answer is not None
        return answer

    @property
    def port(self) -> int | None:
        """The port in use, None if nothing is served."""
        return None if self._server is None else self._server.port

    @property
    def page_url(self) -> str | None:
        """The address of the live page as seen from this host, None if nothing is served."""
        addr = self._options.addr
        host = "localhost" if addr in ("", "0.0.0.0", "::") else f"[{addr}]" if ":" in addr else addr  # noqa: S104
        return None if self._server is None else f"{self._server.scheme}://{host}:{self._server.port}/"

    def announce(self) -> None:
        """Log where the live page is, for each address once in a way that is seen by default."""
        if (url := self.page_url) is not None:
            self._log(ADDRESS, url, once=url)
            self.warn_of_open_port()

    def log_unread(self) -> None:
        """Log how a run is kept, if no client has read what was served, and nothing else gets it."""
        if self._server is not None and not self._was_read and not self._pushes and self._last_values is None:
            self._log(UNREAD, once=UNREAD)

    def _log(self, message: str, *arguments: object, once: str = "") -> None:
        """Log a line; on the first rank so that it is seen by default, of those with the same `once` the first."""
        if self._rank.number == 0 and once not in _said:
            _said.update([once] if once else [])
            show(logger, message, *arguments)
        else:
            inform(message, *arguments)

    def warn_of_open_port(self) -> None:
        """Log once in a process that every host can read the metrics, if so: a notebook starts the exporter again and again."""
        server = self._server
        if server is not None and server.open_to_all and self._rank.identity.local_rank == 0 and OPEN not in _said:
            _said.add(OPEN)
            file = self._options.web_config_file
            protected = f", since {file} requires no authentication" if file else " or web_config_file="
            warn(OPEN, server.port, protected)

    def close(self, *, failed: bool, hurried: bool) -> None:
        """Publish the end of the run: write the text file, push, linger, remove this rank's entries, and free the port.

        The entries of a run that has `failed` stay, like those of one that was killed: then `up` is 0. A `hurried` end, which a
        user or a launcher waits for, does not linger. Idempotent.
        """
        self.ended = True
        if self._last_values is not None:
            self._last_values.stop()
        for push in self._pushes:
            push.stop()
        if self._server is not None and not hurried:
            with contextlib.suppress(KeyboardInterrupt):  # which is meant for the waiting
                if self._options.linger != "auto":  # for scrapes that show the end
                    self._saw_end.wait(self._options.linger)
                elif (seconds := self._scrapers.seconds_to_wait()) > 0:
                    self._log(WAITS, math.ceil(seconds))
                    self._scrapers.wait()
        deadline = time.monotonic() + CLOSE_SECONDS
        guard = self._errors.boundary("close", limit=None)

        def left() -> float:
            return max(0.05, deadline - time.monotonic())

        if (discovery := self._announcement.discovery) is not None:
            guard(lambda: discovery.close(left(), leave=failed))
        for output in (self._last_values, *self._pushes, self._server):
            if output is not None:
                guard(output.close, left())

    def after_fork_in_child(self) -> None:
        """Leave everything to the parent."""
        for push in self._pushes:
            push.after_fork_in_child()
        if self._announcement.discovery is not None:
            self._announcement.discovery.after_fork_in_child()
        if self._server is not None:
            self._server.after_fork_in_child()
