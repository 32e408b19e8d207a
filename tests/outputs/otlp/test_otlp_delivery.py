"""Delivery to receivers over HTTP and gRPC: what arrives, refusals, faulty receivers, TLS, and the user's own OpenTelemetry."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData

from tests.outputs.otlp.support import BUSY, LABELS, PROTOCOLS, every_protocol, exported
from tests.support import otlp_receiver as liars
from tests.support.certificates import authority
from tests.support.otlp_receiver import Answer, GrpcReceiver, HttpReceiver, Liar, expected, refused
from torch_grad_exporter.collectors.gradients import GRAD_CAPTURES, GRAD_NORM, GRAD_NORM_DISTRIBUTION
from torch_grad_exporter.collectors.training import TRAIN_LOSS
from torch_grad_exporter.metrics.families import Family, LabelRows


def families(layers: int = 3) -> list[Family]:
    """Return a gauge, a counter and a histogram of some layers, a row of each absent."""
    random = np.random.default_rng(8)
    rows = LabelRows(tuple((f"model.blocks.{number}.attention.weight",) for number in range(layers)))
    present = np.arange(layers) != 1
    counts = random.integers(0, 1 << 40, (layers, len(GRAD_NORM_DISTRIBUTION.buckets) + 1)).astype(float)
    return [
        Family(GRAD_NORM, random.random(layers), rows, present=present),
        Family(GRAD_CAPTURES, random.integers(0, 1 << 50, layers).astype(float), rows, present=present),
        Family(GRAD_NORM_DISTRIBUTION, counts, rows, present=present, sums=random.random(layers)),
    ]


def failure(endpoint: str, protocol: str = "http/protobuf", **options: str) -> str:
    """Return the failure of one export, empty if there is none."""
    failures, _ = exported(endpoint, [families()], protocol=protocol, **options)
    return "".join(map(str, failures))


# What arrives


@pytest.mark.slow
@every_protocol
def test_every_point_arrives(protocol: str) -> None:
    """Each point arrives as it was, compressed and with the headers that are given, also of a second export."""
    both = [families(40)] * 2
    with PROTOCOLS[protocol]() as receiver:
        failures, _ = exported(
            receiver.endpoint, both, protocol=protocol, headers={"x-own": "b"}, EXPORTER_OTLP_COMPRESSION="gzip",
            EXPORTER_OTLP_HEADERS="authorization=Bearer%20secret,x-own=c",
        )  # fmt: skip
    assert failures == []
    assert len(receiver.received) == 2
    assert receiver.points() == expected(families(40), LABELS)
    for request in receiver.received:
        assert request.headers["x-own"] == "b"
        assert "authorization" not in request.headers
        if protocol != "grpc":
            assert request.headers.get("content-encoding") == "gzip"


PASSWORDS: dict[str, tuple[str, str, str]] = {
    "netrc": ("", "", "Basic bmV0cmM6YQ=="),
    "endpoint": ("url:b@", "", "Basic dXJsOmI="),
    "header": ("url:b@", "authorization=Bearer%20c", "Bearer c"),
}


@pytest.mark.parametrize("source", PASSWORDS)
def test_the_password_that_is_sent(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header wins over a user in the endpoint, and both over `~/.netrc`."""
    user, header, expected_header = PASSWORDS[source]
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login netrc password a\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with HttpReceiver() as receiver:
        assert failure(receiver.endpoint.replace("//", f"//{user}"), EXPORTER_OTLP_HEADERS=header) == ""
    (request,) = receiver.received
    assert request.headers["authorization"] == expected_header


# Answers

