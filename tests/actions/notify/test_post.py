"""Requests over HTTP, to receivers that refuse, hang, drip, redirect, answer late or die: what is said, and that nothing leaks."""

from __future__ import annotations

import copy
import http.server
import logging
import math
import pickle
import ssl
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.certificates import authority
from tests.support.notified import SECRET, Answer, notification, receiver, refused_url
from torch_grad_exporter.actions import Alertmanager, Webhook
from torch_grad_exporter.actions.notify.post import LEFT_BEHIND
from torch_grad_exporter.actions.notify.sending import Send, SendError
from torch_grad_exporter.lifecycle import BackgroundThread


def plenty() -> float:
    """There is time."""
    return math.inf


def failure(send: Send, left: Callable[[], float] = plenty) -> SendError:
    """What sending a notification fails of; nothing of it or of what it was raised from has a secret in it."""
    with pytest.raises(SendError) as caught:
        send([notification()], left)
    one: BaseException | None = caught.value
    while one is not None:
        assert SECRET not in f"{one!r} {one}"
        one = one.__cause__ or one.__context__
    return caught.value


def test_a_request_has_what_was_chosen() -> None:
    """The path with its query, the user of the address, the headers, and a body of JSON."""
    with receiver() as there:
        url = there.url.replace("://", "://user:word@")
        Webhook(url, headers={"X-Token": SECRET}).sender()([notification()], plenty)
        (asked,) = there.asked
    assert asked.path == f"/{SECRET}?key={SECRET}"
    assert (asked.headers["X-Token"], asked.headers["Content-Type"]) == (SECRET, "application/json")
    assert asked.headers["Authorization"] == "Basic dXNlcjp3b3Jk"
    assert asked.json["summary"] == "The loss jumped 3 times."


def test_a_chosen_authorization_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A password in ~/.netrc replaces neither a header nor nothing."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login other password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with receiver() as there:
        Webhook(there.url, headers={"authorization": f"Bearer {SECRET}"}).sender()([notification()], plenty)
        Webhook(there.url).sender()([notification()], plenty)
        assert [asked.headers.get("authorization") for asked in there.asked] == [f"Bearer {SECRET}", None]


@pytest.mark.parametrize("status", [500, 502, 503, 504, 408, 429])
def test_what_may_pass_is_said_so(status: int) -> None:
    """5xx, 408 and 429 may be tried again, after what the receiver asks for."""
    with receiver(then=Answer(status, {"Retry-After": "7"})) as there:
        error = failure(Webhook(there.url).sender())
    assert (error.passing, error.pause) == (True, 7.0)
    assert str(error).startswith(f"HTTP {status} ")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 413, 422])
def test_a_refusal_is_permanent(status: int) -> None:
    """Any other 4xx is not tried again."""
    with receiver(then=Answer(status)) as there:
        error = failure(Webhook(there.url).sender())
    assert not error.passing
    assert str(error).startswith(f"HTTP {status} ")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    """Neither to another host nor to the same; the error does not say where it leads."""
    with receiver() as other, receiver(then=Answer(status, {"Location": other.url})) as there:
        error = failure(Webhook(there.url).sender())
        assert other.asked == []
        assert len(there.asked) == 1
    assert not error.passing
    assert "redirect" in str(error)


def test_a_receiver_that_refuses() -> None:
    """Nothing listens: said at once, and it may pass."""
    error = failure(Webhook(refused_url()).sender())
    assert error.passing
    assert str(error) == "no connection, or none that lasted (ConnectionRefusedError)"


def test_a_host_that_there_is_not() -> None:
    """A name that no resolver has; the name is not said."""
    error = failure(Webhook(f"http://{SECRET.lower()}.invalid/").sender())
    assert error.passing
    assert SECRET.lower() not in str(error)


def test_a_receiver_that_dies_in_its_answer() -> None:
    """The connection ends without an answer: it may pass."""
    with receiver(then=Answer(dies=True)) as there:
        error = failure(Webhook(there.url).sender())
    assert error.passing
    assert str(error) == "no connection, or none that lasted (RemoteDisconnected)"


@pytest.mark.parametrize("answer", [Answer(hangs=True), Answer(drips=True)], ids=["hangs", "drips"])
def test_a_receiver_that_never_comes_to_its_end(answer: Answer) -> None:
    """Whether it says nothing or a byte now and then: the request takes its timeout, and some are left behind at most."""
    with receiver(then=answer) as there:
        send = Webhook(there.url, timeout=0.2).sender()
        for _ in range(LEFT_BEHIND + 1):
            error = failure(send)
            assert error.passing
        assert len(there.asked) in (LEFT_BEHIND, LEFT_BEHIND + 1)  # what hangs before its answer ends by its timeout
        assert str(error) in ("no answer within 0.2 s", f"{LEFT_BEHIND} earlier requests hang")


