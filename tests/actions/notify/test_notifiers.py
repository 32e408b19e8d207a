"""Notifiers as a user writes them: wrong arguments, hidden secrets, bodies, and requests to receivers that refuse, hang or drip."""

from __future__ import annotations

import http.server
import json
import math
import pickle
import re
import ssl
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import torch

from tests.support.certificates import authority
from tests.support.notified import SECRET, Answer, notification, receiver, refused_url
from tests.support.tools import lasting_threads
from tests.support.torch_hooks import all_hooks
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Alertmanager, Log, Notification, Webhook
from torch_grad_exporter.actions.notify.notification import JSON, Body, SendError, checked_body, encoded_body

URL = f"https://{SECRET}:{SECRET}@hooks.example.org/{SECRET}?key={SECRET}"


WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (Webhook, ValueError, "url=None.*url_file=.*TORCH_GRAD_EXPORTER_WEBHOOK_URL"),
    (Alertmanager, ValueError, "url=None.*url_file=.*TORCH_GRAD_EXPORTER_ALERTMANAGER_URL"),
    (lambda: Webhook(URL, url_file="f"), ValueError, "url=<hidden>, url_file='f': give one of them"),
    (lambda: Webhook(3), TypeError, "url=int: expected an address that begins with https://"),
    *[
        (lambda wrong=wrong: Webhook(wrong), ValueError, "url=<hidden>: expected an address that begins with https://")
        for wrong in (
            SECRET, f"https:///{SECRET}", f"https://h:{SECRET}/", f"https://[{SECRET}/", f"https://h/{SECRET}\n",
            f"https://größe/{SECRET}",
        )
    ],
    (lambda: Webhook(url_file=URL), ValueError, "url_file=<hidden>: cannot be read"),
    (lambda: Webhook(URL, min_severity=URL), ValueError, "min_severity=<hidden>: expected 'info'"),
    (lambda: Webhook(url_file="/no/such/file"), ValueError, "url_file='/no/such/file': cannot be read: FileNotFoundError"),
    (lambda: Webhook(URL, timeout=float("nan")), ValueError, "timeout=.*expected a number of seconds above 0"),
    (lambda: Webhook(URL, headers={"X": f"{SECRET}\r\nY: z"}), ValueError, r"headers\['X'\]=<hidden>.*line break"),
    (lambda: Webhook(URL, headers={f"{SECRET} ": "x"}), ValueError, "headers: <hidden> is not a name of a header"),
    (lambda: Webhook(URL, body={"text": "$summery"}), ValueError, r"\$summery is not a field; the fields are timestamp"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "said"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments_raise(
    make: Callable[[], object], kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error names the argument and the fix, and no cause of it has a secret."""
    monkeypatch.delenv("TORCH_GRAD_EXPORTER_WEBHOOK_URL", raising=False)
    with pytest.raises(kind, match=said) as caught:
        make()
    assert type(caught.value) is kind
    assert clean(caught.value)


def clean(error: BaseException) -> bool:
    """Return whether an error and its causes have no secret."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return not any(SECRET in f"{each!r} {each}" for each in chain)


@pytest.mark.parametrize(
    ("alerts", "said"),
    [
        (URL, r"alerts=str: expected a list of notifiers, such as \[Log\(\), Webhook\(url\)\]"),
        ([Log(), URL], r"alerts\[1\]=str: expected a list of notifiers"),
        ([Log], r"alerts\[0\]=class Log, which must be called"),
    ],
    ids=range(3),
)
def test_wrong_alerts_raise(alerts: object, said: str) -> None:
    """The error names the place in the list, and neither hook nor thread is left."""
    model, threads = torch.nn.Linear(2, 2), lasting_threads()
    before = all_hooks(model)
    with pytest.raises(TypeError, match=said) as caught:
        start_exporter(model, port=None, alerts=alerts)  # type: ignore[arg-type]
    assert SECRET not in str(caught.value)
    assert all_hooks(model) == before
    assert lasting_threads() == threads


def test_no_repr_shows_an_address_or_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No `repr` of a notifier shows an address or a header."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_WEBHOOK_URL", URL)
    file = tmp_path / "url"
    file.write_text(f"{URL}\n")
    for notifier in (Webhook(URL, headers={"Authorization": SECRET}), Webhook(url_file=file), Webhook(), Alertmanager(URL)):
        assert SECRET not in f"{notifier!r} {notifier} {[notifier]}"
        assert "<hidden>" in repr(notifier)
    assert repr(Log()) == "Log(min_severity='info')"


def test_sources_of_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument precedes the variable, and a file is read for each request."""
    file = tmp_path / "url"
    with receiver() as first, receiver() as second:
        monkeypatch.setenv("TORCH_GRAD_EXPORTER_WEBHOOK_URL", f" {second.url} ")
        file.write_text(f"{first.url}\n")
        for webhook in (Webhook(first.url), Webhook(), by_file := Webhook(url_file=file)):
            webhook.send([notification()], math.inf)
        assert (len(first.asked), len(second.asked)) == (2, 1)
        file.write_text(second.url)
        by_file.send([notification()], math.inf)
        assert len(second.asked) == 2
    file.write_text(SECRET)
    assert re.search("url_file='.*url', its content=<hidden>: expected an address", str(failure(by_file)))


def sent(body: Body | None, problem: Notification) -> tuple[object, str]:
    """Return the decoded body of a webhook and its content type."""
    content, kind = encoded_body(checked_body(body), problem)
    return (json.loads(content) if kind == JSON else content.decode()), kind


def test_a_payload_has_all_that_is_known() -> None:
    """The payload has each field, with an ISO time and numbers that JSON has."""
    payload, kind = sent(None, notification(layer="encoder.0", value=float("inf"), rank=3))
    assert kind == "application/json"
    assert isinstance(payload, dict)
    assert datetime.fromisoformat(payload.pop("timestamp")).timestamp() == 1_700_000_000
    assert payload == {
        "status": "firing", "alert": "LossSpike", "severity": "warning", "summary": "The loss jumped 3 times.",
        "layer": "encoder.0", "value": "Infinity", "step": 7, "run": "r", "rank": 3, "first_steps": "Look.",
    }  # fmt: skip


def test_a_body_is_a_template_or_a_callable() -> None:
    """Texts in nested JSON are filled in, whatever characters the values have, and a callable returns JSON, text or bytes."""
    nasty = 'a "quoted" $alert\n{step}'
    body = {"blocks": [{"type": "section", "n": 3, "text": {"text": "$severity: $summary ($value$layer)"}}], "cost": "$$5"}
    assert sent(body, notification(summary=nasty, value=0.5))[0] == {
        "blocks": [{"type": "section", "n": 3, "text": {"text": f"warning: {nasty} (0.5)"}}], "cost": "$5",
    }  # fmt: skip
    assert sent("${alert} at $step", notification()) == ("LossSpike at 7", "text/plain; charset=utf-8")
    assert sent(lambda problem: {"text": problem.alert}, notification()) == ({"text": "LossSpike"}, "application/json")
    assert sent(lambda _: b"[1]", notification()) == ([1], "application/json")


@pytest.mark.parametrize(
    ("notifier", "expected"), [(Log(), 3), (Webhook(URL), 2), (Webhook(URL, min_severity="critical"), 1), (Alertmanager(URL), 3)]
)
def test_min_severity(notifier: Log | Webhook | Alertmanager, expected: int) -> None:
    """`min_severity` takes its own severity and worse ones."""
    assert sum(notifier.takes(notification(severity=severity)) for severity in ("info", "warning", "critical")) == expected


def test_the_summary_of_prometheus() -> None:
    """The rule's template is filled in, or the sentence of the process where it needs a missing label."""
    template = "Layer {{ $labels.layer }} of run {{ $labels.run }} is dead."
    assert notification(layer="a", by_layer=True, template=template).headline == "Layer a of run r is dead."
    assert notification(layer="a", by_layer=False, template=template).headline == "The loss jumped 3 times."
    assert notification(template="{{ $labels.device }} of run {{ $labels.run }}.").headline == "The loss jumped 3 times."
    assert not re.search(r"\{\{", notification(template="{{ $value | humanize }}").headline)


# Requests over HTTP


def failure(notifier: Webhook) -> SendError:
    """Return the error of sending, in which no cause has a secret."""
    with pytest.raises(SendError) as caught:
        notifier.send([notification()], math.inf)
    assert clean(caught.value)
    return caught.value


def test_a_request_has_what_was_chosen() -> None:
    """A request has the path with its query, the user, the headers and a JSON body."""
    with receiver() as there:
        url = there.url.replace("://", "://user:word@")
        Webhook(url, headers={"X-Token": SECRET}).send([notification()], math.inf)
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
        Webhook(there.url, headers={"authorization": f"Bearer {SECRET}"}).send([notification()], math.inf)
        Webhook(there.url).send([notification()], math.inf)
        assert [asked.headers.get("authorization") for asked in there.asked] == [f"Bearer {SECRET}", None]


@pytest.mark.parametrize(("status", "passing"), [(503, True), (408, True), (429, True), (404, False)])
def test_statuses_that_may_pass(status: int, passing: bool) -> None:
    """5xx, 408 and 429 may be tried again after the pause of `Retry-After`, and other refusals are permanent."""
    with receiver(then=Answer(status, {"Retry-After": "7"})) as there:
        error = failure(Webhook(there.url))
    assert error.passing is passing
    assert str(error).startswith(f"HTTP {status} ")
    if passing:
        assert error.pause == 7.0


def test_a_redirect_is_not_followed() -> None:
    """A redirect is not followed, and the error does not say where it leads."""
    with receiver() as other, receiver(then=Answer(307, {"Location": other.url})) as there:
        error = failure(Webhook(there.url))
        assert other.asked == []
        assert len(there.asked) == 1
    assert not error.passing
    assert "redirect" in str(error)


def test_a_receiver_that_refuses() -> None:
    """Where nothing listens the error says so, and may pass."""
    error = failure(Webhook(refused_url()))
    assert error.passing
    assert str(error) == "no connection, or it broke (ConnectionRefusedError)"


def test_an_answer_that_does_not_come() -> None:
    """A request without an answer ends with its timeout, and may pass."""
    with receiver(then=Answer(hangs=True)) as there:
        error = failure(Webhook(there.url, timeout=0.2))
    assert error.passing
    assert str(error) == "no answer within 0.2 s"


def test_a_certificate_that_does_not_verify(tmp_path: Path) -> None:
    """A certificate that does not verify is a permanent failure that names it."""
    certificate, key = authority().issue("ip:127.0.0.1").write(tmp_path, "leaf")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        error = failure(Webhook(f"https://127.0.0.1:{server.server_port}/{SECRET}"))
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
        assert str(failure(Webhook(there.url, body=broken))) == "body= has failed: KeyError: 'loss'"
        assert "not JSON serializable" in str(failure(Webhook(there.url, body=lambda _: {1, 2})))
        assert "it raised SystemExit" in str(failure(Webhook(there.url, body=lambda _: sys.exit())))

        def unreachable(_problem: object) -> object:
            raise OSError(f"no answer of {there.url}/secret")

        assert str(failure(Webhook(there.url, body=unreachable))) == "body= has failed: OSError: no answer of <address>"
        assert there.asked == []


def test_a_notifier_is_not_pickled() -> None:
    """A notifier refuses to be pickled, since it has secrets."""
    with pytest.raises(TypeError, match="secrets") as raised:
        pickle.dumps(Webhook(f"https://example.org/{SECRET}"))
    assert SECRET not in str(raised.value)
