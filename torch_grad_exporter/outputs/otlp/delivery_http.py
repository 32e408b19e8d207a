"""Delivery over HTTP: posted with `requests`."""

from __future__ import annotations

import contextlib
import email.utils
import gzip
import netrc  # noqa: F401 - requests imports it in its first request, which no background thread may be the one to do
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from http.cookiejar import DefaultCookiePolicy
from urllib.parse import urlsplit

import requests
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from urllib3.exceptions import HTTPError

from torch_grad_exporter.outputs.otlp.delivery import AGENT, GROWING, Delivery, DeliveryError, check_rejected, mute
from torch_grad_exporter.outputs.otlp.push_settings import Compression, PushSettings

ANSWER_BYTES = 65536
"""Bytes of an answer that are read, at most."""

_COMPRESSED: Mapping[Compression, Callable[[bytes], bytes]] = {
    Compression.NONE: lambda body: body,
    Compression.GZIP: lambda body: gzip.compress(body, 1, mtime=0),
    Compression.DEFLATE: lambda body: zlib.compress(body, 1),
}

_RETRYABLE = frozenset({429, 502, 503, 504})
"""The statuses after which OpenTelemetry's specification has a request sent again."""

_PASSING = frozenset({408, 429})
"""The statuses below 500 that do not concern the request itself."""


class HttpDelivery(Delivery):
    """The way to a receiver over HTTP, for requests that take so many seconds with all their tries."""

    def __init__(self, settings: PushSettings, seconds: float) -> None:
        super().__init__(seconds)
        self._url = str(requests.Request("POST", settings.endpoint).prepare().url)
        self._compressed = _COMPRESSED[settings.compression]
        self._session = requests.Session()
        own = {"Content-Type": "application/x-protobuf", "User-Agent": AGENT}
        if settings.compression is not Compression.NONE:
            own["Content-Encoding"] = settings.compression.value
        self._session.headers.update({**settings.headers, **own})
        # Else a password from `~/.netrc` would replace the chosen header.
        user = requests.utils.get_auth_from_url(settings.endpoint)
        if "authorization" in settings.headers:
            self._session.auth = _as_it_is
        elif any(user):
            self._session.auth = user
        self._session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=()))  # else a receiver could have ever more sent back
        files = settings.certificates
        # Given with each request: the session's own gives way to `REQUESTS_CA_BUNDLE`.
        self._verify = files.authority or True
        self._certificate = (files.client, files.key) if files.client and files.key else files.client
        mute("urllib3")

    def prepared(self, body: bytes) -> bytes:
        """Compressed once for all tries."""
        return self._compressed(body)

    def attempt(self, body: bytes, give_up_at: float) -> None:
        """As of `Delivery`."""
        try:
            with self._session.post(
                self._url,
                body,
                timeout=max(0.001, give_up_at - time.monotonic()),
                allow_redirects=False,
                stream=True,
                verify=self._verify,
                cert=self._certificate,
            ) as response:
                _judge(response, _content(response, give_up_at))
        except (OSError, ValueError, HTTPError) as error:
            query = urlsplit(self._url).query  # which may be a key
            said = f"{type(error).__name__}: {error}"
            unreachable = isinstance(error, requests.ConnectionError) and not isinstance(error, requests.exceptions.SSLError)
            raise DeliveryError(said.replace(f"?{query}", "") if query else said, pause=GROWING if unreachable else None) from None

    def close(self) -> None:
        """As of `Delivery`."""
        super().close()
        self._session.close()


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _content(response: requests.Response, give_up_at: float) -> bytes:
    """What an answer says, of which no more is read than an answer to a request like this one has."""
    content = bytearray()
    for piece in _pieces(response):
        content += piece
        if len(content) >= ANSWER_BYTES:
            break
        if time.monotonic() > give_up_at:
            raise DeliveryError("the answer did not come to its end")
    return bytes(content)


def _pieces(response: requests.Response) -> Iterator[bytes]:
    """The content of an answer as it comes in: reading more at a time would wait for it."""
    if not hasattr(response.raw, "read1"):  # older versions of urllib3
        yield from response.iter_content(1)
        return
    while piece := response.raw.read1(4096, decode_content=True):
        yield piece


def _judge(response: requests.Response, content: bytes) -> None:
    """Raises `DeliveryError` where an answer is no success."""
    status = response.status_code
    if status == 200:
        _check_success(response, content)
    elif 300 <= status < 400:
        raise DeliveryError(f"redirected with status {status}, which is not followed")
    elif not response.ok:
        permanent = 400 <= status < 500 and status not in _PASSING
        pause = retry_after(response.headers.get("Retry-After", "")) if status in _RETRYABLE else None
        raise DeliveryError(_refusal(response, content), permanent=permanent, pause=pause)


def retry_after(text: str) -> float:
    """Seconds until the next try, which a receiver gives as a number or as a date, else `GROWING`."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(text))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    return GROWING


def _refusal(response: requests.Response, content: bytes) -> str:
    """What a failure says of a status: which address answered, and the beginning of its answer."""
    said = " ".join(content[:200].decode("utf-8", "replace").split())
    hint = "; is this the path of OTLP's metrics?" if response.status_code in (404, 405) else ""
    answered = f"HTTP {response.status_code} {response.reason or ''}".strip()
    return f"{answered} from {response.url.partition('?')[0]}{hint}" + (f": {said}" if said.isprintable() and said else "")


def _check_success(response: requests.Response, content: bytes) -> None:
    """Detects points that were rejected, and a server that is no receiver."""
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind == "text/html":
        raise DeliveryError("the answer is a web page, so that this is no OTLP receiver")
    answer = ExportMetricsServiceResponse()
    # The status counts. Older versions of protobuf do not make one error of all that can be wrong in JSON.
    with contextlib.suppress(DecodeError, json_format.Error, ValueError, TypeError, RecursionError):
        if kind == "application/x-protobuf":
            answer.ParseFromString(content)
        elif kind == "application/json":
            json_format.Parse(content, answer, ignore_unknown_fields=True)
    check_rejected(answer)
