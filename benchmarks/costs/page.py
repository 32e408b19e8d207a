"""The live page: what its history and its answers take of a process of 300 layers, and what that is of the time while it is open.

Processor time of the process, since collectors run in threads of their own, while the training stands still: an upper bound of
what a training loses that needs the interpreter meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from benchmarks import record
from benchmarks.costs.scrape import Layers, trained
from benchmarks.costs.timing import times
from torch_grad_exporter import Exporter
from torch_grad_exporter.outputs.http.messages import Request
from torch_grad_exporter.outputs.live.history import QUANTITIES, RECORD_SECONDS, Moment, Window
from torch_grad_exporter.outputs.live.step_rows import SCALARS

LAYERS = 300
RECORDS = 5_000
POLL_SECONDS = 2.0
"""Between two looks of the page."""

GZIP = {"accept-encoding": "gzip"}


def measure(seconds: float) -> record.Table:
    """All of it, each for about half of these seconds."""
    torch.set_num_threads(1)
    logging.getLogger("torch_grad_exporter").setLevel(logging.ERROR)
    model = Layers(LAYERS)
    with trained(model) as exporter:
        _fill(exporter)
        found = {
            what: 1e3 * median(times(action, seconds, clock=time.process_time)[1:]) for what, action in _actions(exporter).items()
        }
        size = exporter._stages.view.history.nbytes
    often = sum(found[what] for what in POLLED) / POLL_SECONDS + found["a record"] / RECORD_SECONDS
    rows: list[list[record.Cell]] = [[what, round(ms, 2)] for what, ms in found.items()]
    notes = [
        f"While a page is open: {often / 10:.2f} % of a core; while none is: {found['a record'] / 10 / RECORD_SECONDS:.2f} %.",
        f"The history of {LAYERS} layers takes {size / 2**20:.1f} MiB after {RECORDS:,} records.",
    ]
    return record.table(f"The live page, {LAYERS} layers", ("what", "median ms"), rows, notes)


POLLED = ("the state", "what is new of the run", "what is new of the layers")


def _fill(exporter: Exporter) -> None:
    """A long run, as the history would have recorded it."""
    random, history = np.random.default_rng(0), exporter._stages.view.history
    names = [f"blocks.{number}" for number in range(LAYERS)]
    now = [time.time() - RECORD_SECONDS * (RECORDS + 1)]
    own, history._now = history._now, lambda: now[0]
    for number in range(RECORDS):
        now[0] += RECORD_SECONDS
        values = random.lognormal(size=(LAYERS, len(QUANTITIES))).astype(np.float32)
        scalars = random.random(len(SCALARS)).astype(np.float32)
        moment = Moment(number + 10**6, 20 * number, names, values, scalars)
        history._moment, before = (lambda moment=moment: moment), history._moment
        history.record_if_due()
        history._moment = before
    history._now, history._next = own, 0.0


def _actions(exporter: Exporter) -> dict[str, Callable[[], object]]:
    page, history = exporter._stages.view.page, exporter._stages.view.history
    stride = history.run(Window(whole=True)).stride
    live = exporter._stages.view.live

    def get(name: str, query: str = "") -> Callable[[], object]:
        return lambda: page(Request("GET", f"/api/v1/{name}", GZIP, query))

    def new(name: str, query: str) -> object:
        # As the page asks: from the last record that it has.
        return get(name, f"{query}view=recent&since={history.run(Window(whole=False, since=10**12)).first - 1}")()

    def fresh_state() -> object:
        live._taken = 0.0  # as if the scrape before were too old
        return page(Request("GET", "/api/v1/status", GZIP))

    def look() -> None:
        history._next, history._seen = 0.0, (0, 0)
        history.record_if_due()

    return {
        "a record": look,
        "the state": fresh_state,
        "what is new of the run": lambda: new("run", ""),
        "what is new of the layers": lambda: new("layers", "quantity=norm&"),
        "the whole run, at first": get("run", f"view=whole&stride={stride + 1}"),
        "all layers over the whole run, at first": get("layers", "quantity=norm&view=whole"),
        "a layer": get("layer", "name=blocks.7"),
        "all of it, to be saved": get("saved"),
    }
