"""Notification: a problem that begins or has ended, and how JSON, labels, sentences and the body of a webhook show it."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import cast

from torch_grad_exporter.outputs.live.encoding import json_number

FIELDS = (
    "timestamp", "status", "alert", "severity", "summary", "layer", "value", "step", "run", "rank", "first_steps",
)  # fmt: skip
"""The fields of a payload, which a template may name."""

_LABEL = re.compile(r"\{\{ \$labels\.(\w+) \}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """A problem that begins (`status` "firing") or has ended ("resolved").

    Attributes:
        timestamp: Unix time of the beginning or the end.
        started: Unix time of the beginning.
        status: "firing" or "resolved".
        alert: The name of the alert.
        severity: "info", "warning" or "critical".
        summary: What is wrong, as a sentence.
        layer: The layer concerned, or the first of several.
        value: The number that is wrong, None if it is not a single one.
        step: Optimizer steps so far.
        run: The name of the run.
        rank: The rank that has the problem.
        first_steps: What to do first.
        by_layer: Whether each layer has a problem of its own.
        template: The summary of Prometheus' own alert, in its notation.
    """

    timestamp: float
    started: float
    status: str
    alert: str
    severity: str
    summary: str
    layer: str | None
    value: float | None
    step: int
    run: str
    rank: int
    first_steps: str
    by_layer: bool = False
    template: str = ""

    @property
    def firing(self) -> bool:
        """Whether the problem begins."""
        return self.status == "firing"

    def payload(self) -> dict[str, float | str | None]:
        """Return what a webhook sends: each of `FIELDS`, with numbers that JSON has."""
        changed = {"timestamp": rfc3339(self.timestamp), "value": json_number(self.value)}
        return {name: changed[name] if name in changed else getattr(self, name) for name in FIELDS}

    @property
    def labels(self) -> dict[str, str]:
        """The labels by which Alertmanager routes it, the same at the end as at the beginning."""
        labels = {"alertname": self.alert, "severity": self.severity, "run": self.run, "rank": str(self.rank)}
        return labels | ({"layer": self.layer} if self.by_layer and self.layer is not None else {})

    @property
    def headline(self) -> str:
        """The summary of Prometheus' own alert, or `summary` if that needs labels that are unknown here."""
        labels = self.labels
        text = _LABEL.sub(lambda match: labels.get(match[1], match[0]), self.template)
        return self.summary if not text or "{{" in text else text


class SendError(Exception):
    """A notification was not sent.

    Attributes:
        passing: Whether another try may succeed.
        pause: Seconds until that try, if the receiver asks for a pause.
    """

    def __init__(self, message: str, *, passing: bool = False, pause: float | None = None) -> None:
        super().__init__(message)
        self.passing = passing
        self.pause = pause


def rfc3339(timestamp: float) -> str:
    """Return a Unix time as text, in UTC."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


JSON, TEXT = "application/json", "text/plain; charset=utf-8"

Body = Mapping[str, object] | Sequence[object] | str | Callable[[Notification], object]
"""JSON or text with `$name` in its strings, or a callable that returns JSON, text or bytes for a notification."""

_EXPECTED = "expected a mapping or a text with names such as $summary in it, or a callable that takes a Notification"


def checked_body(body: object) -> Body | None:
    """Return a body that can be sent. Raises `TypeError` or `ValueError` with what is wrong."""
    if body is None or callable(body):
        return body
    if not isinstance(body, str | Mapping | list | tuple):
        raise TypeError(f"body={type(body).__name__}: {_EXPECTED}")
    try:
        json.dumps(_filled(body, dict.fromkeys(FIELDS, "")), allow_nan=False)
    except RecursionError:
        raise ValueError(f"body={type(body).__name__}: it contains itself, or too many levels; {_EXPECTED}") from None
    except (TypeError, ValueError) as error:
        raise type(error)(f"body={type(body).__name__}: {error}; {_EXPECTED}") from None
    return cast("Body", body)


def encoded_body(body: Body | None, notification: Notification) -> tuple[bytes, str]:
    """Return the bytes to send and their content type. Raises what a callable raises, and `TypeError` for what is not JSON."""
    content: object = notification.payload()
    if callable(body):
        content = body(notification)
    elif body is not None:
        content = _filled(body, {name: _shown(value) for name, value in notification.payload().items()})
    if isinstance(content, bytes):
        return content, JSON
    if isinstance(content, str):
        return content.encode("utf-8", "replace"), TEXT
    return json.dumps(content, allow_nan=False).encode(), JSON


def _shown(value: float | str | None) -> str:
    """Return a value as it stands in a sentence."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _filled(template: object, values: Mapping[str, str]) -> object:
    """Return a template with the values in its strings. A `$` inside a value stays as it is."""
    if isinstance(template, str):
        try:
            return string.Template(template).substitute(values)
        except KeyError as error:
            raise ValueError(f"${error.args[0]} is not a field; the fields are {', '.join(FIELDS)}") from None
        except ValueError:
            raise ValueError("a $ that begins no name; write $$ for the sign itself") from None
    if isinstance(template, Mapping):
        return {key: _filled(value, values) for key, value in template.items()}
    if isinstance(template, list | tuple):
        return [_filled(value, values) for value in template]
    return template
