"""From a fault in a real training to who is told: once, in time, whatever the receivers do, and without a trace in the training."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.notified import SECRET, Answer, Judged, Receiver, Trained, receiver, refused_url
from tests.support.scrape import errors
from tests.support.tools import FOREVER, PATIENCE, eventually, lasting_threads
from torch_grad_exporter.actions import Alertmanager, Event, Log, Notifier, Webhook
from torch_grad_exporter.actions.act import act
from torch_grad_exporter.actions.notify import notify
from torch_grad_exporter.rules import Problem

EXPLODES = Problem("GradientExploding", "warning", "The norm spiked 3 times in the last 10 minutes.", value=3.0)
SLOW = Problem("Slow", "warning", "It takes long.", value=2.5, first_steps="Look.")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of problems."""
    return [record.getMessage() for record in caplog.records if "problem" in record.getMessage()]


def test_a_problem_is_told_at_the_first_evaluation_after_its_for(caplog: pytest.LogCaptureFixture) -> None:
    """Judged each second, a problem with a `for` of ten minutes is in the log and at the webhook at second 600, once."""
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


def test_that_notifications_fail_is_not_notified(caplog: pytest.LogCaptureFixture) -> None:
    """It would fail as well, or come anew with each failure; it is active all the same, and what else is wrong is told."""
    judged = Judged(Log())
    own = Problem("NotificationsFailing", "warning", "The notifier webhook failed to send 1 notification since the start.")
    judged.at(0, own)
    judged.at(1, own, EXPLODES)
    judged.at(1000)
    assert [line.split(":")[2] for line in lines(caplog)] == [" GradientExploding (warning)"] * 2
    judged.at(1001, own)
    assert judged.totals.active["NotificationsFailing", "warning"] == 1


def test_one_line_at_the_beginning_and_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """A problem that flaps within its `keep_firing_for` has two lines, visible to those who have not set up logging."""
    judged = Judged(Log())
    for now in range(1500):
        judged.at(now, *([SLOW] if now < 900 and (now < 601 or now % 60 < 30) else []))
    assert [line.split(":")[1] for line in lines(caplog)] == [" problem at step 7", " problem over at step 7"]
    assert all(record.levelno >= logging.WARNING for record in caplog.records)


def test_what_is_active_and_what_was_sent_is_counted() -> None:
    """`active` rises and falls with the problem, and is 0 where there is none; each result of each sink is there from the start."""
    with receiver() as there:
        judged = Judged(Webhook(there.url), Webhook(refused_url()))
        assert judged.totals.active == {}  # no process can judge the rule of this test
        assert set(judged.totals.counts) == {
            (name, result) for name in ("webhook", "webhook-2") for result in ("sent", "failed", "dropped")
        }  # fmt: skip
        judged.at(0, SLOW)
        judged.at(600, SLOW)
        assert judged.totals.active == {("Slow", "warning"): 1}
        judged.at(1000)
        assert judged.totals.active == {("Slow", "warning"): 0}
    counts = judged.totals.counts
    assert counts["webhook", "sent"] == 2
    assert counts["webhook-2", "sent"] == 0


def test_an_alertmanager_is_told_each_minute_what_lasts() -> None:
    """While a problem lasts it is posted again each minute, with an end in four; nothing is posted while there is none."""
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


def test_ten_thousand_problems_at_once() -> None:
    """All are followed; a webhook takes 1,000 and counts the others as dropped, and an Alertmanager gets all in batches."""
    many = [Problem(f"P{number}", "warning", "It is.") for number in range(10_000)]
    with receiver() as there:
        judged = Judged(Webhook(refused_url()), Alertmanager(there.root))
        judged.at(0, *many)
        judged.at(61, *many)
        assert sum(judged.totals.active.values()) == 10_000
        assert judged.totals.counts["webhook", "dropped"] == 9_000
        assert len({alert["labels"]["alertname"] for asked in there.asked for alert in asked.json}) == 10_000


# With a real training


def alerts(there: Receiver) -> list[tuple[str, str]]:
    """Alert and status of each notification."""
    return [(asked.json["alert"], asked.json["status"]) for asked in there.asked]


def test_a_fault_in_a_training_reaches_log_and_webhook(caplog: pytest.LogCaptureFixture) -> None:
    """A loss that is NaN: one notification with all that is known, and one when the run has ended; the metrics say so too."""
    with receiver() as there:
        trained = Trained(Log(), Webhook(there.url), run="nan run", rank=3)
        with trained.exporter:
            trained.train()
            trained.train(nan=True)
            assert there.got(1)
            payload = there.asked[0].json
            assert (payload["alert"], payload["severity"], payload["run"], payload["rank"]) == (
                "TrainingNonFiniteLoss",
                "critical",
                "nan run",
                3,
            )
            assert payload["value"] in (1.0, 2.0, 3.0)
            assert "NaN" in payload["summary"]
            assert {one.alert for one in trained.exporter.problems()} == {"TrainingNonFiniteLoss"}
            assert trained.value("torch_alerts_active", "TrainingNonFiniteLoss", "critical") == 1
            assert eventually(lambda: trained.value("torch_grad_exporter_notifications_total", "webhook", "sent") == 1)
        assert alerts(there) == [("TrainingNonFiniteLoss", "firing"), ("TrainingNonFiniteLoss", "resolved")]
        assert there.asked[1].json["summary"].endswith("The run has ended.")
    assert len(lines(caplog)) == 2


