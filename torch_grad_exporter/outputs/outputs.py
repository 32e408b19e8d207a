"""Outputs: how values leave the process: the server, the entries that say where it is, and what is left at the end."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_grad_exporter.config.settings import Settings
from torch_grad_exporter.distributed import identity as distributed
from torch_grad_exporter.distributed.discovery import Discovery, RankList, Target, TargetFile, address
from torch_grad_exporter.distributed.store import JobStore
from torch_grad_exporter.errors import ErrorLog, say
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.http.listener import candidate_ports
from torch_grad_exporter.outputs.http.message import Request, Response
from torch_grad_exporter.outputs.http.server import MetricsServer
from torch_grad_exporter.outputs.http.web_config import WebConfigFile
from torch_grad_exporter.outputs.otlp.push_settings import PushSettings
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer
from torch_grad_exporter.outputs.prometheus.textfile import TextFile

if TYPE_CHECKING:
    from torch_grad_exporter.outputs.otlp.push import Push

logger = logging.getLogger("torch_grad_exporter")

NAME_SECONDS = 1.0
"""That the start waits for the name service, at most."""

CLOSE_SECONDS = 1.4
"""That the end of a program waits for what is under way, at most; `linger` comes on top."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Whose values they are. `labels`: those of every series."""

    run: str
    number: int
    identity: distributed.Identity
    labels: Mapping[str, str]


