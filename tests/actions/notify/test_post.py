"""Requests over HTTP to receivers that refuse, hang, drip, redirect or die: errors, and no leaks."""

from __future__ import annotations

import http.server
import math
import pickle
import ssl
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.certificates import authority
from tests.support.notified import SECRET, Answer, notification, receiver, refused_url
from torch_grad_exporter.actions import Webhook
from torch_grad_exporter.actions.notify.post import LEFT_BEHIND
from torch_grad_exporter.actions.notify.sending import Send, SendError


def plenty() -> float:
    """Return enough time."""
    return math.inf


def failure(send: Send, left: Callable[[], float] = plenty) -> SendError:
    """Return the error of sending, in which no cause has a secret."""
    with pytest.raises(SendError) as caught:
        send([notification()], left)
    one: BaseException | None = caught.value
    while one is not None:
        assert SECRET not in f"{one!r} {one}"
        one = one.__cause__ or one.__context__
    return caught.value


def test_a_request_has_what_was_chosen() -> None:
    """A request has the path with its query, the user, the headers and a JSON body."""
    with receiver() as there:
        url = there.url.replace("://", "://user:word@")
        Webhook(url, headers={"X-Token": SECRET}).sender()([notification()], plenty)
        (asked,) = there.asked
    assert asked.path == f"/{SECRET}?key={SECRET}"
    assert (asked.headers["X-Token"], asked.headers["Content-Type"]) == (SECRET, "application/json")
    assert asked.headers["Authorization"] == "Basic dXNlcjp3b3Jk"
    assert asked.json["summary"] == "The loss jumped 3 times."


def test_a_chosen_authorization_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A password in ~/.netrc does not replace a header, and adds none."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login other password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with receiver() as there:
        Webhook(there.url, headers={"authorization": f"Bearer {SECRET}"}).sender()([notification()], plenty)
        Webhook(there.url).sender()([notification()], plenty)
        assert [asked.headers.get("authorization") for asked in there.asked] == [f"Bearer {SECRET}", None]


@pytest.mark.parametrize(("status", "passing"), [(503, True), (408, True), (429, True), (404, False)])
def test_statuses_that_may_pass(status: int, passing: bool) -> None:
    """5xx, 408 and 429 may be tried again after the pause of `Retry-After`, and other refusals are permanent."""
    with receiver(then=Answer(status, {"Retry-After": "7"})) as there:
        error = failure(Webhook(there.url).sender())
    assert error.passing is passing
    assert str(error).startswith(f"HTTP {status} ")
    if passing:
        assert error.pause == 7.0


def test_a_redirect_is_not_followed() -> None:
    """A redirect is not followed, and the error does not say where it leads."""
    with receiver() as other, receiver(then=Answer(307, {"Location": other.url})) as there:
        error = failure(Webhook(there.url).sender())
        assert other.asked == []
        assert len(there.asked) == 1
    assert not error.passing
    assert "redirect" in str(error)


def test_a_receiver_that_refuses() -> None:
    """Where nothing listens the error says so, and may pass."""
    error = failure(Webhook(refused_url()).sender())
    assert error.passing
    assert str(error) == "no connection, or none that lasted (ConnectionRefusedError)"


@pytest.mark.slow
@pytest.mark.parametrize("answer", [Answer(hangs=True), Answer(drips=True)], ids=["hangs", "drips"])
def test_endless_answers_time_out(answer: Answer) -> None:
    """A request ends with its timeout, and the number of hanging ones is bounded."""
    with receiver(then=answer) as there:
        send = Webhook(there.url, timeout=0.2).sender()
        for _ in range(LEFT_BEHIND + 1):
            error = failure(send)
            assert error.passing
        assert len(there.asked) in (LEFT_BEHIND, LEFT_BEHIND + 1)  # what hangs before its answer ends by its timeout
        assert str(error) in ("no answer within 0.2 s", f"{LEFT_BEHIND} earlier requests hang")


def test_a_certificate_that_does_not_verify(tmp_path: Path) -> None:
    """A certificate that does not verify is a permanent failure that names it."""
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
    """A body that raises or is not JSON fails this notification, and nothing is sent."""

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


def test_a_request_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its exit Python 3.12 starts no thread, and the last notification is sent all the same."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("torch-grad-exporter"):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    with receiver() as there:
        send = Webhook(there.url).sender()
        monkeypatch.setattr(threading.Thread, "start", refused)
        send([notification()], lambda: 5.0)
        assert len(there.asked) == 1


def test_a_notifier_is_not_pickled() -> None:
    """A notifier refuses to be pickled, since it has secrets."""
    with pytest.raises(TypeError, match="secrets") as raised:
        pickle.dumps(Webhook(f"https://example.org/{SECRET}"))
    assert SECRET not in str(raised.value)
