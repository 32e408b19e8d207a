"""A training process with an exporter, to be abused from outside, and the handle by which that is told what it finds.

It trains all the time and answers a word on its input with one line: what it holds, how many steps it has made, how many
failures were counted. What it writes to its standard error, its log among it, is kept: a training that is left alone says
nothing there.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import select
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

import psutil
import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import record
from benchmarks.scraped import Model
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.outputs.http.clients import Client

OURS = "torch-grad-exporter"
"""How the names of the exporter's threads begin."""


@dataclass(frozen=True, slots=True)
class State:
    """What the victim holds. `ours`: threads of the exporter, of all `threads`. `connections`: clients in its memory.

    Each of `ours` may keep the client that it had to do with last, whose socket is closed.
    """

    steps: int
    errors: int
    threads: int
    ours: int
    descriptors: int
    connections: int
    resident: int


class Victim:
    """The process. It listens at `url`, on loopback, as soon as it is made.

    `layers` beside a small perceptron give series; a label of `label` characters on each makes the scrape longer. It rests `pace`
    seconds between two steps. A context manager: leaving it ends the process.
    """

    def __init__(self, *, layers: int = 0, label: int = 1, pace: float = 0.0) -> None:
        # A socket that is left to the garbage collector shows in the log as well.
        arguments = ["--layers", str(layers), "--label", str(label), "--pace", str(pace)]
        command = [sys.executable, "-W", "always::ResourceWarning", "-m", "benchmarks.abuse_victim", *arguments]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when the process has ended
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(  # noqa: S603 - ourselves
            command, stdin=pipe, stdout=pipe, stderr=self._log, text=True, cwd=record.ROOT
        )
        self.port: int = self._answer()["port"]
        self.url = f"http://127.0.0.1:{self.port}/metrics"

    def state(self) -> State:
        """What it holds just now; it goes on training, if it did."""
        return self._told("state")

    def pause(self) -> State:
        """Stops training, so that the numbers stay what they are."""
        return self._told("pause")

    def go_on(self) -> State:
        """Trains again."""
        return self._told("go on")

    def close_exporter(self) -> State:
        """Closes the exporter; what is left then."""
        return self._told("close")

    def log(self) -> str:
        """What it has written to its standard error so far."""
        self._log.seek(0)
        return self._log.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._process.communicate(timeout=60)
        self._log.close()

    def _told(self, word: str) -> State:
        if self._process.stdin is not None:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        return State(**self._answer())

    def _answer(self) -> dict[str, int]:
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the training process has ended: {self.log()}")
        answer: dict[str, int] = json.loads(line)
        return answer


def settled(victim: Victim, before: State, seconds: float = 5.0) -> State:
    """The state once it holds no more than before, or after some seconds: the last answer may still be on its way."""
    end = time.monotonic() + seconds
    while kept(before, now := victim.state()) and time.monotonic() < end:
        time.sleep(0.05)
    return now


def kept(before: State, after: State) -> list[str]:
    """What a victim still holds that it did not hold before, or has counted as a failure of its own."""
    grown = [name for name in ("threads", "descriptors", "errors") if getattr(after, name) > getattr(before, name)]
    found = [f"{getattr(after, name)} {name}, {getattr(before, name)} before" for name in grown]
    if after.connections > after.ours:
        found.append(f"{after.connections} clients remembered by {after.ours} threads")
    return found


def misread(victim: Victim, seconds: float = 60.0) -> list[str]:
    """What is wrong with the victim's next scrape: read by another project's parser, it has to have the steps that were made."""
    steps = victim.pause().steps
    try:
        end = time.monotonic() + seconds
        # The body of the last second may be from before the pause.
        while f" {steps}.0\n" not in (body := _body(victim.url)) and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        victim.go_on()
    samples = (sample for family in text_string_to_metric_families(body) for sample in family.samples)
    seen = [sample.value for sample in samples if sample.name == "torch_train_steps_total"]
    return [] if seen == [steps] else [f"a scrape says {seen} steps, there were {steps}"]


def _body(url: str) -> str:
    with urllib.request.urlopen(url, timeout=120) as answer:  # noqa: S310 - our own server
        body: bytes = answer.read()
    return body.decode()


class Training:
    """What runs in the process: it trains until its input ends."""

    def __init__(self, layers: int, label: int, pace: float) -> None:
        torch.manual_seed(0)
        self._pace = pace
        self._model = Model(layers)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-6)
        self._inputs = torch.randn(8, 256)
        self._steps = 0
        self._exporter: Exporter = start_exporter(
            self._model, port=0, addr="127.0.0.1", max_layers=1000, labels={"note": label * "x"}
        )

    def run(self) -> None:
        """Says its port, then trains and answers."""
        for _ in range(30):
            self._step(everything=True)
        print(json.dumps({"port": self._exporter.port}), flush=True)
        paused = False
        while True:
            if select.select([sys.stdin], [], [], None if paused else self._pace)[0]:
                word = sys.stdin.readline().strip()
                if not word:
                    break
                if word == "close":
                    self._exporter.close()
                paused = word == "pause" or (paused and word != "go on")
                print(json.dumps(asdict(self._state())), flush=True)
            else:
                self._step()
        self._exporter.close()

    def _step(self, *, everything: bool = False) -> None:
        self._optimizer.zero_grad()
        self._model(self._inputs, everything=everything).square().mean().backward()
        self._optimizer.step()
        self._steps += 1

    def _state(self) -> State:
        process = psutil.Process()
        # First, since collecting takes a thread for a moment.
        held = (process.num_threads(), _threads_of_ours(), process.num_fds(), _connections(), process.memory_info().rss)
        families = {family.spec.name: family for family in self._exporter.collect()}
        return State(self._steps, int(families["torch_grad_exporter_errors_total"].values.sum()), *held)


def _threads_of_ours() -> int:
    return sum(thread.name.startswith(OURS) for thread in threading.enumerate())


def _connections() -> int:
    """Those in memory: of the server's table, and the last one of each thread. By type, since torch minds `isinstance`."""
    gc.collect()  # Tornado leaves the connection of a head that is too long in a cycle
    return sum(issubclass(type(one), Client) for one in gc.get_objects())


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.abuse_victim", description=__doc__)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--label", type=int, default=1)
    parser.add_argument("--pace", type=float, default=0.0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("torch_grad_exporter").setLevel(logging.WARNING)  # without the line that says where it serves
    Training(chosen.layers, chosen.label, chosen.pace).run()


if __name__ == "__main__":
    main()
