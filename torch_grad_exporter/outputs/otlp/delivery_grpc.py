"""Delivery over gRPC: finished bytes through a channel of `grpc`, which is optional."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from torch_grad_exporter.outputs.otlp.delivery import AGENT, GROWING, Delivery, DeliveryError, check_rejected
from torch_grad_exporter.outputs.otlp.push_settings import Compression, PushSettings

METHOD = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
"""What is called."""

_RETRYABLE_CODES = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"})
"""The codes of gRPC after which OpenTelemetry's specification has a request sent again."""

_RECONNECT = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 2000))
"""A receiver that comes back is found by the next try."""


class GrpcDelivery(Delivery):
    """The way to a receiver over gRPC, for requests that take so many seconds with all their tries.

    Raises `OSError` where a certificate cannot be read.
    """

    def __init__(self, settings: PushSettings, seconds: float) -> None:
        super().__init__(seconds)
        codecs = {Compression.GZIP: grpc.Compression.Gzip, Compression.DEFLATE: grpc.Compression.Deflate}
        where = urlsplit(settings.endpoint).netloc if "://" in settings.endpoint else settings.endpoint
        options = ("grpc.primary_user_agent", AGENT), *_RECONNECT
        compression = codecs.get(settings.compression, grpc.Compression.NoCompression)
        if settings.insecure:
            self._channel = grpc.insecure_channel(where, options, compression)
        else:
            self._channel = grpc.secure_channel(where, _credentials(settings), options, compression)
        # Without a serializer the bytes are sent as they are.
        self._call = self._channel.unary_unary(METHOD, None, ExportMetricsServiceResponse.FromString)
        self._metadata = tuple(settings.headers.items())

    def attempt(self, body: bytes, give_up_at: float) -> None:
        """As of `Delivery`."""
        try:
            answer = self._call(body, max(0.001, give_up_at - time.monotonic()), self._metadata)
        except grpc.RpcError as error:
            raise _refused(error) from None
        check_rejected(answer)

    def close(self) -> None:
        """As of `Delivery`."""
        super().close()
        self._channel.close()


def _credentials(settings: PushSettings) -> grpc.ChannelCredentials:
    files = settings.certificates
    found = [Path(path).read_bytes() if path else None for path in (files.authority, files.key, files.client)]
    return grpc.ssl_channel_credentials(*found)


def _refused(error: Any) -> DeliveryError:  # noqa: ANN401 - an `RpcError`, whose type has not what it has
    """What a call failed of. One to a receiver that is out of resources is repeated if that says when."""
    code = error.code().name
    pause = _told_pause(dict(error.trailing_metadata() or ()))
    retryable = pause is not None if code == "RESOURCE_EXHAUSTED" else code in _RETRYABLE_CODES
    usual = GROWING if pause is None else pause
    said = f"gRPC {code}: {(error.details() or '')[:200]!r}"
    return DeliveryError(said, permanent=not retryable, pause=usual if retryable else None)


def _told_pause(trailers: Mapping[str, bytes]) -> float | None:
    """The seconds until the next try in the trailers of a call, in either of the two places that gRPC knows."""
    info, told = RetryInfo(), "google.rpc.retryinfo-bin" in trailers
    with contextlib.suppress(DecodeError, TypeError):
        if told:
            info.ParseFromString(trailers["google.rpc.retryinfo-bin"])
        else:
            status = Status.FromString(trailers.get("grpc-status-details-bin", b""))
            told = any(detail.Unpack(info) for detail in status.details)
    return info.retry_delay.seconds + info.retry_delay.nanos / 1e9 if told else None
