"""Pushes of given families, and of a small training, to receivers."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric

from tests.support import otlp_receiver as receivers
from tests.support.models import Perceptron, batch, sgd
from tests.support.otlp_receiver import Answer, GrpcReceiver, HttpReceiver, Receiver, retry_info
from tests.support.scrape import errors
from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.metrics.families import Family
from torch_grad_exporter.outputs.otlp.push import Push
from torch_grad_exporter.outputs.otlp.push_settings import resolve

PROTOCOLS: dict[str, type[HttpReceiver | GrpcReceiver]] = {"http/protobuf": HttpReceiver, "grpc": GrpcReceiver}
every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)

LABELS = {"run": "r1", "rank": "0"}
DELTA, CUMULATIVE = AggregationTemporality.Value("AGGREGATION_TEMPORALITY_DELTA"), 2
PREFERENCE = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"

BUSY = Answer(503, {"Retry-After": "3600"}, code=receivers.grpc.StatusCode.RESOURCE_EXHAUSTED, trailers=retry_info(3600))
"""A refusal that may be tried again much later only, so that an export fails at once."""


@contextmanager
def pushing(
    endpoint: str,
    scrape: Callable[[], list[Family]],
    *,
    protocol: str = "http/protobuf",
    labels: Mapping[str, str] = LABELS,
    headers: Mapping[str, str] | None = None,
    **variables: str,
) -> Iterator[list[BaseException]]:
    """Push what `scrape` returns ten times a second, and yield the failures; `variables` are OpenTelemetry's, without `OTEL_`."""
    with mock.patch.dict(os.environ, {f"OTEL_{name}": text for name, text in variables.items()}):
        settings = resolve(endpoint, protocol, headers, 0.1)
        assert settings is not None
        failures: list[BaseException] = []
        push = Push(scrape, settings, labels, mock.Mock(report_first=lambda _source, failure: failures.append(failure)))
        push.start()
        try:
            yield failures
        finally:
            push.close(PATIENCE)


def exported(
    endpoint: str, exports: Sequence[list[Family]], seen: Callable[[], int] = lambda: 0, **options: str | Mapping[str, str] | None
) -> tuple[list[BaseException], list[int]]:
    """Push these exports one after the other; return their failures, and what `seen` returned before each and after the last."""
    marks: list[int] = []

    def scrape() -> list[Family]:
        marks.append(seen())
        return exports[len(marks) - 1] if len(marks) <= len(exports) else []

    with pushing(endpoint, scrape, **options) as failures:  # type: ignore[arg-type]
        assert eventually(lambda: len(marks) > len(exports))
        return list(failures), marks[: len(exports) + 1]


def sent(*exports: list[Family], **options: str | Mapping[str, str] | None) -> list[list[ExportMetricsServiceRequest]]:
    """Return the requests that a receiver gets of each export."""
    with HttpReceiver() as receiver:
        failures, marks = exported(receiver.endpoint, exports, lambda: len(receiver.received), **options)
        assert failures == []
        return [[item.request for item in receiver.received[a:b]] for a, b in itertools.pairwise(marks)]


def sent_metrics(*families: Family, **options: str | Mapping[str, str] | None) -> list[Metric]:
    """Return all metrics of one export."""
    (requests,) = sent(list(families), **options)
    return [metric for request in requests for metric in receivers.metrics(request)]


class Training:
    """A small model in training, with an exporter that only pushes, ten times a second."""

    def __init__(self, endpoint: str, protocol: str = "http/protobuf", **options: object) -> None:
        torch.manual_seed(8)
        self.model = Perceptron()
        self._optimizer = sgd(self.model)
        chosen = {"port": None, "run": "a run", "rank": 0, "every": 1, "otlp_interval": 0.1, **options}
        self.exporter: Exporter = start_exporter(
            self.model, otlp_endpoint=endpoint, otlp_protocol=protocol, **chosen  # type: ignore[arg-type]
        )  # fmt: skip

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self._optimizer.zero_grad()
            self.model(batch()).square().mean().backward()
            self._optimizer.step()

    def failures(self) -> float:
        """Return how many exports have failed."""
        return errors(self.exporter).get("otlp", 0.0)


@contextmanager
def closing(training: Training) -> Iterator[Training]:
    """Close the exporter of a training."""
    try:
        yield training
    finally:
        training.exporter.close()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings, of whichever logger."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def total(temporality: str, name: str, *of: Receiver) -> float:
    """Return a counter over all its series, like a store has it that these receivers write to."""
    if temporality == "delta":
        return sum(receiver.total(name) for receiver in of)
    known = {key: point for receiver in of for key, point in receiver.points().items() if key[0] == name}
    return sum(point for point in known.values() if isinstance(point, float))
