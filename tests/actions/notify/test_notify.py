"""From a fault in a training to its receivers: once, in time, and without a trace in the training."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time

import pytest
import torch

from tests.support.notified import SECRET, Answer, Judged, Receiver, Trained, receiver, refused_url
from tests.support.scrape import errors
from tests.support.tools import eventually, get, lasting_threads
from torch_grad_exporter.actions import Alertmanager, Log, Notifier, Webhook
from torch_grad_exporter.rules import Problem

EXPLODES = Problem("GradientExploding", "warning", "The norm spiked 3 times in the last 10 minutes.", value=3.0)
SLOW = Problem("Slow", "warning", "It takes long.", value=2.5, first_steps="Look.")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged lines about problems."""
    return [record.getMessage() for record in caplog.records if "problem" in record.getMessage()]


def test_a_problem_is_notified_after_its_for(caplog: pytest.LogCaptureFixture) -> None:
    """A problem with a `for` of ten minutes is in the log and at the webhook at second 600, once."""
    with receiver() as there:
        judged = Judged(Log(), Webhook(there.url))
        for now in range(700):
            judged.at(now, SLOW)
            assert len(there.asked) == (now >= 600)
        (asked,) = there.asked
    assert asked.json == {
        "timestamp": "2023-11-14T22:23:20.000Z", "status": "firing", "alert": "Slow", "severity": "warning",
        "summary": "It takes long.", "layer": None, "value": 2.5, "step": 7, "run": "r", "rank": 0, "first_steps": "Look.",
    }  # fmt: skip
    (line,) = lines(caplog)
    assert line == "torch_grad_exporter: problem at step 7: Slow (warning): It takes long. First: Look."


def test_failing_notifications_are_not_notified(caplog: pytest.LogCaptureFixture) -> None:
    """NotificationsFailing is active and not sent, and other problems are sent."""
    judged = Judged(Log())
    own = Problem("NotificationsFailing", "warning", "The notifier webhook failed to send 1 notification since the start.")
    judged.at(0, own)
    judged.at(1, own, EXPLODES)
    judged.at(1000)
    assert [line.split(":")[2] for line in lines(caplog)] == [" GradientExploding (warning)"] * 2
    judged.at(1001, own)
    assert judged.totals.active["NotificationsFailing", "warning"] == 1


def test_an_alertmanager_is_reminded_each_minute() -> None:
    """A lasting problem is posted again each minute, and nothing is posted without one."""
    with receiver() as there:
        judged = Judged(Alertmanager(there.root))
        for now in range(1600):
            judged.at(now, *([SLOW] if now < 900 else []))
        posts = [(asked.json[0]["startsAt"][11:19], asked.json[0]["endsAt"][11:19]) for asked in there.asked]
    start = "22:23:20"
    assert posts[0] == (start, "22:27:20")
    assert posts[-1] == (start, "22:33:19")
    assert len(posts) == 1 + 10 + 1
    assert {first for first, _ in posts} == {start}


# With a real training


def alerts(there: Receiver) -> list[tuple[str, str]]:
    """Return alert and status of each notification."""
    return [(asked.json["alert"], asked.json["status"]) for asked in there.asked]


def sent_once(trained: Trained, there: Receiver) -> bool:
    """Return whether the fault was sent once, and its end as well, or dropped where a slow machine had no time for it."""
    dropped = trained.value("torch_grad_exporter_notifications_total", "webhook", "dropped")
    return alerts(there) == [("TrainingNonFiniteLoss", status) for status in ("firing", "resolved")[: 1 if dropped else 2]]


@pytest.mark.slow
def test_a_fault_reaches_log_and_webhook(caplog: pytest.LogCaptureFixture) -> None:
    """A loss that is NaN is sent once with its details, and again as resolved when the run has ended."""
    with receiver() as there:
        trained = Trained(Log(), Webhook(there.url), run="nan run", rank=3)
        with trained.exporter:
            trained.train()
            trained.train(nan=True)
            assert there.got(1)
            payload = there.asked[0].json
            seen = [payload[name] for name in ("alert", "severity", "run", "rank")]
            assert seen == ["TrainingNonFiniteLoss", "critical", "nan run", 3]
            assert payload["value"] in (1.0, 2.0, 3.0)
            assert "NaN" in payload["summary"]
            assert {problem.alert for problem in trained.exporter.problems()} == {"TrainingNonFiniteLoss"}
            assert trained.value("torch_alerts_active", "TrainingNonFiniteLoss", "critical") == 1
            assert eventually(lambda: trained.value("torch_grad_exporter_notifications_total", "webhook", "sent") == 1)
        assert sent_once(trained, there)
        assert there.asked[-1].json["summary"].endswith("The run has ended.") or len(there.asked) == 1
    assert len(lines(caplog)) == 2