def test_the_end_does_not_wait_for_a_request() -> None:
    """When there is no time left, a request that is under way is left behind, whatever its timeout is."""
    with receiver(then=Answer(hangs=True)) as there:
        send, left = Webhook(there.url, timeout=60).sender(), [math.inf]
        threading.Thread(target=lambda: there.got(1) and left.__setitem__(0, 0.0), daemon=True).start()
        begun = time.monotonic()
        assert failure(send, lambda: left[0]).passing
        assert time.monotonic() - begun < 60


def test_a_certificate_that_does_not_verify(tmp_path: Path) -> None:
    """A failure that does not pass, in words that say what to check."""
    certificate, key = authority().issue("ip:127.0.0.1").write(tmp_path, "leaf")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        error = failure(Webhook(f"https://127.0.0.1:{server.server_port}/{SECRET}").sender())
    finally:
        server.shutdown()
        server.server_close()
    assert not error.passing
    assert "certificate" in str(error)


def test_a_body_that_fails() -> None:
    """A callable that raises, or gives what JSON does not have, fails this notification; nothing is sent."""

    def broken(_one: object) -> object:
        raise KeyError("loss")

    with receiver() as there:
        assert str(failure(Webhook(there.url, body=broken).sender())) == "body= has failed: KeyError: 'loss'"
        assert "not JSON serializable" in str(failure(Webhook(there.url, body=lambda _: {1, 2}).sender()))
        assert "it raised SystemExit" in str(failure(Webhook(there.url, body=lambda _: sys.exit()).sender()))

        def told(_one: object) -> object:
            raise OSError(f"no answer of {there.url}/secret")

        assert str(failure(Webhook(there.url, body=told).sender())) == "body= has failed: OSError: no answer of <address>"
        assert there.asked == []


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    """The file is read for each request: when it is gone the notification fails, and the error names the file."""
    file = tmp_path / "url"
    file.write_text(refused_url())
    send = Webhook(url_file=file).sender()
    file.unlink()
    assert "cannot be read: FileNotFoundError" in str(failure(send))


def test_no_library_logs_a_request(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the user has every logger at DEBUG; what the user's own requests log stays."""
    with caplog.at_level(logging.DEBUG), receiver(Answer(500)) as there:
        logging.getLogger("urllib3.connectionpool").setLevel(logging.DEBUG)
        send = Webhook(there.url, headers={"X": SECRET}).sender()
        failure(send)
        send([notification()], plenty)
        assert len(there.asked) == 2
    assert SECRET not in caplog.text


@pytest.mark.parametrize("end", ["", "/", "/api/v2/alerts"])
def test_the_path_of_an_alertmanager(end: str) -> None:
    """Alerts go to /api/v2/alerts below the address, in one request; what lasts expires by itself, what is over has ended."""
    with receiver() as there:
        send = Alertmanager(f"{there.root}/prefix{end}").sender()
        send([notification(), notification(status="resolved", layer="a", by_layer=True)], plenty)
        (asked,) = there.asked
    assert asked.path == "/prefix/api/v2/alerts"
    lasts, over = asked.json
    assert lasts == {
        "labels": {"alertname": "LossSpike", "severity": "warning", "run": "r", "rank": "0"},
        "annotations": {"summary": "The loss jumped 3 times.", "description": "The loss jumped 3 times. Look."},
        "startsAt": "2023-11-14T22:13:20.000Z",
        "endsAt": "2023-11-14T22:17:20.000Z",
    }
    assert over["labels"]["layer"] == "a"
    assert over["endsAt"] == "2023-11-14T22:13:20.000Z"


def test_a_request_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its exit Python 3.12 starts no thread any more, and what ends the run is told all the same."""

    def refused(_thread: BackgroundThread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with receiver() as there:
        send = Webhook(there.url).sender()
        monkeypatch.setattr(BackgroundThread, "start", refused)
        send([notification()], lambda: 5.0)
        assert len(there.asked) == 1


@pytest.mark.parametrize("make", [pickle.dumps, copy.deepcopy], ids=["pickle", "copy"])
def test_a_notifier_is_not_pickled(make: Callable[[object], object]) -> None:
    """Else a checkpoint of a run's settings would have the secrets."""
    with pytest.raises(TypeError, match="secrets") as raised:
        make(Webhook(f"https://example.org/{SECRET}"))
    assert SECRET not in str(raised.value)
