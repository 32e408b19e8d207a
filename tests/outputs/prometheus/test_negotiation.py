"""Which format an `Accept` header gets."""

from __future__ import annotations

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.outputs.http.support import Training, fetch, serving
from tests.support import protobuf
from torch_grad_exporter.outputs.prometheus.negotiation import accepts_gzip, negotiate
from torch_grad_exporter.outputs.prometheus.text import Format

PROTOBUF = protobuf.ACCEPT
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
# With --enable-feature=native-histograms.
PROMETHEUS_3_NATIVE = f"{PROTOBUF};q=0.6,{OPENMETRICS};q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,*/*;q=0.2"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", Format.TEXT),
        ("*/*", Format.TEXT),
        (BROWSER, Format.TEXT),
        (PROMETHEUS_3, Format.OPENMETRICS),
        (PROMETHEUS_3_NATIVE, Format.PROTOBUF),
        ('Application/OpenMetrics-Text; Version="1.0.0"; charset=utf-8', Format.OPENMETRICS),
        ("application/openmetrics-text;version=0.0.1", Format.TEXT),
        ("application/openmetrics-text;version=2.0.0,text/plain;q=0.1", Format.TEXT),
        ("application/openmetrics-text;q=0,*/*", Format.TEXT),
        ("text/plain;q=0.4,application/openmetrics-text;q=0.5", Format.OPENMETRICS),
        ("text/*;q=0.9,application/openmetrics-text;q=0.8", Format.TEXT),
        ("*/*;q=0.9,application/openmetrics-text;q=0.8", Format.TEXT),
        ("*/*;q=0.9,text/plain;q=0.1,application/openmetrics-text;q=0.8", Format.OPENMETRICS),
        ("text/plain;version=9.9;q=0.9,application/openmetrics-text;q=0.8", Format.OPENMETRICS),
        (",;=,;q=,", Format.TEXT),
        (PROTOBUF, Format.PROTOBUF),
        ('Application/vnd.google.Protobuf; Encoding = delimited ; proto="io.prometheus.client.MetricFamily"', Format.PROTOBUF),
        (f"{PROTOBUF},{OPENMETRICS},text/plain", Format.PROTOBUF),
        (f"text/plain,{OPENMETRICS},{PROTOBUF}", Format.PROTOBUF),
        (f"{PROTOBUF};q=0.3,{OPENMETRICS};q=0.6", Format.OPENMETRICS),
        (f"{PROTOBUF};q=0.3,text/plain;q=0.6", Format.TEXT),
        (f"{PROTOBUF};q=0,{OPENMETRICS};q=0.1", Format.OPENMETRICS),
        (f"{PROTOBUF};q=2,{OPENMETRICS};q=0.1", Format.OPENMETRICS),
        (f"{PROTOBUF};q=high", Format.TEXT),
        (PROTOBUF.replace("delimited", "text"), Format.TEXT),
        (PROTOBUF.replace("delimited", "compact-text") + f",{OPENMETRICS};q=0.1", Format.OPENMETRICS),
        (PROTOBUF.replace("MetricFamily", "MetricSet"), Format.TEXT),
        ("application/vnd.google.protobuf", Format.TEXT),
        ("application/vnd.google.protobuf;encoding=delimited", Format.TEXT),
        ("application/*", Format.TEXT),
        (f'text/html;title="a,{OPENMETRICS}"', Format.TEXT),
        (f'text/html;title="a;q=0",{OPENMETRICS}', Format.OPENMETRICS),
        (f'text/html;title="never closed,{OPENMETRICS}', Format.TEXT),
    ],
)
def test_the_format_follows_the_accept_header(accept: str, form: Format) -> None:
    """The one with the highest quality of those that are named with a version and an encoding that are there, else text."""
    assert negotiate(accept) is form


def test_gzip_is_for_those_who_accept_it() -> None:
    """Named, or by `*`, and not at quality 0."""
    for accept, packed in (("", False), ("GZIP;q=0.5, br", True), ("gzip;q=0.000, *", False), ("*", True)):
        assert accepts_gzip(accept) is packed, accept


PIECES = (*",;=\"'*/\\ \t\0ß", "q=", "0.5", "1", "text/plain", OPENMETRICS, PROTOBUF, "version", "proto")


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=30).map("".join)))
def test_no_header_fails(header: str) -> None:
    """Any text gets one of the formats, another one than text only where it is named, and nothing raises."""
    form = negotiate(header)
    assert form is Format.TEXT or form.value.partition(";")[0] in header.lower()
    assert accepts_gzip(header) <= any(coding in header.lower() for coding in ("gzip", "*"))


def test_a_long_header_takes_no_time() -> None:
    """Sixty kilobytes of quotes, backslashes or commas are read in linear time."""
    for part in ('"', '\\"', '"\\', ",", ";", '",', "a="):
        assert negotiate(part * (60_000 // len(part))) is Format.TEXT


def test_the_server_answers_in_protobuf() -> None:
    """The content type names the message and its encoding, the body is whole and packed by request, and HEAD has its length."""
    training = Training()
    with serving(training, clock=training.clock) as server:
        answer = fetch(server, Accept=PROTOBUF)
        packed, head = fetch(server, Accept=PROTOBUF, Accept_Encoding="gzip"), fetch(server, "/metrics", "HEAD", Accept=PROTOBUF)
        text = fetch(server)
    assert answer.headers["content-type"] == Format.PROTOBUF.value
    assert answer.headers["vary"] == "Accept, Accept-Encoding"
    assert protobuf.families(answer.body)
    assert gzip.decompress(packed.body) == answer.body
    assert (head.body, head.headers["content-length"]) == (b"", str(len(answer.body)))
    assert text.headers["content-type"] == Format.TEXT.value
