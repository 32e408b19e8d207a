"""The notifiers that a user chooses. They hold what was chosen, checked; `Sink` sends what they make."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch_grad_exporter.actions.notify import body as bodies
from torch_grad_exporter.actions.notify.address import HIDDEN, Address, shown
from torch_grad_exporter.actions.notify.notification import SEVERITIES, Notification, rfc3339
from torch_grad_exporter.actions.notify.sending import Send, SendError
from torch_grad_exporter.actions.users_code import contained, without_addresses
from torch_grad_exporter.errors import caught, say

if TYPE_CHECKING:
    from torch_grad_exporter.actions.notify.post import Poster

logger = logging.getLogger("torch_grad_exporter")

LONGEST_TIMEOUT = 60.0
"""Seconds that a receiver may be given."""

REPEAT_SECONDS = 60.0
"""Between two posts of the same alert to an Alertmanager."""

EXPIRES_SECONDS = 4 * REPEAT_SECONDS
"""After which an alert that is no longer repeated ends, as with Prometheus."""

TOGETHER = 64
"""Alerts in one post, at most."""

PATH = "/api/v2/alerts"


class Notifier:
    """One way to tell people. `kind`: its name in metrics and log lines. `together`: notifications that one sending takes."""

    kind = ""
    together = 1
    repeats: float | None = None
    """Seconds after which it tells again what is still wrong."""

    def __init__(self, min_severity: str) -> None:
        if not isinstance(min_severity, str):
            raise TypeError(f"min_severity={shown(min_severity)}: {_SEVERITY}")
        if min_severity not in SEVERITIES:
            raise ValueError(f"min_severity={shown(min_severity)}: {_SEVERITY}")
        self.min_severity = min_severity

    def takes(self, notification: Notification) -> bool:
        """Whether it is severe enough."""
        return SEVERITIES.index(notification.severity) >= SEVERITIES.index(self.min_severity)

    def sender(self) -> Send:
        """What sends; made once for each exporter."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}(min_severity={self.min_severity!r})"


_SEVERITY = f"expected {', '.join(map(repr, SEVERITIES[:-1]))} or {SEVERITIES[-1]!r}"


class Log(Notifier):
    """Writes a line when a problem begins, and one when it ends, into the log of this process.

    The logger is `torch_grad_exporter`. `min_severity`: as of `Webhook`.
    """

    kind = "log"

    def __init__(self, *, min_severity: str = "info") -> None:
        super().__init__(min_severity)

    def sender(self) -> Send:
        """As of `Notifier`."""
        return _log


_LEVELS = {"critical": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}


def _log(notifications: Sequence[Notification], _left: Callable[[], float]) -> None:
    for one in notifications:
        sentence, steps = (" ".join(text.split()) for text in (one.summary, one.first_steps))
        if one.firing:
            message = "problem at step %d: %s (%s): %s" + (" First: %s" if steps else "%s")
            say(logger, _LEVELS[one.severity], message, one.step, one.alert, one.severity, sentence, steps)
        else:
            level = min(_LEVELS[one.severity], logging.WARNING)  # as visible as the beginning, and no error
            say(logger, level, "problem over at step %d: %s (%s): %s", one.step, one.alert, one.severity, sentence)


class _Http(Notifier):
    """What is sent over HTTP. Of its address, which is a secret, and its headers nothing is ever shown."""

    variable = ""

    def __init__(self, url: object, url_file: object, min_severity: str, headers: object, timeout: object) -> None:
        super().__init__(min_severity)
        self._timeout = _timeout(timeout)
        self._headers = _headers(headers)
        self._address = Address(url, url_file, self.variable, os.environ)

    def _poster(self, path: str = "") -> Poster:
        from torch_grad_exporter.actions.notify.post import Poster  # noqa: PLC0415 - requests is slow to import

        return Poster(self._address, self._headers, self._timeout, path)

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} holds an address and headers, which are secrets: it is not pickled; make it where it is used")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({HIDDEN}, min_severity={self.min_severity!r}, timeout={self._timeout:g})"