def test_without_alerts_there_is_nothing() -> None:
    """Without alerts there are no threads and no metrics of them."""
    before = lasting_threads()
    with Trained().exporter as exporter:
        plain = lasting_threads()
        assert not any("notify" in name for name in plain)
        assert not {"torch_alerts_active", "torch_grad_exporter_notifications_total"} & {
            family.spec.name for family in exporter.collect()
        }
    with Trained(Log(), Webhook(refused_url())).exporter:
        added = [f"torch-grad-exporter-notify{name}" for name in ("", "-log", "-webhook")]
        assert eventually(lambda: lasting_threads() == sorted([*plain, *added]))
    assert eventually(lambda: lasting_threads() == before)


@pytest.mark.slow
def test_the_training_is_the_same_bits() -> None:
    """With receivers that fail the parameters after 21 steps have the bits of a run without notifiers."""

    def parameters(*notifiers: Notifier) -> list[torch.Tensor]:
        trained = Trained(*notifiers)
        with trained.exporter:
            trained.train(10)
            trained.train(1, nan=True)
            trained.train(10)
        return [parameter.detach().clone() for parameter in trained.model.parameters()]

    with receiver(then=Answer(hangs=True)) as hanging:
        some = parameters(Log(), Webhook(refused_url()), Webhook(hanging.url), Alertmanager(refused_url()))
    assert all(torch.equal(a, b) for a, b in zip(some, parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("answer", [Answer(drips=True), Answer(503)], ids=["drips", "503"])
def test_a_dead_receiver_does_not_delay_the_end(answer: Answer) -> None:
    """`close` does not wait for the request's timeout, and drops and counts what a dead receiver does not take."""
    with receiver(then=answer) as bad, receiver() as good:
        trained = Trained(Webhook(bad.url, timeout=60), Webhook(good.url))
        trained.train(nan=True)
        assert good.got(1)
        assert bad.got(1)
        begun = time.monotonic()
        trained.exporter.close()
        assert time.monotonic() - begun < 50
        assert alerts(good)[0] == ("TrainingNonFiniteLoss", "firing")
        results = ("sent", "dropped")
        counts = [trained.value("torch_grad_exporter_notifications_total", "webhook", result) for result in results]
        assert counts == [0, 2]


@pytest.mark.slow
def test_no_secret_anywhere(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """With all loggers at DEBUG and failing receivers no secret is in logs, output, metrics, page or `repr`."""
    caplog.set_level(logging.DEBUG)
    redirect = Answer(302, {"Location": f"http://x/{SECRET}"})
    with (
        receiver(then=redirect) as redirects,
        receiver(then=Answer(404)) as refuses,
        receiver(then=Answer(hangs=True)) as hangs,
        receiver() as good,
    ):
        urls = [redirects.url, refuses.url, hangs.url, good.url, refused_url(), f"https://{good.root[7:]}/{SECRET}"]
        made = [Webhook(url, headers={"X-Token": SECRET}, timeout=0.2 if url == hangs.url else 60) for url in urls]
        trained = Trained(*made, Alertmanager(refuses.url), Log(), port=0, addr="127.0.0.1")
        trained.train(nan=True)
        for there in (redirects, refuses, hangs, good):
            assert there.got(1)
        assert eventually(lambda: errors(trained.exporter).get("notify", 0) >= 5)
        shown = [get(trained.exporter.url), get(f"{trained.exporter.page_url}api/v1/saved")]
        shown += [repr(trained.exporter), repr(made), repr(trained.exporter.settings), str(trained.exporter.problems())]
        shown.append(str(threading.enumerate()))
        trained.exporter.close()
    output = capfd.readouterr()
    everything = "".join([caplog.text, output.out, output.err, *shown])
    assert SECRET not in everything
    assert "webhook-2: HTTP 404" in everything


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_forked_child_sends_nothing() -> None:
    """A forked child can scrape and close, and all notifications come from the parent."""
    with receiver() as there:
        trained = Trained(Log(), Webhook(there.url))
        with trained.exporter as exporter:
            trained.train(nan=True)
            child = os.fork()
            if child == 0:
                status = 1
                with contextlib.suppress(BaseException):
                    exporter.observe(loss=float("nan"))
                    status = 0 if exporter.collect() and exporter.problems() is not None else 2
                    exporter.close()
                os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert there.got(1)
        assert sent_once(trained, there)
