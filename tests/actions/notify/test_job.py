"""Several ranks: rank 0 sends each problem of all once; without it each rank sends its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.notified import Clock, Judged, Receiver, notification, receiver
from tests.support.ranks import run_ranks
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Webhook
from torch_grad_exporter.actions.notify.notify import GONE_SECONDS, JobReports
from torch_grad_exporter.distributed.store import JobStore
from torch_grad_exporter.rules import Problem

SPIKES = Problem("LossSpike", "warning", "It jumps.")
STALLED = Problem("TrainingStalled", "critical", "Nothing happens.")
FAILED = Problem("TrainingFailed", "critical", "An exception ended the training.")


class Ranks:
    """Ranks with one store, whose clock advances by a second with each evaluation of all."""

    def __init__(self, there: Receiver, ranks: int = 3, connect: Callable[[], object] | None = None) -> None:
        shared = dist.HashStore()
        self.clock = Clock()
        self.stores = [JobStore(connect or (lambda: shared)) for _ in range(ranks)]
        self.ranks = [
            Judged(Webhook(there.url), rank=rank, job=JobReports(store, rank, ranks, clock=self.clock))
            for rank, store in enumerate(self.stores)
        ]

    def seconds(self, count: int, problems: dict[int, list[Problem]], *, without: tuple[int, ...] = ()) -> None:
        """Evaluate all ranks but some this many times, with these problems by rank."""
        for _ in range(count):
            self.clock.time += 1
            for rank, judged in enumerate(self.ranks):
                if rank not in without:
                    judged.at(self.clock.time, *problems.get(rank, []))

    def close(self) -> None:
        for store in self.stores:
            store.close()


def sent(there: Receiver) -> list[tuple[str, str, int]]:
    """Return alert, status and rank of each notification."""
    return [(asked.json["alert"], asked.json["status"], asked.json["rank"]) for asked in there.asked]


def test_rank_0_sends_each_problem_once() -> None:
    """A problem of all ranks and one of rank 2 begin and end once each, with the rank that has it."""
    with receiver() as there:
        scene = Ranks(there)
        scene.seconds(5, {})
        scene.seconds(5, {0: [SPIKES], 1: [SPIKES], 2: [SPIKES, STALLED]})
        assert sorted(sent(there)) == [("LossSpike", "firing", 0), ("TrainingStalled", "firing", 2)]
        scene.seconds(5, {1: [SPIKES]})  # it goes on as long as any rank has it, under the name that it began with
        assert sent(there)[2:] == [("TrainingStalled", "resolved", 2)]
        scene.seconds(5, {})
        assert sent(there)[3:] == [("LossSpike", "resolved", 0)]
        scene.close()


def test_without_rank_0_each_rank_sends_its_own() -> None:
    """After ten seconds without rank 0 the others send their own, and when it is back it sends for all."""
    with receiver() as there:
        scene = Ranks(there)
        scene.seconds(5, {})
        scene.seconds(int(GONE_SECONDS), {1: [STALLED], 2: [STALLED]}, without=(0,))
        assert sent(there) == []
        scene.seconds(5, {1: [STALLED], 2: [STALLED]}, without=(0,))
        assert sorted(sent(there)) == [("TrainingStalled", "firing", 1), ("TrainingStalled", "firing", 2)]
        scene.seconds(5, {1: [STALLED], 2: [STALLED]})
        assert sent(there)[2:] == [("TrainingStalled", "firing", 1)]
        scene.close()


def test_reports_of_an_ended_process_are_ignored() -> None:
    """A report of a process before a restart is neither a problem nor a sign of rank 0."""
    shared, clock = dist.HashStore(), Clock()
    store = JobStore(lambda: shared)
    active = {("LossSpike", "warning", None): notification()}
    for rank in (0, 1):
        for _ in range(3):
            JobReports(store, rank, 2, clock=clock).exchange(active)
    first, second = (JobReports(store, rank, 2, clock=clock) for rank in (0, 1))
    assert first.exchange({}) == {}
    store.publish("notify/0", b"[1, 3, []]")  # as it was before the restart
    clock.time = GONE_SECONDS - 1
    assert second.exchange(active) is None
    clock.time = GONE_SECONDS + 1
    assert second.exchange(active) == active
    store.close()


def test_a_failing_store_leaves_ranks_alone() -> None:
    """With a failing store rank 0 sends at once, and the others after ten seconds."""

    def broken() -> object:
        raise OSError("gone")

    with receiver() as there:
        scene = Ranks(there, ranks=2, connect=broken)
        scene.seconds(1, {0: [SPIKES], 1: [SPIKES]})
        assert sent(there) == [("LossSpike", "firing", 0)]
        scene.seconds(int(GONE_SECONDS) + 1, {0: [SPIKES], 1: [SPIKES]})
        assert sent(there)[1:] == [("LossSpike", "firing", 1)]
        scene.close()


def test_a_failed_rank_sends_its_own_end() -> None:
    """A rank that fails sends so itself, and rank 0 does not repeat it."""
    with receiver() as there:
        scene = Ranks(there)
        scene.seconds(5, {})
        scene.ranks[1].at(6.0, FAILED, last=True)
        assert sent(there) == [("TrainingFailed", "firing", 1)]
        scene.seconds(5, {}, without=(1,))
        assert len(sent(there)) == 1
        scene.close()


def test_wrong_reports_are_ignored() -> None:
    """Content that is not a report raises nothing and adds nothing."""
    store = JobStore(dist.HashStore)
    rank_0 = JobReports(store, 0, 2, clock=Clock())
    for content in (b"", b"{}", b'[1, 2, [["a", "b", null, {}]]]', b"\xff"):
        store.publish("notify/1", content)
        assert rank_0.exchange({}) == {}
    store.close()


def _rank(rank: int, folder: str, url: str) -> None:
    """Train a rank of a real job whose losses are NaN."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"port": None, "run": "two ranks", "every": 1, "alerts": [Webhook(url)]}
    with start_exporter(model, **options) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            exporter.observe(loss=float("nan"))
        done = Path(folder) / "done"
        assert eventually(done.exists)
        dist.barrier()


@pytest.mark.process
def test_two_processes_send_once(tmp_path: Path) -> None:
    """Two ranks with the same fault send its beginning once and its end once."""
    with receiver() as there:

        def finish() -> None:
            there.got(1)
            (tmp_path / "done").touch()

        thread = threading.Thread(target=finish)
        thread.start()
        run_ranks(_rank, str(tmp_path), there.url)
        thread.join()
        bodies = [json.loads(asked.body) for asked in there.asked]
    sent = [(body["alert"], body["status"], body["run"]) for body in bodies]
    assert sent[0] == ("TrainingNonFiniteLoss", "firing", "two ranks")
    assert sent[1:] in ([], [("TrainingNonFiniteLoss", "resolved", "two ranks")])  # a slow machine has no time for it at the end
