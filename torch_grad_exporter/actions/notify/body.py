"""The body of a webhook's request: the payload, a template or a callable."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch_grad_exporter.actions.notify.notification import FIELDS, Notification

JSON, TEXT = "application/json", "text/plain; charset=utf-8"

Body = Mapping[str, object] | Sequence[object] | str | Callable[[Notification], object]
"""JSON or text with `$name` in its strings, or a callable that returns JSON, text or bytes for a notification."""

_EXPECTED = "expected a mapping or a text with names such as $summary in it, or a callable that takes a Notification"


def checked(body: object) -> Body | None:
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


def encoded(body: Body | None, notification: Notification) -> tuple[bytes, str]:
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
