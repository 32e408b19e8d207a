"""Requests of the exporter itself, kept out of the log and the traces of the program."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from urllib.parse import urlsplit

from opentelemetry.context import attach, create_key, detach, get_value, set_value

from torch_grad_exporter.version import __version__

# The user agent, where no library sets its own.
AGENT = f"torch_grad_exporter/{__version__}"

_SAID = create_key("torch_grad_exporter")


class _OwnLines(logging.Filter):
    """Keeps what libraries log of our requests: a dead receiver would fill the log of the training, and show its keys."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = get_value(_SAID)
        if not isinstance(said, list):
            return True
        if record.levelno >= logging.WARNING:
            said.append(record.getMessage())
        return False


_FILTER = _OwnLines()


def mute(*libraries: str) -> None:
    """Keep what libraries log of our requests out of the log, as far as they are imported."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in libraries:
            filters = logging.getLogger(name).filters
            if _FILTER not in filters:
                filters.insert(0, _FILTER)  # before one that drops repeated lines: a line of ours must not cost the user theirs


def with_path(url: str, path: str) -> str:
    """Return an address with a path at its end, once."""
    parts = urlsplit(url)
    return parts._replace(path=parts.path.rstrip("/").removesuffix(path) + path).geturl()


@contextlib.contextmanager
def unlogged() -> Iterator[list[str]]:
    """Keep this thread out of the user's log and traces meanwhile; yields the warnings of libraries."""
    said: list[str] = []
    token = attach(set_value("suppress_instrumentation", True, set_value(_SAID, said)))
    try:
        yield said
    finally:
        detach(token)