ANSWERS: dict[str, tuple[str, Answer, str]] = {
    "401": ("http/protobuf", Answer(401), "401"),
    "web page": ("http/protobuf", Answer(body=b"<html>log in</html>", kind="text/html; charset=utf-8"), "web page"),
    "redirect": ("http/protobuf", Answer(307, {"Location": "http://localhost:1/"}), "307"),
    "partial": ("http/protobuf", Answer(rejected=3), "3 points were rejected"),
    "RESOURCE_EXHAUSTED": ("grpc", BUSY, "RESOURCE_EXHAUSTED"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_refusals_are_named(name: str) -> None:
    """A refusal is reported with its number or code in one line, and is not tried again at once; the next export may succeed."""
    protocol, answer, word = ANSWERS[name]
    with PROTOCOLS[protocol]() as receiver:
        receiver.answer(answer, Answer())
        failures, marks = exported(receiver.endpoint, [families()] * 2, lambda: len(receiver.received), protocol=protocol)
    (refusal,) = map(str, failures)
    assert word in refusal
    assert "\n" not in refusal
    assert marks == [0, 1, 2]


def test_requests_that_are_too_large() -> None:
    """A request has fewer bytes than proxies let through, what has no layer first; a failure by a lower limit says what helps."""
    loss = Family(TRAIN_LOSS, np.array([0.5]), LabelRows(((),)))
    with HttpReceiver(most=1_000_000) as receiver:
        failures, _ = exported(receiver.endpoint, [[*families(3000), loss]])
    assert failures == []
    assert receiver.points() == expected([*families(3000), loss], LABELS)
    assert [metric.name for metric in liars.metrics(receiver.taken[0])] == ["torch_train_loss"]
    with HttpReceiver(most=100) as receiver:
        failures, refusals = exported(receiver.endpoint, [families(500)] * 2, lambda: receiver.refused)
    assert ["OTEL_EXPORTER_OTLP_COMPRESSION=gzip" in str(item) for item in failures] == [True, True]
    assert refusals == [0, 1, 2]


# Faulty receivers


@pytest.mark.slow
@pytest.mark.parametrize(("treat", "protocol"), [(liars.black_hole, "http/protobuf"), (liars.cut_body, "grpc")])
def test_liars_fail_an_export(
    treat: Callable[[Liar, socket.socket], None], protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a receiver does, an export ends with a failure, and is not logged by the libraries."""
    with caplog.at_level(logging.INFO), Liar(treat) as liar:
        failures, _ = exported(liar.endpoint, [families()], protocol=protocol, EXPORTER_OTLP_TIMEOUT="0.3")
        assert len(failures) == 1
    assert all(record.name == "torch_grad_exporter" for record in caplog.records)


@every_protocol
def test_no_secret_is_shown(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the failure nor any library's log shows a key in the query or a password in the endpoint."""
    secret = "" if protocol == "grpc" else "?key=hunter2"
    with caplog.at_level(logging.DEBUG):
        endpoint = refused() if protocol == "grpc" else refused().replace("//", "//me:hunter2@")
        failed = failure(endpoint + secret, protocol, EXPORTER_OTLP_TIMEOUT="1.5")
    assert "efused" in failed or "UNAVAILABLE" in failed
    assert "hunter2" not in failed + caplog.text


# TLS


@pytest.fixture(name="files")
def _files(tmp_path: Path) -> Path:
    (tmp_path / "ca.crt").write_text(authority().pem)
    (tmp_path / "other.crt").write_text(authority("another").pem)
    authority().issue("ip:127.0.0.1", "dns:localhost").write(tmp_path, "server")
    authority().issue("ip:127.0.0.9", "dns:elsewhere").write(tmp_path, "elsewhere")
    authority().issue("dns:client").write(tmp_path, "client")
    return tmp_path


def tls_receiver(protocol: str, files: Path, name: str = "server", *, asks: bool = False) -> HttpReceiver | GrpcReceiver:
    """Return a receiver with this certificate, that may ask for the client's."""
    if protocol != "grpc":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(files / f"{name}.crt", files / f"{name}.key")
        if asks:
            tls.verify_mode = ssl.CERT_REQUIRED
            tls.load_verify_locations(files / "ca.crt")
        return HttpReceiver(tls=tls)
    pair = (files / f"{name}.key").read_bytes(), (files / f"{name}.crt").read_bytes()
    roots = (files / "ca.crt").read_bytes()
    return GrpcReceiver(credentials=grpc.ssl_server_credentials([pair], roots, require_client_auth=asks))


@pytest.mark.slow
@every_protocol
def test_certificates_of_the_environment_are_used(protocol: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver is verified with the given authority, and gets the client's certificate where it asks for it."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(files / "ca.crt"))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(files / "other.crt"))  # for whatever else the program asks
    with tls_receiver(protocol, files) as receiver:
        assert failure(receiver.endpoint, protocol) == ""
    with tls_receiver(protocol, files, asks=True) as asking:
        assert failure(asking.endpoint, protocol, EXPORTER_OTLP_TIMEOUT="0.5") != ""
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(files / "client.crt"))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(files / "client.key"))
        assert failure(asking.endpoint, protocol) == ""
    assert len(receiver.received) == len(asking.received) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "name", "trusted"),
    [("http/protobuf", "elsewhere", "ca"), ("grpc", "server", "other")],
)
def test_wrong_certificates_get_nothing(
    protocol: str, name: str, trusted: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent to a server of an unknown authority, or with another one's name."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE", str(files / f"{trusted}.crt"))
    with tls_receiver(protocol, files, name) as receiver:
        failed = failure(receiver.endpoint, protocol, EXPORTER_OTLP_TIMEOUT="1.5")
    assert "ertificate" in failed or "UNAVAILABLE" in failed
    assert receiver.received == []


# Beside the user's own OpenTelemetry


def test_the_users_own_exporters_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    """OpenTelemetry's exporters log nothing of a failure of ours, and all of one of the user's right after it."""
    endpoint = refused()
    own = HttpExporter(endpoint, timeout=0.5)
    with caplog.at_level(logging.INFO):
        assert failure(endpoint, EXPORTER_OTLP_TIMEOUT="0.5")
        assert all(record.name == "torch_grad_exporter" for record in caplog.records)
        assert own.export(MetricsData(resource_metrics=[])) is MetricExportResult.FAILURE
    assert "Failed to export" in caplog.text
    own.shutdown()