def test_a_run_that_fails_tells_so_at_its_end(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception leaves the `with`: the webhook hears of it before `close` returns."""
    monkeypatch.setattr(notify, "CLOSE_SECONDS", 2 * PATIENCE)  # however busy the machine is
    with receiver() as there:
        trained = Trained(Webhook(there.url))

        def failing() -> None:
            with trained.exporter:
                trained.train()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            failing()
        assert alerts(there) == [("TrainingFailed", "firing")]


def test_judgements_between_the_end_and_the_last_one_hide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run that has failed is being closed it is judged on: the failure is told by the last judgement all the same, once."""
    for part in (notify, act):
        monkeypatch.setattr(part, "CLOSE_SECONDS", 2 * PATIENCE)
    monkeypatch.setattr(notify, "EVALUATION_SECONDS", 0.0)
    monkeypatch.setattr(notify, "SHARE", 1.0)
    events: list[Event] = []
    with receiver() as there:
        exporter = Trained(Webhook(there.url)).exporter
        exporter.on("TrainingFailed", events.append)
        live, close_view, judgements = exporter._view.live, exporter._view.close, itertools.count()
        judged, seen = live.judged, [0]

        def counted(*, last: bool = False) -> object:
            seen[0] = next(judgements)
            return judged(last=last)

        def closing(error: str | None) -> None:
            before = seen[0]
            assert eventually(lambda: seen[0] > before + 3)
            close_view(error)

        monkeypatch.setattr(live, "judged", counted)
        monkeypatch.setattr(exporter._view, "close", closing)
        exporter.end(ZeroDivisionError())
        assert errors(exporter).get("close", 0) == 0
        assert alerts(there) == [("TrainingFailed", "firing")]
    assert [event.alert for event in events] == ["TrainingFailed"]


def test_a_webhook_that_fails_first_and_then_succeeds() -> None:
    """500, then 200: the problem arrives, and the failure is counted under `notify`."""
    with receiver(Answer(500)) as there:
        trained = Trained(Webhook(there.url))
        trained.train(nan=True)
        assert there.got(2)
        assert [asked.json["status"] for asked in there.asked] == ["firing", "firing"]
        assert errors(trained.exporter)["notify"] == 1
        trained.exporter.close()


def test_without_alerts_there_is_no_thread_and_no_metric() -> None:
    """The threads are those that there always were, and the scrape has neither of the metrics; with alerts there are these."""
    before = lasting_threads()
    with Trained().exporter as exporter:
        plain = lasting_threads()
        assert not any("notify" in name for name in plain)
        assert not {"torch_alerts_active", "torch_grad_exporter_notifications_total"} & {
            one.spec.name for one in exporter.collect()
        }
    with Trained(Log(), Webhook(refused_url())).exporter:
        added = [f"torch-grad-exporter-notify{name}" for name in ("", "-log", "-webhook")]
        assert lasting_threads() == sorted([*plain, *added])
    assert lasting_threads() == before


def test_the_training_is_the_same_bits() -> None:
    """With notifiers that fail in each way the parameters after 100 steps are those without any."""

    def parameters(*notifiers: Notifier) -> list[torch.Tensor]:
        trained = Trained(*notifiers)
        with trained.exporter:
            trained.train(50)
            trained.train(1, nan=True)
            trained.train(50)
        return [one.detach().clone() for one in trained.model.parameters()]

    with receiver(then=Answer(hangs=True)) as hanging:
        some = parameters(Log(), Webhook(refused_url()), Webhook(hanging.url), Alertmanager(refused_url()))
    assert all(torch.equal(one, other) for one, other in zip(some, parameters(), strict=True))


def test_nothing_of_it_runs_on_the_training_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging, sending and logging are called in the exporter's threads alone, so no receiver can make a step longer."""
    seen: set[str] = set()
    original = notify.Notify.evaluate

    def evaluate(self: notify.Notify, *, last: bool = False) -> None:
        seen.add(threading.current_thread().name)
        original(self, last=last)

    class Heard(Log):
        def sender(self) -> Any:  # noqa: ANN401 - as of `Notifier`
            return lambda notifications, left: seen.add(threading.current_thread().name)

    monkeypatch.setattr(notify.Notify, "evaluate", evaluate)
    trained = Trained(Heard())
    with trained.exporter:
        trained.train(nan=True)
        assert eventually(lambda: len(seen) == 2)
    assert seen == {"torch-grad-exporter-notify", "torch-grad-exporter-notify-log"}


@pytest.mark.parametrize(
    "answer", [None, Answer(hangs=True), Answer(drips=True), Answer(503)], ids=["refuses", "hangs", "drips", "503"]
)
def test_a_dead_receiver_costs_the_end_some_seconds_at_most(answer: Answer | None) -> None:
    """`close` returns within its bound, whatever the receiver does, and another notifier has told all by then."""
    with receiver(then=answer or Answer()) as bad, receiver() as good:
        trained = Trained(Webhook(refused_url() if answer is None else bad.url, timeout=60), Webhook(good.url))
        trained.train(nan=True)
        assert good.got(1)
        begun = time.monotonic()
        trained.exporter.close()
        assert time.monotonic() - begun < notify.CLOSE_SECONDS + 5  # under load; the bound itself is 2 s
        assert alerts(good) == [("TrainingNonFiniteLoss", "firing"), ("TrainingNonFiniteLoss", "resolved")]
        counts = {
            result: trained.value("torch_grad_exporter_notifications_total", "webhook", result) for result in ("sent", "dropped")
        }
        assert counts == {"sent": 0, "dropped": 2}


def test_a_notifier_that_hangs_holds_up_no_other() -> None:
    """A webhook whose body never returns: the others are told, and the run goes on."""
    stuck = threading.Event()

    def never(_one: object) -> object:
        stuck.wait(FOREVER)
        return {}

    with receiver() as there:
        trained = Trained(Webhook(there.url, body=never), Webhook(there.url))
        trained.train(nan=True)
        assert there.got(1)
        stuck.set()
        trained.exporter.close()


def test_no_secret_anywhere(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """With every logger at DEBUG and receivers that fail in each way: not in log, output, metrics, page or `repr`."""
    caplog.set_level(logging.DEBUG)
    redirect = Answer(302, {"Location": f"http://x/{SECRET}"})
    with (
        receiver(then=redirect) as redirects,
        receiver(then=Answer(404)) as refuses,
        receiver(then=Answer(hangs=True)) as hangs,
        receiver() as good,
    ):
        urls = [redirects.url, refuses.url, hangs.url, good.url, refused_url(), f"https://{good.root[7:]}/{SECRET}"]
        made = [Webhook(url, headers={"X-Token": SECRET}, timeout=0.2) for url in urls]
        trained = Trained(*made, Alertmanager(refuses.url), Log(), port=0, addr="127.0.0.1")
        trained.train(nan=True)
        for there in (redirects, refuses, hangs, good):
            assert there.got(1)
        assert eventually(lambda: errors(trained.exporter)["notify"] >= 5)
        assert trained.exporter.url is not None
        with urllib.request.urlopen(trained.exporter.url, timeout=PATIENCE) as scrape:
            shown = [scrape.read().decode()]
        shown += [repr(trained.exporter), repr(made), repr(trained.exporter.settings), str(trained.exporter.problems())]
        shown.append(json.dumps(trained.exporter._view.live.everything(fresh=True)))
        shown.append(str(threading.enumerate()))
        trained.exporter.close()
    output = capfd.readouterr()
    everything = "".join([caplog.text, output.out, output.err, *shown])
    assert SECRET not in everything
    assert "webhook-2: HTTP 404" in everything


def test_judging_that_fails_is_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Ten failures in a row: counted under `notify`, one line says that judging is off, and the training goes on."""
    monkeypatch.setattr(notify, "EVALUATION_SECONDS", 0.0)

    def broken(_self: notify.Notify, *, last: bool = False) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(notify.Notify, "evaluate", broken)
    trained = Trained(Log())
    assert eventually(lambda: errors(trained.exporter)["notify"] == 10)
    assert eventually(lambda: "notify (judging) failed 10 times in a row and is switched off" in caplog.text)
    trained.train()
    trained.exporter.close()
    assert errors(trained.exporter)["notify"] == 10


FORK = """
import os, sys, time, torch
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Alertmanager, Log, Webhook

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exporter = start_exporter(model, None, every=1, alerts=[Log(), Webhook(sys.argv[1]), Alertmanager(sys.argv[2])])
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    exporter.observe(loss=float("nan"))
child = os.fork()
if child == 0:
    exporter.observe(loss=float("nan"))
    print(len(exporter.collect()) > 0, exporter.problems() is not None, flush=True)
    exporter.close()
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
sys.stdin.readline()
exporter.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_forked_child_tells_nothing() -> None:
    """A child that is forked while problems are judged can scrape, close and end; all that is told comes from the parent, once."""
    with receiver() as there, receiver() as dead:
        command = [sys.executable, "-c", FORK, there.url, dead.root]
        program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with program:
            assert program.stdout is not None
            assert [program.stdout.readline() for _ in range(2)] == ["True True\n", "0\n"]
            assert there.got(1)
            program.communicate("\n", timeout=PATIENCE)
        assert alerts(there) == [("TrainingNonFiniteLoss", "firing"), ("TrainingNonFiniteLoss", "resolved")]
        assert len(dead.asked) == 2


def test_problems_are_unchanged_by_it() -> None:
    """`exporter.problems()` is the same list with notifiers and without."""

    def found(*notifiers: Notifier) -> Sequence[Problem]:
        trained = Trained(*notifiers)
        with trained.exporter:
            trained.train(nan=True)
            assert eventually(lambda: bool(trained.exporter.problems()))
            return trained.exporter.problems()

    assert [one.alert for one in found(Log())] == [one.alert for one in found()] == ["TrainingNonFiniteLoss"]