class Webhook(_Http):
    """Posts each problem when it begins, and again when it ends, as JSON or as `body` has it.

    `url`: where to, else the address in the file `url_file`, else that in `TORCH_GRAD_EXPORTER_WEBHOOK_URL`. `min_severity`: the
    least that is told, of "info", "warning" and "critical". `headers`: of the request. `timeout`: seconds for one try. `body`:
    JSON or text with `$summary` and the like in its strings, or a callable that makes either of a `Notification`.

    Raises `TypeError` or `ValueError` on a wrong argument. Nothing ever shows the address or the headers.
    """

    kind = "webhook"
    variable = "TORCH_GRAD_EXPORTER_WEBHOOK_URL"

    def __init__(
        self,
        url: str | None = None,
        *,
        url_file: str | os.PathLike[str] | None = None,
        min_severity: str = "warning",
        headers: Mapping[str, str] | None = None,
        timeout: float = 5.0,
        body: bodies.Body | None = None,
    ) -> None:
        super().__init__(url, url_file, min_severity, headers, timeout)
        self._body = bodies.checked(body)

    def sender(self) -> Send:
        """As of `Notifier`."""
        poster = self._poster()

        def send(notifications: Sequence[Notification], left: Callable[[], float]) -> None:
            made: list[tuple[bytes, str]] = []
            make = functools.partial(bodies.encoded, self._body)
            error = caught(lambda: made.append(contained(make, notifications[0])))
            if error is not None:
                raise SendError(without_addresses(f"body= has failed: {type(error).__name__}: {error}"))
            poster.post(*made[0], left)

        return send


class Alertmanager(_Http):
    """Posts the problems to an Alertmanager as Prometheus posts its alerts: with the same labels, and each minute while they last.

    Arguments as of `Webhook`; `url` is that of the Alertmanager, without `/api/v2/alerts`, else in
    `TORCH_GRAD_EXPORTER_ALERTMANAGER_URL`. All severities are sent, since Alertmanager routes them.
    """

    kind = "alertmanager"
    together = TOGETHER
    repeats = REPEAT_SECONDS
    variable = "TORCH_GRAD_EXPORTER_ALERTMANAGER_URL"

    def __init__(
        self,
        url: str | None = None,
        *,
        url_file: str | os.PathLike[str] | None = None,
        min_severity: str = "info",
        headers: Mapping[str, str] | None = None,
        timeout: float = 5.0,
    ) -> None:
        super().__init__(url, url_file, min_severity, headers, timeout)

    def sender(self) -> Send:
        """As of `Notifier`."""
        poster = self._poster(PATH)

        def send(notifications: Sequence[Notification], left: Callable[[], float]) -> None:
            poster.post(json.dumps([_alert(one) for one in notifications]).encode(), bodies.JSON, left)

        return send


def _alert(one: Notification) -> dict[str, Any]:
    """As Alertmanager has it. What lasts ends by itself some time after the last post of it, as where the process was killed."""
    description = " ".join(dict.fromkeys(text for text in (one.summary, one.first_steps) if text))
    return {
        "labels": one.labels,
        "annotations": {"summary": one.headline, "description": description},
        "startsAt": rfc3339(one.started),
        "endsAt": rfc3339(one.timestamp + EXPIRES_SECONDS if one.firing else one.timestamp),
    }


def _headers(headers: object) -> Mapping[str, str]:
    """Headers that HTTP can carry. An error names the header, not its value."""
    expected = "expected a mapping of names to texts, such as {'Authorization': 'Bearer ...'}"
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers={type(headers).__name__}: {expected}")
    for name, value in headers.items():
        if not isinstance(name, str) or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise (ValueError if isinstance(name, str) else TypeError)(f"headers: {HIDDEN} is no name of a header; {expected}")
        if not isinstance(value, str):
            raise TypeError(f"headers[{name!r}]={type(value).__name__}: {expected}")
        if not re.fullmatch(r"(?:[!-~\x80-\xff](?:[ \t!-~\x80-\xff]*[!-~\x80-\xff])?)?", value):
            raise ValueError(
                f"headers[{name!r}]={HIDDEN}: its text has a line break, a space at its end or a sign that no header takes"
            )
    return dict(cast("Mapping[str, str]", headers))


def _timeout(timeout: object) -> float:
    expected = f"expected a number of seconds above 0 and up to {LONGEST_TIMEOUT:g}"
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout={shown(timeout)}: {expected}")
    if not 0 < timeout <= LONGEST_TIMEOUT:
        raise ValueError(f"timeout={shown(timeout)}: {expected}")
    return float(timeout)


def chosen(alerts: object) -> tuple[Notifier, ...]:
    """What `alerts=` holds. Raises what names it and the fix."""
    expected = "expected a list of notifiers, such as [Log(), Webhook(url)] from torch_grad_exporter.actions"
    if alerts is None:
        return ()
    several = [alerts] if isinstance(alerts, Notifier) else alerts
    if not isinstance(several, list | tuple):
        raise TypeError(f"alerts={type(alerts).__name__}: {expected}")
    for place, one in enumerate(several):
        if not isinstance(one, Notifier):
            made = f"class {one.__name__}, which is to be called" if isinstance(one, type) else type(one).__name__
            raise TypeError(f"alerts[{place}]={made}: {expected}")
    return tuple(several)
