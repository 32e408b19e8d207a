"""The notifiers that a user chooses: the log, a webhook, an Alertmanager. `Sink` calls their `send`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

from torch_grad_exporter.actions.notify.notification import JSON, Body, Notification, SendError, checked_body, encoded_body, rfc3339
from torch_grad_exporter.errors import contained, logger, say, without_addresses
from torch_grad_exporter.rules.declaration import SEVERITIES

REPEAT_SECONDS = 60.0

# Without a repetition an alert ends after this time, like Prometheus' own.
EXPIRES_SECONDS = 4 * REPEAT_SECONDS

PATH = "/api/v2/alerts"

_LEVELS = {"critical": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}


class Notifier:
    """One way to inform people.

    Attributes:
        kind: Its name in metrics and log lines.
        together: The most notifications that one call of `send` takes.
        repeats: Seconds after which active problems are sent again, None for never.
        min_severity: The lowest severity that is sent.
    """

    kind = ""
    together = 1
    repeats: float | None = None

    def __init__(self, min_severity: str) -> None:
        if min_severity not in SEVERITIES:
            shown = "<hidden>" if "//" in str(min_severity) else repr(min_severity)  # an address in the wrong place
            raise ValueError(f"min_severity={shown}: expected 'info', 'warning' or 'critical'")
        self.min_severity = min_severity

    def takes(self, notification: Notification) -> bool:
        """Return whether a notification is severe enough."""
        return SEVERITIES.index(notification.severity) <= SEVERITIES.index(self.min_severity)

    def send(self, notifications: Sequence[Notification], seconds: float) -> None:
        """Send notifications within `seconds`. Raises `SendError`; any other error is a fault of the notifier."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}(min_severity={self.min_severity!r})"


class Log(Notifier):
    """Writes a line into the log of this process when a problem begins, and one when it ends.

    The logger is `torch_grad_exporter`.

    Args:
        min_severity: The lowest severity that is logged: "info", "warning" or "critical".
    """

    kind = "log"

    def __init__(self, *, min_severity: str = "info") -> None:
        super().__init__(min_severity)

    def send(self, notifications: Sequence[Notification], seconds: float) -> None:  # noqa: ARG002 - a line takes no time
        """Log a line for each."""
        for problem in notifications:
            summary, first_steps = (" ".join(text.split()) for text in (problem.summary, problem.first_steps))
            if problem.firing:
                message = "problem at step %d: %s (%s): %s" + (" First: %s" if first_steps else "%s")
                level = _LEVELS[problem.severity]
                say(logger, level, message, problem.step, problem.alert, problem.severity, summary, first_steps)
            else:
                level = min(_LEVELS[problem.severity], logging.WARNING)  # as visible as the beginning, but not an error
                message = "problem over at step %d: %s (%s): %s"
                say(logger, level, message, problem.step, problem.alert, problem.severity, summary)


class _HttpNotifier(Notifier):
    variable = ""

    def __init__(self, url: object, url_file: object, min_severity: str, headers: object, timeout: object) -> None:
        from torch_grad_exporter.actions.notify.receiver import Receiver  # noqa: PLC0415 - requests is slow to import

        super().__init__(min_severity)
        self._receiver = Receiver(url, url_file, self.variable, headers=headers, timeout=timeout)

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} holds an address and headers, which are secrets: it is not pickled; make it where it is used")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<hidden>, min_severity={self.min_severity!r}, timeout={self._receiver.timeout:g})"


class Webhook(_HttpNotifier):
    """Posts each problem when it begins and when it ends, as JSON or in the form of `body`.

    No error, log line or `repr` shows the address or the headers.

    Args:
        url: The address, else that in `url_file`, else that in `TORCH_GRAD_EXPORTER_WEBHOOK_URL`.
        url_file: A file with the address, which is read for each request.
        min_severity: The lowest severity that is sent: "info", "warning" or "critical".
        headers: Headers of the request.
        timeout: Seconds for one try.
        body: JSON or text with `$summary` and the like in its strings, or a callable that returns either
            for a `Notification`.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument is wrong.
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
        body: Body | None = None,
    ) -> None:
        super().__init__(url, url_file, min_severity, headers, timeout)
        self._body = checked_body(body)

    def send(self, notifications: Sequence[Notification], seconds: float) -> None:
        """Post the only notification."""
        try:
            content, kind = contained(encoded_body, self._body, notifications[0])
        except Exception as error:  # noqa: BLE001 - the user's own code
            failed = f"body= has failed: {type(error).__name__}: {error}"
        else:
            self._receiver.post(content, kind, seconds)
            return
        raise SendError(without_addresses(failed))  # outside of `except`, so that the user's error is not its context


class Alertmanager(_HttpNotifier):
    """Posts problems to an Alertmanager like Prometheus: with the same labels, and each minute while they last.

    Args:
        url: The address of the Alertmanager, without `/api/v2/alerts`, else that in `url_file`, else that in
            `TORCH_GRAD_EXPORTER_ALERTMANAGER_URL`.
        url_file: See `Webhook`.
        min_severity: The lowest severity that is sent. By default all are, since Alertmanager routes them.
        headers: See `Webhook`.
        timeout: See `Webhook`.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: An argument is wrong.
    """

    kind = "alertmanager"
    together = 64
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

    def send(self, notifications: Sequence[Notification], seconds: float) -> None:
        """Post them as one list of alerts."""
        alerts = [
            {
                "labels": problem.labels,
                "annotations": {
                    "summary": problem.headline,
                    "description": " ".join(dict.fromkeys(text for text in (problem.summary, problem.first_steps) if text)),
                },
                "startsAt": rfc3339(problem.started),
                # If the process is killed, the alert ends some time after its last repetition.
                "endsAt": rfc3339(problem.timestamp + EXPIRES_SECONDS if problem.firing else problem.timestamp),
            }
            for problem in notifications
        ]
        self._receiver.post(json.dumps(alerts).encode(), JSON, seconds, PATH)


def chosen(alerts: object) -> tuple[Notifier, ...]:
    """Return the notifiers of `alerts=`. Raises `TypeError` with the place in the list and the fix."""
    expected = "expected a list of notifiers, such as [Log(), Webhook(url)] from torch_grad_exporter.actions"
    if alerts is None:
        return ()
    several = [alerts] if isinstance(alerts, Notifier) else alerts
    if not isinstance(several, list | tuple):
        raise TypeError(f"alerts={type(alerts).__name__}: {expected}")
    for place, item in enumerate(several):
        if not isinstance(item, Notifier):
            shown = f"class {item.__name__}, which must be called" if isinstance(item, type) else type(item).__name__
            raise TypeError(f"alerts[{place}]={shown}: {expected}")
    return tuple(several)