class Outputs:
    """Serves what `scrape` gives, says where, and pushes it.

    `health`: for `/healthz`. `store`: the job's, for the list of ranks. `push`: what to push and where, `None` for nothing.
    `page`: the live page.
    """

    def __init__(
        self,
        scrape: Callable[[], list[Family]],
        rank: Rank,
        settings: Settings,
        errors: ErrorLog,
        *,
        health: Callable[[], Mapping[str, object]],
        store: JobStore,
        web_config: WebConfigFile | None = None,
        push: PushSettings | None = None,
        page: Callable[[Request], Response | None] = lambda _request: None,
    ) -> None:
        self._scrape = scrape
        self._rank = rank
        self._settings = settings
        self._errors = errors
        self._store = store
        self._renderer = Renderer(rank.labels)
        self._over = False
        self._seen_over = threading.Event()
        self._to_write, self._written = threading.Event(), threading.Event()
        if settings.textfile_dir:
            writer = threading.Thread(target=self._write_text_file, name="torch-grad-exporter-textfile", daemon=True)
            errors.guard("textfile", writer.start)
        self._push: Push | None = None
        if push is not None:
            errors.guard("otlp", lambda: self._start_push(push))
        self._discovery: Discovery | None = None
        self._server = self._serve(health, page, web_config)
        if self._server is not None:
            self._discovery = self._announced(self._server)
            errors.guard("discovery", self._discovery.start)

    def _serve(
        self,
        health: Callable[[], Mapping[str, object]],
        page: Callable[[Request], Response | None],
        web_config: WebConfigFile | None,
    ) -> MetricsServer | None:
        port, identity = self._settings.port, self._rank.identity
        if port is None:
            return None
        try:
            server = MetricsServer(
                self._served,
                self._renderer,
                addr=self._settings.addr,
                ports=candidate_ports(port, identity.local_rank, identity.local_world_size),
                on_error=self._not_served,
                health=health,
                targets=self.targets,
                page=page,
                web_config=web_config,
            )
        except (OSError, RuntimeError) as error:  # no free port, or no more threads to be had
            where = self._settings.addr or "all interfaces"
            message = "no metrics are served, training goes on: cannot serve on %s, port %d and on: %s"
            say(logger, logging.WARNING, message, where, port, error)
            return None
        if server.open_to_all and identity.local_rank == 0:
            _warn_of_open_port(server.port, self._settings.web_config_file)
        return server

    def _start_push(self, settings: PushSettings) -> None:
        from torch_grad_exporter.outputs.otlp.push import Push  # noqa: PLC0415 - OpenTelemetry's exporters take their time to be imported

        on_error = functools.partial(self._errors.tell_once, "otlp")
        try:
            push = Push(self._scrape, settings, self._rank.labels, on_error=on_error)
            push.start()
        except Exception as error:  # noqa: BLE001 - what a variable says may be wrong in ways that only its reader knows
            self._errors.tell("otlp", RuntimeError(f"no metrics are pushed: {error}"))
        else:
            self._push = push

    def _announced(self, server: MetricsServer) -> Discovery:
        settings, rank = self._settings, self._rank
        target = Target(
            address=self._address(server.port),
            scheme=server.scheme,
            run=rank.run,
            rank=rank.number,
            local_rank=rank.identity.local_rank,
            host=distributed.hostname(),
            labels=settings.labels,
        )
        several = rank.identity.world_size > 1
        return Discovery(
            target,
            file=TargetFile(settings.sd_dir, target) if settings.sd_dir else None,
            ranks=RankList(self._store, target, rank.identity.world_size) if several else None,
            on_error=functools.partial(self._errors.count, "discovery"),
        )

    def _address(self, port: int) -> str:
        """Where the server is reached. The name service is asked in another thread: it may hang, and the training waits here."""
        found: list[str] = []

        def ask() -> None:
            found.append(address(self._settings.addr, port, self._settings.advertise))

        guarded = functools.partial(self._errors.guard, "discovery", ask)
        thread = threading.Thread(target=guarded, name="torch-grad-exporter-address", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads to be had
            thread.start()
            thread.join(NAME_SECONDS)
        return found[0] if found else f"{distributed.hostname()}:{port}"

    def _served(self) -> list[Family]:
        over = self._over  # before the values are taken
        found = self._scrape()
        if over:
            self._seen_over.set()
        return found

    def _not_served(self, source: str, error: BaseException) -> None:
        # What is wrong with a file is for the user to read, each time.
        (self._errors.tell if source == "web_config" else self._errors.count)(source, error)

    def targets(self) -> bytes:
        """What http_sd reads: the ranks known here, this one first."""
        return b"[]" if self._discovery is None else self._discovery.body()

    @property
    def port(self) -> int | None:
        """The port in use, `None` if nothing is served."""
        return None if self._server is None else self._server.port

    @property
    def url(self) -> str | None:
        """The address of the metrics as seen from this host, `None` if nothing is served."""
        addr = self._settings.addr
        host = "localhost" if addr in ("", "0.0.0.0", "::") else f"[{addr}]" if ":" in addr else addr  # noqa: S104
        return None if self._server is None else f"{self._server.scheme}://{host}:{self._server.port}/metrics"

    def close(self, *, failed: bool, hurried: bool) -> None:
        """Tells the end of the run: leaves the text file, pushes, lingers, takes this rank's entries back, and frees the port.

        The entries of a run that has `failed` stay, as those of one that was killed do: then `up` is 0. `hurried`: somebody waits
        for this end, so it does not linger. Idempotent.
        """
        self._over = True
        self._to_write.set()
        if self._push is not None:
            self._push.end()
        if not hurried:
            self._linger()
        give_up_at = time.monotonic() + CLOSE_SECONDS

        def left() -> float:
            return max(0.05, give_up_at - time.monotonic())

        discovery, server, push = self._discovery, self._server, self._push
        for action in (
            (lambda: None) if discovery is None else lambda: discovery.close(left(), leave=failed),
            lambda: self._wait_for_text_file(left()),
            (lambda: None) if push is None else lambda: push.close(left()),
            (lambda: None) if server is None else lambda: server.close(left()),
        ):
            self._errors.guard("close", action)

    def _linger(self) -> None:
        """Goes on serving until one scrape has seen the end, for as long as the user allows."""
        if self._server is not None and self._settings.linger > 0:
            self._seen_over.wait(self._settings.linger)

    def _wait_for_text_file(self, seconds: float) -> None:
        """The last values are being written for node_exporter."""
        if self._settings.textfile_dir:
            self._written.wait(seconds)

    def _write_text_file(self) -> None:
        """The body of a thread, since a file system may hang; one that waits from the start, since no thread begins at the end."""
        file = TextFile(self._settings.textfile_dir, self._rank.run, self._rank.number)
        self._errors.guard("textfile", file.remove)
        self._to_write.wait()
        self._errors.guard("textfile", lambda: file.write(self._renderer.render(self._scrape(), Format.TEXT)))
        self._written.set()

    def after_fork_in_child(self) -> None:
        """All of it is the parent's."""
        if self._push is not None:
            self._push.after_fork_in_child()
        if self._discovery is not None:
            self._discovery.after_fork_in_child()
        if self._server is not None:
            self._server.after_fork_in_child()


_warned = False


def _warn_of_open_port(port: int, web_config_file: str) -> None:
    """Once in a process: a notebook starts the exporter again and again."""
    global _warned  # noqa: PLW0603 - the process has one log
    if not _warned:
        _warned = True
        file = f", for {web_config_file} asks nobody who they are" if web_config_file else " or web_config_file="
        message = "whoever can reach port %d of this host can read the metrics; narrow that with addr='127.0.0.1'%s"
        say(logger, logging.WARNING, message, port, file)
