"""Outputs: how values leave the process: the server, the entries that say where it is, and the files and pushes at the end."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_grad_exporter.errors import ErrorLog, Guard, say
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.announcement import Announcement, Rank
from torch_grad_exporter.outputs.http.listener import candidate_ports
from torch_grad_exporter.outputs.http.message import Request, Response
from torch_grad_exporter.outputs.http.server import MetricsServer
from torch_grad_exporter.outputs.http.web_config import WebConfigFile
from torch_grad_exporter.outputs.otlp.push_settings import PushSettings
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer
from torch_grad_exporter.outputs.prometheus.textfile import LastValues, text_file

if TYPE_CHECKING:
    from torch_grad_exporter.outputs.otlp.push import Push

logger = logging.getLogger("torch_grad_exporter")

CLOSE_SECONDS = 1.4
"""How long the end of a program waits for what is under way, at most, in addition to `linger`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What the user has chosen, as `Settings` has it. `port`: `None` serves nothing."""

    port: int | None
    addr: str = ""
    textfile_dir: str = ""
    web_config_file: str = ""
    linger: float = 0.0


class Outputs:
    """Serves what `scrape` gives, announces where, and pushes it.

    `health`: for `/healthz`. `announcement`: publishes where the server is, from its start until `close`. `push`: what to
    push and where, `None` for nothing. `page`: the live page.
    """

    def __init__(
        self,
        scrape: Callable[[], list[Family]],
        rank: Rank,
        options: OutputOptions,
        errors: ErrorLog,
        *,
        health: Callable[[], Mapping[str, object]],
        announcement: Announcement,
        web_config: WebConfigFile | None = None,
        push: PushSettings | None = None,
        page: Callable[[Request], Response | None] = lambda _request: None,
    ) -> None:
        self._scrape = scrape
        self._rank = rank
        self._options = options
        self._errors = errors
        self._renderer = Renderer(rank.labels)
        self._over = False
        self._seen_over = threading.Event()
        self._announcement = announcement
        self._last_values: LastValues | None = None
        self._push: Push | None = None
        self._server: MetricsServer | None = None
        try:
            self._start(health, page, web_config, push)
        except BaseException:  # such as Ctrl-C while the name service is asked
            self.close(failed=False, hurried=True)
            raise

    def _start(
        self,
        health: Callable[[], Mapping[str, object]],
        page: Callable[[Request], Response | None],
        web_config: WebConfigFile | None,
        push: PushSettings | None,
    ) -> None:
        if self._options.textfile_dir:
            self._last_values = self._started_last_values()
        if push is not None:
            self._push = Guard(self._not_pushed).result(self._started_push, push)
        self._server = server = self._serve(health, page, web_config)
        if server is None:
            return
        if server.open_to_all and self._rank.identity.local_rank == 0:
            _warn_of_open_port(server.port, self._options.web_config_file)
        self._errors.boundary("discovery", limit=None)(self._announcement.start, server.port, server.scheme)

    def _started_last_values(self) -> LastValues:
        path = text_file(self._options.textfile_dir, self._rank.run, self._rank.number)
        last_values = LastValues(path, self._rendered, self._errors.boundary("textfile", limit=None))
        self._errors.boundary("textfile", limit=None)(last_values.start)
        return last_values

    def _rendered(self) -> bytes:
        return self._renderer.render(self._scrape(), Format.TEXT)

    def _started_push(self, settings: PushSettings) -> Push:
        from torch_grad_exporter.outputs.otlp.push import Push  # noqa: PLC0415 - OpenTelemetry's exporters are slow to import

        push = Push(self._scrape, settings, self._rank.labels, on_error=functools.partial(self._errors.tell_once, "otlp"))
        push.start()
        return push

    def _not_pushed(self, error: Exception) -> None:
        # A variable may be wrong in ways that only the code that reads it can tell.
        self._errors.tell("otlp", RuntimeError(f"no metrics are pushed: {error}"))

    def _serve(
        self,
        health: Callable[[], Mapping[str, object]],
        page: Callable[[Request], Response | None],
        web_config: WebConfigFile | None,
    ) -> MetricsServer | None:
        addr, port, identity = self._options.addr, self._options.port, self._rank.identity
        if port is None:
            return None
        try:
            server = MetricsServer(
                self._served,
                self._renderer,
                addr=addr,
                ports=candidate_ports(port, identity.local_rank, identity.local_world_size),
                on_error=self._not_served,
                health=health,
                targets=self._announcement.body,
                page=page,
                web_config=web_config,
            )
        except (OSError, RuntimeError) as error:  # no free port, or no more threads to be had
            message = "no metrics are served, training goes on: cannot serve on %s, port %d and on: %s"
            say(logger, logging.WARNING, message, addr or "all interfaces", port, error)
            return None
        return server

    def _served(self) -> list[Family]:
        over = self._over  # before the values are taken
        found = self._scrape()
        if over:
            self._seen_over.set()
        return found

    def _not_served(self, source: str, error: BaseException) -> None:
        # What is wrong with a file is for the user to read, each time.
        (self._errors.tell if source == "web_config" else self._errors.count)(source, error)

    @property
    def port(self) -> int | None:
        """The port in use, `None` if nothing is served."""
        return None if self._server is None else self._server.port

    @property
    def url(self) -> str | None:
        """The address of the metrics as seen from this host, `None` if nothing is served."""
        addr = self._options.addr
        host = "localhost" if addr in ("", "0.0.0.0", "::") else f"[{addr}]" if ":" in addr else addr  # noqa: S104
        return None if self._server is None else f"{self._server.scheme}://{host}:{self._server.port}/metrics"

    def close(self, *, failed: bool, hurried: bool) -> None:
        """Publishes the end of the run: writes the text file, pushes, lingers, removes this rank's entries, and frees the port.

        The entries of a run that has `failed` stay, as those of one that was killed do: then `up` is 0. `hurried`: a user or a
        launcher waits for this end, so it does not linger. Idempotent.
        """
        self._over = True
        if self._last_values is not None:
            self._last_values.end()
        if self._push is not None:
            self._push.end()
        if not hurried:
            self._linger()
        give_up_at = time.monotonic() + CLOSE_SECONDS
        guard = self._errors.boundary("close", limit=None)

        def left() -> float:
            return max(0.05, give_up_at - time.monotonic())

        guard(lambda: self._announcement.close(left(), leave=failed))
        for output in (self._last_values, self._push, self._server):
            if output is not None:
                guard(output.close, left())

    def _linger(self) -> None:
        """Goes on serving until one scrape has seen the end, for as long as the user allows."""
        if self._server is not None and self._options.linger > 0:
            self._seen_over.wait(self._options.linger)

    def after_fork_in_child(self) -> None:
        """All of it is the parent's."""
        if self._push is not None:
            self._push.after_fork_in_child()
        self._announcement.after_fork_in_child()
        if self._server is not None:
            self._server.after_fork_in_child()


_warned = False


def _warn_of_open_port(port: int, web_config_file: str) -> None:
    """Once in a process: a notebook starts the exporter again and again."""
    global _warned  # noqa: PLW0603 - the process has one log
    if not _warned:
        _warned = True
        file = f", since {web_config_file} requires no authentication" if web_config_file else " or web_config_file="
        message = "all who can reach port %d of this host can read the metrics; restrict that with addr='127.0.0.1'%s"
        say(logger, logging.WARNING, message, port, file)
