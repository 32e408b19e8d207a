"""The live page's server side: its JSON is what `/metrics` says, its answers are safe, and nothing that hangs holds it up."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import json
import logging
import math
import os
import re
import socket
import threading
import time
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import Key, errors, key, value, values
from tests.support.tools import FOREVER, PATIENCE, REPOSITORY, eventually

import tests.support.properties  # isort: skip  # noqa: F401 - the profile
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.collectors.clipping import GRAD_CLIP_COEFFICIENT
from torch_grad_exporter.collectors.gradients import (
    GRAD_DEAD_RATIO,
    GRAD_GLOBAL_NORM,
    GRAD_MISSING_PARAMETERS,
    GRAD_NONFINITE_ELEMENTS,
    GRAD_NORM,
    GRAD_NORM_DISTRIBUTION,
    GRAD_NORM_RECENT_MAX,
    GRAD_ZERO_RATIO,
)
from torch_grad_exporter.collectors.training import TRAIN_LEARNING_RATE, TRAIN_LOSS, TRAIN_STATE, TRAIN_STEPS
from torch_grad_exporter.metrics.families import Family, LabelRows, Spec
from torch_grad_exporter.outputs.http.message import Request, Response
from torch_grad_exporter.outputs.http.server import MetricsServer
from torch_grad_exporter.outputs.http.shared import ScrapeBusyError
from torch_grad_exporter.outputs.live import latest as latest_module
from torch_grad_exporter.outputs.live import view as view_module
from torch_grad_exporter.outputs.live.history import QUANTITIES, History, Moment, Window
from torch_grad_exporter.outputs.live.live import NONFINITE, Live, Run, encoded
from torch_grad_exporter.outputs.live.pages import CSP, TYPES, Pages
from torch_grad_exporter.outputs.live.recorder import recorder
from torch_grad_exporter.outputs.live.rows import SCALARS
from torch_grad_exporter.outputs.live.track import WHOLE
from torch_grad_exporter.outputs.prometheus.text import Renderer
from torch_grad_exporter.rules import RULES

NOW = 1_800_000_000.0
PAGE = REPOSITORY / "torch_grad_exporter" / "outputs" / "live" / "page"
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>",
    "schicht.ä.層.🔥",
    "a/b?c&d=e#f+g%2F h",
    "lone \ud800",
    '"\\\n\0',
    "",
]
NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Json = dict[str, Any]


def family(spec: Spec, rows: Mapping[tuple[str, ...], float] | float) -> Family:
    """A metric with these rows, or without labels."""
    rows = rows if isinstance(rows, Mapping) else {(): rows}
    return Family(spec, np.array(list(rows.values()), dtype=np.float64), LabelRows(tuple(rows)))


def decoded(answer: Json) -> np.ndarray:
    """The values of `api/v1/layers`, shape (n, layers), by what docs/live.md says."""
    raw, wide = base64.b64decode(answer["codes"]), len(answer["layers"])
    assert len(raw) == 2 * wide * len(answer["times"])
    found = np.full((len(answer["times"]), wide), np.nan)
    for time_ in range(len(answer["times"])):
        for layer in range(wide):
            at = 2 * (time_ * wide + layer)
            code = raw[at] + 256 * raw[at + 1]
            value = answer["low"] + (code - 1) / 65533 * (answer["high"] - answer["low"])
            shown = 10**value if answer["scale"] == "log" else value
            found[time_, layer] = math.nan if code == 0 else math.inf if code == 65535 else shown
    return found


def number(value: object) -> float:
    """A number of the JSON; NaN where there is none."""
    return math.nan if value is None else NUMBERS[value] if isinstance(value, str) else float(value)  # type: ignore[arg-type]


@dataclass
class Made:
    """A run by hand: what it scrapes, and what its history is given."""

    names: list[str] = field(default_factory=lambda: ["a", "b"])
    families: list[Family] = field(default_factory=list)
    now: float = NOW
    steps: int = 0
    scrapes: int = 0
    targets: bytes = b"[]"
    rows: np.ndarray | None = None
    scalars: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0)
    sharded: frozenset[str] = frozenset()
    failure: Exception | None = None
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_go_on.set()
        self.history = History(self.moment, now=lambda: self.now)
        run = Run("run", 0, 3, "node0", "0.1.0")
        self.live = Live(run, self.history, self.scrape, targets=lambda: self.targets, now=lambda: self.now)
        self.pages = Pages(self.live)

    def moment(self) -> Moment:
        count = len(self.names) * len(QUANTITIES)
        rows = np.arange(1, count + 1).reshape(-1, len(QUANTITIES)) * (1 + self.steps) if self.rows is None else self.rows
        scalars = np.array(self.scalars, dtype=np.float32)
        return Moment(self.steps, self.steps, self.names, rows.astype(np.float32), scalars, sharded=self.sharded)

    def scrape(self) -> list[Family]:
        self.scrapes += 1
        assert self.may_go_on.wait(FOREVER)
        if self.failure is not None:
            raise self.failure
        return self.families

    def record(self, times: int = 1) -> Made:
        for _ in range(times):
            self.steps += 1
            self.now += 1
            self.history.record_if_due()
        return self

    def ask(self, target: str, **headers: str) -> Response:
        path, _, query = target.partition("?")
        found = self.pages.answer(Request("GET", path, {name.replace("_", "-"): value for name, value in headers.items()}, query))
        assert found is not None
        return found

    def json(self, target: str) -> Json:
        answer = self.ask(target)
        assert answer.status == HTTPStatus.OK, answer.body
        return strict(answer.body)

    def status(self, target: str) -> int:
        return self.ask(target).status.value


def strict(body: bytes) -> Json:
    """JSON as browsers read it: numbers that are not finite are none."""

    def refuse(text: str) -> float:
        raise ValueError(text)

    found: Json = json.loads(body.decode(), parse_constant=refuse)
    return found


# A real training


@dataclass
class Trained:
    """A small training that is served, and what was in `/metrics` after each of its steps."""

    exporter: Exporter
    scrapes: dict[int, dict[Any, float]]

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.exporter.port or 0, timeout=PATIENCE)) as client:
            client.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            answer = client.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def largest(self, view: str, step: int, metric: str, layer: str | None = None) -> float:
        """The largest of a metric over the samples of the record or bin of this step, whose value is the last one."""
        return max(self.since_the_record_before(view, step, metric, layer), key=abs, default=math.nan)

    def since_the_record_before(self, view: str, step: int, metric: str, layer: str | None = None) -> list[float]:
        """The values of a metric at each step of the record or bin of this step."""
        kind = "run" if layer is None else "layers"
        steps = [0, *self.json(f"/api/v1/{kind}?view={view}")["steps"]]
        ours = range(int(steps[steps.index(step) - 1]) + 1, step + 1)
        return [value for at in ours for name, value in self.scrapes[at].items() if name[0] == metric and of(layer, name)]

    def json(self, path: str) -> Json:
        status, _, body = self.get(path)
        assert status == 200, body
        return strict(body)


def of(layer: str | None, series: Key) -> bool:
    """Whether a series is of a layer, or of none."""
    return dict(series[1]).get("layer") == layer


def train(exporter: Exporter, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Some steps, the loss of which is observed."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        exporter.observe(loss=loss, samples=5, tokens=50, epoch=2)


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    """30 steps, a record, 20 more, a record."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = sgd(model)
    off = dict.fromkeys(("gpu", "cuda_memory", "container"), False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recorder.__kwdefaults__, "interval", FOREVER)  # no other record than these
        exporter = start_exporter(model, 0, addr="127.0.0.1", every=1, dead_window=5, collectors=off)
    with exporter:
        made = Trained(exporter, {})
        for steps in (30, 50):
            for step in range(len(made.scrapes) + 1, steps + 1):
                train(exporter, model, optimizer, 1)
                made.scrapes[step] = values(exporter)
            assert made.scrapes[steps][key("torch_grad_captures_total", layer="first")] == steps
            exporter._view.history.finish()
            assert made.json("/api/v1/run")["steps"][-1:] == [steps]
        # The page's own scrape is shared for a second.
        assert eventually(lambda: made.json("/api/v1/status")["step"] == 50)
        yield made


def test_the_status_is_what_metrics_say(trained: Trained) -> None:
    """Each number of the status is that of the metric, and text is that of the exporter."""
    status, metrics, exporter = trained.json("/api/v1/status"), trained.scrapes[50], trained.exporter
    assert (status["run"], status["rank"], status["world_size"], status["state"]) == (exporter.run, 0, 1, "training")
    assert (status["host"], status["ranks"]) == (socket.gethostname(), [])
    for name, metric, labels in [
        ("step", "torch_train_steps_total", {"optimizer": "sgd"}),
        ("loss", "torch_train_loss", {}),
        ("epoch", "torch_train_epoch", {}),
        ("learning_rate", "torch_train_learning_rate", {"optimizer": "sgd", "group": "0"}),
        ("global_norm", "torch_grad_global_norm", {"optimizer": "sgd"}),
        ("global_norm_after_clip", "torch_grad_global_norm_after_clip", {"optimizer": "sgd"}),
        ("clip_coefficient", "torch_grad_clip_coefficient", {"optimizer": "sgd"}),
        ("started", "torch_train_start_timestamp_seconds", {}),
        ("last_step", "torch_train_last_step_timestamp_seconds", {}),
        ("last_sample_step", "torch_grad_sample_step", {}),
        ("layers", "torch_grad_exporter_layers", {}),
        ("sampling_interval_steps", "torch_grad_exporter_sampling_interval_steps", {}),
    ]:
        found = metrics.get(key(metric, **labels))
        if found is None:  # the optimizer's name is of no interest here
            [found] = [value for (other, _), value in metrics.items() if other == metric]
        assert status[name] == pytest.approx(found, rel=1e-9), name
    assert status["step"] == 50
    assert status["layers"] == 2
    assert abs(status["now"] - time.time()) < PATIENCE
    assert status["overhead_budget_ratio"] is None  # every=1 has none
    for name, metric in [
        ("nonfinite_elements", "torch_grad_nonfinite_elements_total"),
        ("nonfinite_steps", "torch_grad_nonfinite_steps_total"),
    ]:
        assert status[name] == sum(value for (other, _), value in metrics.items() if other == metric) == 0
    dead = [value for (name, _), value in metrics.items() if name == "torch_grad_dead_ratio"]
    assert status["dead_layers"] == sum(ratio > 0.9 for ratio in dead)
    resources = {row["name"]: row for row in status["resources"]}
    total = metrics[key("torch_host_memory_total_bytes")]
    assert resources["Process memory"]["limit"] == total
    assert resources["Process memory"]["value"] == pytest.approx(metrics[key("process_resident_memory_bytes")], rel=0.2)
    assert {row["unit"] for row in resources.values()} <= {"bytes", "ratio", "celsius", "watts", "cores", "count"}


def test_the_runs_records_are_what_metrics_said_then(trained: Trained) -> None:
    """Both views have each step, with its own loss, norms, learning rate and seconds."""
    for view in ("recent", "whole"):
        answer = trained.json(f"/api/v1/run?view={view}")
        assert (answer["view"], answer["first"], answer["stride"]) == (view, 0, 1)
        assert set(answer) == {"view", "first", "stride", "times", "steps", "nonfinite", *SCALARS}
        assert answer["nonfinite"] == {}
        assert answer["steps"] == list(range(1, 51))
        assert answer["times"] == sorted(answer["times"])
        assert answer["step_seconds"][0] is None
        for at, step in enumerate(map(int, answer["steps"])):
            metrics = trained.scrapes[step]
            assert answer["loss"][at] == pytest.approx(metrics[key("torch_train_loss")], rel=1e-5)
            [rate] = [value for (other, _), value in metrics.items() if other == "torch_train_learning_rate"]
            assert answer["learning_rate"][at] == pytest.approx(rate, rel=1e-5)
            for name, metric in [("norm", "torch_grad_global_norm"), ("norm_after_clip", "torch_grad_global_norm_after_clip")]:
                assert answer[name][at] == pytest.approx(trained.largest(view, step, metric), rel=1e-5), name
            assert step == 1 or answer["step_seconds"][at] > 0
            assert abs(answer["times"][at] - metrics[key("torch_train_last_step_timestamp_seconds")]) < PATIENCE


@pytest.mark.parametrize(
    ("quantity", "metric"),
    [
        ("norm", "torch_grad_norm"),
        ("zero_ratio", "torch_grad_zero_ratio"),
        ("dead_ratio", "torch_grad_dead_ratio"),
        ("zscore", "torch_grad_norm_zscore"),
    ],
)
def test_the_codes_of_the_layers_are_what_metrics_said_then(trained: Trained, quantity: str, metric: str) -> None:
    """Decoded as documented, each layer's value at steps 30 and 50 is the largest or the last of `/metrics`, within half a code."""
    for view in ("recent", "whole"):
        answer = trained.json(f"/api/v1/layers?quantity={quantity}&view={view}")
        assert (answer["quantity"], answer["view"], answer["layers"]) == (quantity, view, ["first", "second"])
        assert answer["scale"] == ("log" if quantity == "norm" else "linear")
        found, half = decoded(answer), (answer["high"] - answer["low"]) / 65533 / 2
        for step in (30, 50):
            for layer, name in enumerate(answer["layers"]):
                last = trained.scrapes[step].get(key(metric, layer=name), math.nan)
                expected = last if quantity.endswith("ratio") else trained.largest(view, step, metric, name)
                value = found[answer["steps"].index(step), layer]
                shown = (math.log10(value), math.log10(expected)) if quantity == "norm" else (value, expected)
                assert shown[0] == pytest.approx(shown[1], abs=half * 1.01 + 1e-6, nan_ok=True), name


def test_a_layer_is_what_metrics_say(trained: Trained) -> None:
    """A layer's numbers and its distribution are those of `/metrics`, and its two histories those of all layers."""
    metrics = trained.scrapes[50]
    answer = trained.json("/api/v1/layer?name=second")
    assert answer["layer"] == "second"
    for name in ("norm", "zero_ratio", "max_magnitude"):
        assert answer[name] == pytest.approx(metrics[key(f"torch_grad_{name}", layer="second")])
    assert answer["captures"] == metrics[key("torch_grad_captures_total", layer="second")] == 50
    assert answer["units"] == metrics[key("torch_grad_units", layer="second")] == 3
    bounds, counts = answer["distribution"]["bounds"], answer["distribution"]["counts"]
    assert tuple(bounds) == GRAD_NORM_DISTRIBUTION.buckets
    assert (len(counts), sum(counts)) == (len(bounds) + 1, 50)
    for bound, count in zip([*map(str, bounds), "+Inf"], np.cumsum(counts), strict=True):
        assert count == metrics[key("torch_grad_norm_distribution_bucket", layer="second", le=bound)]
    for view in ("recent", "whole"):
        for quantity in QUANTITIES:
            together = trained.json(f"/api/v1/layers?quantity={quantity}&view={view}")
            half = (together["high"] - together["low"]) / 65533
            mine = [number(value) for value in answer[view][quantity]]
            rtol, atol = (3 * half, 0.0) if together["scale"] == "log" else (0.0, half)
            np.testing.assert_allclose(mine, decoded(together)[:, 1], rtol=rtol + 1e-5, atol=atol)
            assert (answer[view]["steps"], answer[view]["stride"]) == (together["steps"], together["stride"])


def test_means_and_deviations_are_what_metrics_say() -> None:
    """With moments on the history has them of each layer, as `/metrics` has; without, neither an answer nor a file does."""
    for moments in (True, False):
        model = Perceptron()
        with start_exporter(model, 0, addr="127.0.0.1", every=1, moments=moments) as exporter:
            model(torch.randn(8, model.first.in_features)).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.01).step()
            address = (exporter.url or "").removesuffix("metrics")

            def json_of(path: str, address: str = address) -> dict[str, Any]:
                with urllib.request.urlopen(address + path) as answer:
                    return dict(json.load(answer))

            assert eventually(lambda: json_of("api/v1/status")["samples"] == 1)
            of_layer, kept = json_of("api/v1/layer?name=first")["recent"], json_of("api/v1/saved")
            if not moments:
                assert "mean" not in of_layer
                assert "mean" not in kept["layers"]
                with pytest.raises(urllib.error.HTTPError, match="400"):
                    json_of("api/v1/layers?quantity=mean")
                continue
            elements = torch.cat([p.grad.double().flatten() for p in model.first.parameters() if p.grad is not None])
            expected = {"mean": elements.mean(), "stddev": elements.std(correction=0)}
            for name, number_ in expected.items():
                assert of_layer[name][-1] == pytest.approx(float(number_), rel=1e-4, abs=1e-9)
                grid = json_of(f"api/v1/layers?quantity={name}")
                cells = np.frombuffer(base64.b64decode(grid["codes"]), dtype="<f4")
                assert grid["scale"] == "raw"
                assert cells[grid["layers"].index("first")] == pytest.approx(float(number_), rel=1e-4, abs=1e-9)
                assert kept["layers"][name]["recent"]["codes"] == grid["codes"]


def test_what_is_saved_is_all_of_it(trained: Trained) -> None:
    """`saved` has the answers of all the others, as they are."""
    saved = trained.json("/api/v1/saved")
    assert (saved["format"], saved["version"]) == ("torch_grad_exporter history", 1)
    for view in ("whole", "recent"):
        assert saved["run"][view] == trained.json(f"/api/v1/run?view={view}")
        for quantity in QUANTITIES:
            assert saved["layers"][quantity][view] == trained.json(f"/api/v1/layers?quantity={quantity}&view={view}")
    for name in ("first", "second"):
        alone = trained.json(f"/api/v1/layer?name={name}")
        assert saved["layer"][name] == {what: value for what, value in alone.items() if what not in ("whole", "recent")}
    assert saved["status"].keys() == trained.json("/api/v1/status").keys()


def test_what_is_sent_and_how(trained: Trained) -> None:
    """Every path with GET and HEAD: the type, compressed where it is accepted, never stored, and the headers for browsers."""
    for path, kind in [
        ("/", "text/html; charset=utf-8"),
        ("/static/page.js", "text/javascript; charset=utf-8"),
        ("/static/page.css", "text/css; charset=utf-8"),
        ("/api/v1/status", "application/json"),
        ("/api/v1/layers?quantity=zscore&view=whole", "application/json"),
    ]:
        status, headers, body = trained.get(path)
        assert (status, headers["content-type"], int(headers["content-length"])) == (200, kind, len(body))
        assert "content-encoding" not in headers
        status, packed, compressed = trained.get(path, accept_encoding="br, gzip")
        assert (status, packed["content-encoding"], packed["vary"]) == (200, "gzip", "Accept-Encoding")
        assert len(gzip.decompress(compressed)) > 0
        if not path.startswith("/api"):
            assert gzip.decompress(compressed) == body
        status, alone, nothing = trained.get(path, method="HEAD")
        assert (status, nothing, alone["content-type"]) == (200, b"", kind)
        assert int(alone["content-length"]) > 0
        assert trained.get(path, method="POST")[0] == 405


def test_the_runbook_has_a_section_for_each_rule(trained: Trained) -> None:
    """It is served as a page; each section can be linked to, and no link leads anywhere that is not there."""
    status, headers, body = trained.get("/runbook")
    page = body.decode()
    anchors = set(re.findall(r'id="([^"]+)"', page))
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert {rule.name for rule in RULES} == anchors
    links = set(re.findall(r'href="([^"]+)"', page))
    assert links - {f"#{anchor}" for anchor in anchors} == {".", "static/page.css"}
    assert trained.get("/static/page.css")[0] == 200


def test_problems_are_those_of_the_status(trained: Trained) -> None:
    """`exporter.problems()` has what the page lists, with what to do first; a NaN is the worst, also when closed."""
    shown = trained.json("/api/v1/status")["problems"]
    assert [problem.alert for problem in trained.exporter.problems()] == [one["alert"] for one in shown]
    model = Perceptron()
    optimizer = sgd(model)
    with start_exporter(model, None, every=1) as exporter:
        for weight in (1.0, math.nan):
            optimizer.zero_grad()
            (model(batch()).square().mean() * weight).backward()
            optimizer.step()
        assert eventually(lambda: bool(exporter.problems()))
        found = exporter.problems()
        assert (found[0].alert, found[0].severity) == ("TrainingNonFiniteGradients", "critical")
        (rule,) = [rule for rule in RULES if rule.name == found[0].alert]
        assert found[0].first_steps == rule.first_steps
    assert exporter.problems()[:1] == found[:1]


def test_no_answer_lets_a_browser_run_or_keep_anything(trained: Trained) -> None:
    """The page's answers, errors too, carry the policy that allows nothing from elsewhere, and are not stored nor sniffed."""
    assert "default-src 'none'" in CSP
    assert "unsafe" not in CSP
    assert "http" not in CSP
    for path, expected in [
        ("/", 200),
        ("/runbook", 200),
        ("/static/app.js", 200),
        ("/api/v1/status", 200),
        ("/static/nothing.js", 404),
        ("/api/v1/layer?name=%3Cscript%3E", 404),
        ("/api/v1/run?since=-1", 400),
    ]:
        status, headers, body = trained.get(path)
        assert status == expected
        assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")
        assert headers.get("content-security-policy") == CSP, path
        assert (headers.get("referrer-policy"), headers.get("cross-origin-opener-policy")) == ("no-referrer", "same-origin"), path
        assert (status == 200 and path != "/runbook") or b"<script" not in body.lower()


def test_only_the_pages_own_files_are_there(trained: Trained) -> None:
    """What leads out of the folder, is a folder, or stands elsewhere in the package, is not found."""
    for path in [
        "/static/../live.py", "/static/..%2flive.py", "/static/%2e%2e/live.py", "/static/", "/static", "/static/page",
        "/static//app.js", "/static/./app.js",
        "/static//etc/passwd", "/static/app.js/", "/static/app.js%00", "/static/APP.JS", "/page/app.js", "//",
        "/index.html", "/api", "/api/v1", "/api/v1/", "/api/v1/status/", "/api/v1/../status", "/api/v2/status", "/api/v1/Status",
    ]:  # fmt: skip
        assert trained.get(path)[0] == 404, path


def test_wrong_questions_cost_nothing_but_a_400(trained: Trained) -> None:
    """What is wrong with a query is said with a 400, an unknown layer with a 404; the exporter counts no failure of its own."""
    long = "9" * 3000
    for query in [
        "run?since=-1", "run?stride=-1", "run?since=x", "run?since=1.5", "run?since=1e3", "run?since=NaN", "run?view=all",
        "run?view=recent&view=none", f"run?stride=-{long}", "layers?quantity=loss", "layers?quantity=__class__",
        "layers?quantity=%ff", "run?since=%00", "run?" + "&".join(f"k{i}=1" for i in range(50)), "layer?name=%ff%fe",
    ]:  # fmt: skip
        assert trained.get(f"/api/v1/{query}")[0] == 400, query
    assert trained.get(f"/api/v1/run?since={'9' * 5000}")[0] == 414
    for name in ("", "third", "first%2F", "FIRST", "first%20", long):
        assert trained.get(f"/api/v1/layer?name={name}")[0] == 404
    assert trained.get("/api/v1/layer")[0] == 404
    assert errors(trained.exporter) == {}


@pytest.mark.parametrize(
    "since", [10**6, 2**31, 2**63 - 1, 2**63, 10**30, 10**3000], ids=lambda since: f"{since.bit_length()} bits"
)
def test_who_is_ahead_is_told_where_the_records_end(trained: Trained, since: int) -> None:
    """A request for more than there is, as after a restart on the same port, gives none and the number of the next one."""
    for what in ("run", "layers"):
        answer = trained.json(f"/api/v1/{what}?since={since}&stride=1")
        assert answer["steps"] == []
        assert answer["first"] == len(trained.json(f"/api/v1/{what}")["steps"])


# The page's files


def test_files_are_served_under_their_types() -> None:
    """Each file of the folder comes as it is, under the type of its name."""
    names = sorted(path.name for path in PAGE.iterdir() if path.is_file())
    assert {Path(name).suffix for name in names} <= set(TYPES)
    for name in names:
        answer = Made().ask(f"/static/{name}")
        assert (answer.status, answer.content_type) == (HTTPStatus.OK, TYPES[Path(name).suffix])
        if name != "index.html":
            assert answer.body == (PAGE / name).read_bytes()


def test_the_page_asks_for_one_script_and_one_style_with_all_files_in_order() -> None:
    """The bundle is the files that the page names, in their order; only what has to come before the first picture is apart."""
    source = (PAGE / "index.html").read_text()
    page, bundle, style = (Made().ask(path).body.decode() for path in ("/", "/static/page.js", "/static/page.css"))
    head, body = source.split("<body", 1)
    scripts = re.findall(r'<script[^>]*src="static/([^"]+)"', body)
    styles = re.findall(r'<link[^>]*href="static/([^"]+\.css)"', source)
    assert len(scripts) >= 10
    assert bundle == "\n".join((PAGE / name).read_text() for name in scripts)
    assert style == "\n".join((PAGE / name).read_text() for name in styles)
    early = re.findall(r'<script[^>]*src="static/([^"]+)"', head)
    assert re.findall(r'src="static/([^"]+)"', page) == [*early, "page.js"]
    assert re.findall(r'rel="stylesheet" href="([^"]+)"', page) == ["static/page.css"]
    left = {path.name for path in PAGE.glob("*.js")} - {*scripts, *early}
    assert left == set(), "a script that no page asks for"


def test_a_page_has_nothing_that_its_policy_forbids() -> None:
    """No script or style within the page, no handler in an attribute, nothing from elsewhere; a script ends its statement."""
    page = Made().ask("/").body.decode()
    assert re.findall(r"<script(?![^>]*\ssrc=)[^>]*>|<style|\sstyle=|\son\w+=|javascript:", page) == []
    loaded = re.findall(r'<(?:script|link|img)\b[^>]*?(?:src|href)="([^"]*)"', page)
    assert all(address.startswith(("static/", "data:")) for address in loaded)
    for path in PAGE.glob("*.js"):
        assert path.read_text().rstrip().endswith(";"), path.name


def test_names_that_are_asked_for_are_not_kept() -> None:
    """3,000 requests for files that are not there, of a kilobyte each, leave nothing behind."""
    made = Made()
    made.status("/static/nothing")
    tracemalloc.start()
    for number_ in range(3000):
        assert made.status(f"/static/{number_:01000}") == 404
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown < 500_000


def test_the_first_load_weighs_no_more_than_150_kilobytes() -> None:
    """The page, its script and its style, compressed."""
    index = Made().ask("/").body.decode()
    paths = ["/", *(f"/{name}" for name in re.findall(r'(?:src|href)="(static/[^"]+)"', index))]
    assert 10_000 < sum(len(Made().ask(path, accept_encoding="gzip").body) for path in paths) <= 150_000


# The JSON


def test_numbers_that_are_not_finite_are_strings() -> None:
    """NaN and infinities of families and of the history, in the status, in a layer and in the run; absent ones are null."""
    made = Made(
        families=[
            family(TRAIN_LOSS, math.nan),
            family(GRAD_GLOBAL_NORM, {("a",): math.inf}),
            family(TRAIN_LEARNING_RATE, {("a", "0"): -math.inf}),
            family(GRAD_NORM, {("a",): math.inf, ("b",): math.nan}),
        ],
        rows=np.array([[math.inf, math.nan, 0.5, -math.inf], [1.0, 2.0, 3.0, 4.0]]),
        scalars=(math.inf, math.nan, 3.0, -math.inf, 1e-7),
    ).record()
    status = made.json("/api/v1/status")
    assert (status["loss"], status["global_norm"], status["learning_rate"]) == ("NaN", "Infinity", "-Infinity")
    assert (status["clip_coefficient"], status["epoch"], status["samples_per_second"]) == (None, None, None)
    run = made.json("/api/v1/run")
    assert [run[name] for name in SCALARS] == [["Infinity"], [None], [3.0], ["Infinity"], [1e-7]]
    assert run["nonfinite"] == {"loss": [0], "step_seconds": [0]}
    layer = made.json("/api/v1/layer?name=a")
    assert (layer["norm"], layer["units"], layer["distribution"]) == ("Infinity", None, None)
    assert [layer["recent"][name] for name in QUANTITIES] == [["Infinity"], [None], [0.5], ["Infinity"]]
    assert layer["whole"]["nonfinite"] == layer["recent"]["nonfinite"] == {"norm": [0], "zscore": [0]}
    assert made.json("/api/v1/layer?name=b")["norm"] == "NaN"
    assert math.isinf(decoded(made.json("/api/v1/layers?quantity=zscore"))[0, 0])
    assert math.isnan(decoded(made.json("/api/v1/layers?quantity=zero_ratio"))[0, 0])


@pytest.mark.parametrize("names", [["a", "b"], ["a", "b", "c"]])
def test_what_is_not_finite_beside_what_is(names: list[str]) -> None:
    """A bin of nine numbers and one that is none has the mean or the largest of the nine, and a mark of its own in all answers."""
    made = Made(names=names)
    made.record(1000)
    good = np.full((len(names), len(QUANTITIES)), 2.0)
    for step in range(1000, 1200):
        made.rows, made.scalars = good.copy(), (float(step % 2), 2.0, 3.0, 4.0, 5.0)
        if step == 1081:
            made.rows[1, 0], made.scalars = math.inf, (math.inf, 2.0, 3.0, 4.0, 5.0)
        made.record()
    run, layers = made.json("/api/v1/run?view=whole"), made.json("/api/v1/layers?view=whole")
    at, stride = 1081 // run["stride"], run["stride"]
    assert (stride, layers["stride"], run["nonfinite"]) == (2, 4, {"loss": [at]})
    assert run["loss"][at - 1 : at + 2] == [0.5, 0.0, 0.5]  # of the bin's two losses, 0 and infinity, the finite one
    flags = flagged(layers)
    assert (np.argwhere(flags).tolist(), len(flags)) == ([[1081 // 4, 1]], len(layers["times"]))
    np.testing.assert_allclose(decoded(layers)[1081 // 4], 2.0, rtol=1e-3)
    assert made.json("/api/v1/layer?name=b")["whole"]["nonfinite"] == {"norm": [1081 // 4]}
    assert made.json("/api/v1/layer?name=a")["whole"]["nonfinite"] == {}
    part = made.json("/api/v1/layers?view=recent&since=1080")
    assert np.argwhere(flagged(part)).tolist() == [[1, 1]]
    assert math.isinf(decoded(part)[1, 1])
    assert made.json("/api/v1/run?view=recent&since=1080")["nonfinite"] == {"loss": [1]}
    assert made.json("/api/v1/layers?quantity=zscore&view=whole")["nonfinite"] == ""


def flagged(answer: Json) -> np.ndarray:
    """Which layers were not finite when, shape (n, layers), by what docs/live.md says."""
    raw, wide, count = base64.b64decode(answer["nonfinite"]), len(answer["layers"]), len(answer["times"])
    bits = "".join(f"{byte:08b}" for byte in raw)
    assert len(raw) in (0, -(-wide * count // 8))
    return np.array([bit == "1" for bit in bits[: wide * count] or "0" * wide * count]).reshape(count, wide)


def test_a_norm_before_clipping_is_no_smaller_than_after_it() -> None:
    """Of bins in which each step has a norm and one in eight a sample, which is clipped; unless gradients are made longer."""
    made = Made()
    for step in range(4 * 2 * WHOLE):
        made.scalars = (1.0, 3.0, 1.0, 4.0, 5.0) if step % 8 == 0 else (1.0, 0.25, math.nan, 4.0, 5.0)
        made.record()
    recent, whole = (made.json(f"/api/v1/run?view={view}") for view in ("recent", "whole"))
    assert {(norm, after) for norm, after in zip(recent["norm"], recent["norm_after_clip"], strict=True)} == {(3, 1), (0.25, None)}
    assert whole["stride"] == 4
    assert {(norm, after) for norm, after in zip(whole["norm"], whole["norm_after_clip"], strict=True)} == {(1, 1), (0.25, None)}
    made.families = [family(GRAD_CLIP_COEFFICIENT, {("a",): 4.0})]
    made.json("/api/v1/status")
    assert set(made.json("/api/v1/run?view=whole")["norm"]) == {0.9375, 0.25}


def test_the_norms_of_a_training_that_tells_each_and_is_sampled_now_and_then() -> None:
    """With observe(grad_norm=) at each step and a sample at each eighth no record has less before clipping than after."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer, norms = sgd(model), [math.nan]
    with start_exporter(model, 0, addr="127.0.0.1", every=8) as exporter:
        view = exporter._view
        view.close()
        for step in range(1, 65):
            optimizer.zero_grad()
            (model(batch()).square().mean() * math.exp(2 * math.sin(step))).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            exporter.observe(grad_norm=norms[-1])
            if step % 5 == 0:
                assert eventually(lambda: values(exporter)[key("torch_grad_captures_total", layer="first")] >= (step - 1) // 8)  # noqa: B023
                view.history.finish()
        status, run = view.live.status(), view.live.run(Window(whole=False))
    both = [pair for pair in zip(run["norm"], run["norm_after_clip"], strict=True) if None not in pair]  # type: ignore[call-overload]
    assert len(both) >= 6
    assert all(before >= after for before, after in both)
    assert len({before for before, after in both if after == pytest.approx(0.5, rel=1e-4)}) > 1
    sampled = int(status["last_sample_step"])  # type: ignore[call-overload]
    before = status["global_norm_after_clip"] / status["clip_coefficient"]  # type: ignore[operator]
    assert before == pytest.approx(norms[sampled], rel=1e-4) != pytest.approx(status["global_norm"], rel=1e-2)


def test_layers_of_which_there_is_a_part_are_named() -> None:
    """Those whose norm is of this rank's part, in the answers about all layers and about one."""
    made = Made(names=["a", "b", "c"], sharded=frozenset({"c", "a"})).record()
    assert made.json("/api/v1/layers")["sharded"] == made.json("/api/v1/layers?quantity=zscore")["sharded"] == ["a", "c"]
    assert [made.json(f"/api/v1/layer?name={name}")["sharded"] for name in "abc"] == [True, False, True]
    assert [one["sharded"] for one in made.json("/api/v1/saved")["layer"].values()] == [True, False, True]


def test_what_ended_goes_on_no_longer() -> None:
    """After the end the status says when and by what that was, the first time, and the rates are those of then."""
    made = Made()
    for count in range(0, 130, 10):
        made.families = [family(TRAIN_STATE, {("training",): 1.0}), family(TRAIN_STEPS, {("a",): 5.0 * count})]
        made.now = NOW + count
        status = made.json("/api/v1/status")
        assert (status["ended"], status["ended_by"]) == (None, None)
    made.live.end("ValueError")
    made.now += 30
    made.live.end()
    for _ in range(3):
        status = made.json("/api/v1/status")
        assert (status["ended"], status["ended_by"]) == (NOW + 120, "ValueError")
        assert (status["steps_per_second"], status["step"]) == (pytest.approx(5.0), 600)
        made.now += 30


def test_before_the_first_sample_everything_is_empty() -> None:
    """A run that has not begun answers with empty lists and without a number."""
    made = Made()
    assert made.json("/api/v1/layers")["layers"] == made.json("/api/v1/layers")["times"] == []
    assert made.json("/api/v1/run?view=whole")["loss"] == []
    status = made.json("/api/v1/status")
    assert (status["state"], status["step"], status["samples"], status["problems"], status["loss"]) == (None, None, 0, [], None)
    assert made.json("/api/v1/saved")["layer"] == {}
    made.families, made.now = [family(TRAIN_STATE, {("initialising",): 1.0})], made.now + 1
    status = made.json("/api/v1/status")
    assert (status["state"], status["step"], status["ended"]) == ("initialising", 0, None)


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_layer_may_have_any_name(name: str) -> None:
    """Markup, other scripts, separators of addresses and half of a character come back as they are, in all answers."""
    made = Made(names=["first", name], families=[family(GRAD_DEAD_RATIO, {(name,): 1.0})]).record()
    assert made.json("/api/v1/layers")["layers"] == ["first", name]
    assert set(made.json("/api/v1/saved")["layer"]) == {"first", name}
    [problem] = made.json("/api/v1/status")["problems"]
    assert (problem["layer"], name in problem["text"]) == (name, True)
    for safe in ("", "/"):
        with contextlib.suppress(UnicodeEncodeError):  # half of a character cannot be asked for, no more than by a browser
            assert made.json(f"/api/v1/layer?name={quote(name, safe=safe)}")["layer"] == name
    raw = made.ask("/api/v1/layers").body
    assert raw.isascii()


def test_the_last_of_two_answers_to_a_question_counts() -> None:
    """Where a key stands twice, the last one is taken."""
    made = Made().record(3)
    assert made.json("/api/v1/run?view=whole&view=recent&since=0&since=2")["steps"] == [3]
    assert made.json("/api/v1/layer?name=none&name=a")["layer"] == "a"


def test_the_other_ranks_are_linked() -> None:
    """Each other rank of the list, with its scheme; not this one."""
    groups = [
        {"targets": [f"node{rank}:9100"], "labels": {"rank": str(rank), "host": f"node{rank}", **scheme}}
        for rank, scheme in enumerate([{}, {"__scheme__": "https"}, {}])
    ]
    made = Made(targets=json.dumps(groups).encode())
    assert made.json("/api/v1/status")["ranks"] == [
        {"rank": 1, "host": "node1", "url": "https://node1:9100/"},
        {"rank": 2, "host": "node2", "url": "http://node2:9100/"},
    ]


def test_answers_put_together_are_the_whole() -> None:
    """A page that asks every few seconds over 2,500 records, for what is new, has in the end what one gets that asks once."""
    made, have, since, stride = Made(names=["x"]), {"recent": [], "whole": []}, 0, 0
    for records in [1, 3, 600, 1, 5, 1190, 700]:
        made.record(records)
        recent = made.json(f"/api/v1/run?view=recent&since={since}")
        have["recent"] = [*(have["recent"] if recent["first"] == since else []), *recent["steps"]]
        since = recent["first"] + len(recent["steps"])
        whole = made.json(f"/api/v1/run?view=whole&since={max(len(have['whole']) - 1, 0)}&stride={stride}")
        have["whole"], stride = [*have["whole"][: whole["first"]], *whole["steps"]], whole["stride"]
    for view in ("recent", "whole"):
        answer = made.json(f"/api/v1/run?view={view}")
        assert have[view][-len(answer["steps"]) :] == answer["steps"]
        assert len(answer["steps"]) >= 480
    assert have["whole"] == made.json("/api/v1/run?view=whole")["steps"]
    first = made.json("/api/v1/layers?view=whole&since=3&stride=8")
    everything = made.json("/api/v1/layers?view=whole")
    assert everything["stride"] == 8
    assert (first["first"], first["steps"]) == (3, everything["steps"][3:])
    assert made.json("/api/v1/layers?view=whole&since=3&stride=4")["first"] == 0


# Codes

ANY = st.one_of(st.sampled_from([math.nan, math.inf, 0.0, 1e-38, 3e38]), st.floats(2.0**-126, 2.0**127, width=32))


@given(rows=st.integers(1, 4).flatmap(lambda wide: st.lists(st.lists(ANY, min_size=wide, max_size=wide), min_size=1, max_size=5)))
def test_codes_are_right_within_half_a_code(rows: list[list[float]]) -> None:
    """By logarithm and linear: NaN is no value, infinity is not finite, a zero is the lowest code, all else within half a code."""
    given_ = np.array(rows, dtype=np.float32)
    for log in (True, False):
        codes, low, high = encoded(given_, log=log)
        assert codes.dtype == np.uint16
        assert math.isfinite(low)
        assert low < high
        np.testing.assert_array_equal(codes == 0, np.isnan(given_))
        np.testing.assert_array_equal(codes == NONFINITE, np.isinf(given_))
        known = np.isfinite(given_) & ((given_ > 0) | (not log))
        wanted = np.log10(given_[known].astype(np.float64)) if log else given_[known].astype(np.float64)
        shown = low + (codes[known].astype(np.float64) - 1) / 65533 * (high - low)
        np.testing.assert_allclose(shown, wanted, atol=(high - low) / 65533 * 0.501, rtol=1e-12)
        if log:
            assert set(codes[given_ == 0].tolist()) <= {1}


@pytest.mark.parametrize("value", [5.0, 0.0, -3.0, math.nan, math.inf])
def test_codes_of_one_value_only(value: float) -> None:
    """Where all values are the same, also none or infinity, the scale has a width and each is told as what it is."""
    codes, low, high = encoded(np.full((2, 3), value, dtype=np.float32), log=False)
    assert high > low
    expected = {True: 0, False: NONFINITE if math.isinf(value) else 1}[math.isnan(value)]
    assert np.unique(codes).tolist() == [expected]
    assert not math.isfinite(value) or low == value


def test_a_norm_of_zero_is_no_great_norm() -> None:
    """Where all norms are exactly zero, what is decoded is less than any norm that 32 bits can hold."""
    made = Made(rows=np.zeros((2, 4))).record()
    assert (decoded(made.json("/api/v1/layers")) <= 1e-37).all()
    assert not decoded(made.json("/api/v1/layers?quantity=zscore")).any()


def test_infinities_of_the_zscore_are_not_finite_on_either_side() -> None:
    """Minus infinity has the code of what is not finite, where values are linear."""
    codes, low, high = encoded(np.array([[-math.inf, 1.0, 3.0]], dtype=np.float32), log=False)
    assert (codes.tolist(), low, high) == ([[NONFINITE, 1, NONFINITE - 1]], 1.0, 3.0)


# Scrapes that hang or fail


def test_all_who_look_share_a_scrape_for_a_second() -> None:
    """A hundred questions within a second cost one scrape, and what needs no metrics costs none."""
    made = Made().record()
    for _ in range(50):
        made.json("/api/v1/layers")
        made.json("/api/v1/run")
    assert made.scrapes == 0
    for _ in range(50):
        made.json("/api/v1/status")
        made.json("/api/v1/layer?name=a")
    assert made.scrapes == 1
    made.now += 1
    made.json("/api/v1/status")
    made.now -= 3600  # a clock that is set back keeps nothing for an hour
    made.json("/api/v1/status")
    assert made.scrapes == 3


@pytest.mark.parametrize("failure", [RuntimeError("broken"), KeyError("broken"), ValueError("broken")], ids=repr)
def test_a_scrape_that_fails_is_a_500_of_its_own(failure: Exception) -> None:
    """It reaches the boundary as what it is, whatever it raises, and costs neither the next one nor the records."""
    made = Made(failure=failure).record()
    for path in ("status", "layer?name=a", "saved"):
        with pytest.raises(type(failure)):
            made.ask(f"/api/v1/{path}")
    assert made.json("/api/v1/layers")["steps"] == [1]
    made.failure, made.families = None, [family(TRAIN_STATE, {("training",): 1.0})]
    assert made.json("/api/v1/status")["state"] == "training"


@contextlib.contextmanager
def held(made: Made) -> Iterator[threading.Thread]:
    """A scrape of the page's that hangs for as long as this lasts."""
    made.may_go_on.clear()
    before = made.scrapes
    thread = threading.Thread(target=made.live.remember)
    thread.start()
    assert eventually(lambda: made.scrapes > before)
    try:
        yield thread
    finally:
        made.may_go_on.set()
        thread.join()


def test_while_a_scrape_hangs_the_last_one_is_shown() -> None:
    """A viewer meanwhile gets the values before, at once; and where there are none, after a second an answer to come again."""
    made = Made(families=[family(TRAIN_LOSS, 7.0)]).record()
    made.json("/api/v1/status")
    made.now += 60
    with held(made) as scrape, pytest.MonkeyPatch.context() as patch:
        patch.setattr(latest_module, "FIRST_SECONDS", FOREVER)
        assert made.json("/api/v1/status")["loss"] == 7.0
        assert scrape.is_alive()
    new = Made().record()
    with held(new), pytest.MonkeyPatch.context() as patch:
        patch.setattr(latest_module, "FIRST_SECONDS", 0.05)
        with pytest.raises(ScrapeBusyError):
            new.ask("/api/v1/status")
        assert new.json("/api/v1/run")["steps"] == [1]


def test_the_last_judgement_is_by_a_scrape_of_its_own() -> None:
    """While another thread scrapes, the last judgement of a run does not take the values before for those of its end."""
    made = Made(families=[family(TRAIN_LOSS, 7.0)]).record()
    made.json("/api/v1/status")
    made.families = [family(TRAIN_LOSS, 8.0)]
    with made.live._latest._scraping:
        assert made.live.judged().values.one(TRAIN_LOSS) == 7.0
        assert made.live.judged(last=True).values.one(TRAIN_LOSS) == 8.0


def test_a_page_whose_scrape_hangs_delays_no_other() -> None:
    """Over HTTP: a 503 for who looks while the first scrape hangs, and `/metrics`, `/healthz` and the records for all others."""
    made, failures = Made().record(), list[str]()
    server = MetricsServer(
        lambda: [family(TRAIN_LOSS, 1.0)], Renderer({}), addr="127.0.0.1", ports=(0,), timeout=FOREVER,
        on_error=lambda source, _error: failures.append(source), health=dict, page=made.pages.answer,
    )  # fmt: skip
    with contextlib.closing(server):
        with held(made):
            looks = [threading.Thread(target=lambda: seen.append(status(server, "/api/v1/status"))) for _ in range(3)]
            seen: list[int] = []
            for look in looks:
                look.start()
            for path in ("/metrics", "/healthz", "/", "/api/v1/run", "/api/v1/layers"):
                assert status(server, path) == 200
            for look in looks:
                look.join()
            assert seen == [503] * 3
        assert failures == []
        made.now += 10
        made.failure = RuntimeError("broken")
        assert status(server, "/api/v1/status") == 500
        assert failures == ["request"]
        assert status(server, "/api/v1/run") == 200


def status(server: MetricsServer, path: str) -> int:
    """The status of a request."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)) as client:
        client.request("GET", path)
        return client.getresponse().status


# What it costs


def test_a_page_that_looks_at_300_layers_costs_little() -> None:
    """In the thread's own time, at most: 10 ms for a status, 100 for all layers of a full history, 2 for a record."""
    names = [f"transformer.layers.{number}.attention.projection" for number in range(300)]
    rows = {(name,): 0.5 for name in names}
    kinds = {(name, kind): 0.0 for name in names for kind in ("nan", "inf")}
    by_layer = (GRAD_NORM, GRAD_DEAD_RATIO, GRAD_ZERO_RATIO, GRAD_NORM_RECENT_MAX, GRAD_MISSING_PARAMETERS)
    others = [(TRAIN_STATE, {("training",): 1.0}), (GRAD_GLOBAL_NORM, {("a",): 1.0}), (GRAD_NONFINITE_ELEMENTS, kinds)]
    families = [family(spec, found) for spec, found in [*others, *((spec, rows) for spec in by_layer)]]
    made = Made(names=names, families=families).record(700)
    assert eventually(lambda: fastest(lambda: made.ask("/api/v1/status")) <= 0.010)
    assert eventually(lambda: fastest(lambda: made.ask("/api/v1/layers?view=recent", accept_encoding="gzip")) <= 0.100)
    assert eventually(lambda: fastest(made.record) <= 0.002)


def fastest(action: Callable[[], object]) -> float:
    """Of seven times, in seconds of this thread's own."""
    found = []
    for _ in range(7):
        began = time.thread_time()
        action()
        found.append(time.thread_time() - began)
    return min(found)


# The recorder, and the file


def recorders() -> list[threading.Thread]:
    """The recorders' threads that run now."""
    return [thread for thread in threading.enumerate() if thread.name == "torch-grad-exporter-history"]


def test_a_recorder_goes_on_whatever_fails() -> None:
    """Looks and memories that fail are told each time, but for those that only came too late; the last look is at the end."""
    looks, failures = [], list[BaseException]()

    def look() -> None:
        looks.append(len(looks))
        if len(looks) % 2:
            raise ValueError(len(looks))
        if len(looks) % 4 == 0:
            raise TimeoutError

    def remember() -> None:
        raise OSError

    before = recorders()
    loop = recorder(look, remember, on_error=failures.append, interval=0.001)
    loop.start()
    assert eventually(lambda: len(looks) > 40)
    loop.close(5)
    loop.close(5)
    assert recorders() == before
    seen = len(looks)
    assert sum(isinstance(failure, ValueError) for failure in failures) == (seen + 1) // 2
    memories = sum(isinstance(failure, OSError) for failure in failures)
    assert memories in (seen // 15, seen // 15 + 1)
    assert not any(isinstance(failure, TimeoutError) for failure in failures)
    assert len(looks) == seen


def test_a_recorder_that_hangs_is_not_waited_for() -> None:
    """Closing waits half a second at most for a look that takes its time."""
    inside, go_on = threading.Event(), threading.Event()

    def look() -> None:
        inside.set()
        go_on.wait(FOREVER)

    loop = recorder(look, lambda: None, on_error=lambda _error: None, interval=0.001)
    loop.start()
    assert inside.wait(PATIENCE)
    assert not loop.close(0.05)
    go_on.set()
    assert eventually(lambda: not loop.running)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no record but at the end, and when a test takes one; the end waits for it."""
    monkeypatch.setitem(recorder.__kwdefaults__, "interval", FOREVER)
    monkeypatch.setattr(view_module, "CLOSE_SECONDS", PATIENCE)


@pytest.mark.usefixtures("by_hand")
def test_the_last_steps_are_recorded_at_the_end(tmp_path: Path) -> None:
    """What was done in the last second before the end is in the history that is saved after it."""
    model = Perceptron()
    optimizer = sgd(model)
    before = recorders()
    exporter = start_exporter(model, None, every=1, collectors={"host": False, "process": False})
    train(exporter, model, optimizer, 2)
    path = tmp_path / "history.json"

    def recorded() -> list[float]:
        exporter.save(path)
        found: list[float] = json.loads(path.read_text())["run"]["recent"]["steps"]
        return found

    assert eventually(lambda: value(exporter, "torch_grad_captures_total", layer="first") == 2)
    exporter._view.history.finish()
    assert recorded() == [1, 2]
    train(exporter, model, optimizer, 1)
    exporter.close()
    assert recorders() == before
    assert recorded() == [1, 2, 3]
    assert json.loads(path.read_text())["status"]["state"] == "finished"


@pytest.mark.usefixtures("by_hand")
def test_what_is_between_two_records_is_in_them() -> None:
    """Of 20 samples at once the one that is a thousand times as large is shown, and there is a mark for the one that is NaN."""
    torch.manual_seed(0)
    model, data, norms = Perceptron(), batch(), list[dict[str, float]]()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    exporter = start_exporter(model, None, every=1, collectors={"host": False, "process": False})
    for step in range(20):
        optimizer.zero_grad()
        loss = model(data).square().mean() * {8: 1000.0, 12: math.nan}.get(step, 1.0)
        loss.backward()
        exporter.observe(loss=loss)
        if step != 12:
            norms.append({name: layer_norm(layer) for name, layer in model.named_children()})
            optimizer.step()
    exporter.close()
    live = exporter._view.live
    run, layers = (
        json.loads(json.dumps(live.run(Window(whole=False)))),
        json.loads(json.dumps(live.layers("norm", Window(whole=False)))),
    )
    assert max(map(number, run["norm"])) == pytest.approx(math.hypot(*norms[8].values()), rel=1e-5)
    assert {name: len(places) for name, places in run["nonfinite"].items()} == {"loss": 1, "norm": 1}
    cells = decoded(layers)
    assert np.isinf(cells).sum(axis=0).tolist() == [1, 1]
    for name, found in zip(layers["layers"], np.nanmax(cells, axis=0, where=np.isfinite(cells), initial=0), strict=True):
        assert found == pytest.approx(norms[8][name], rel=1e-3) == pytest.approx(1000 * norms[7][name], rel=1e-3)
    assert flagged(layers).sum(axis=0).tolist() == [1, 1]
    assert layers["steps"][-1] == 19


def layer_norm(layer: torch.nn.Module) -> float:
    """The norm of a layer's gradient."""
    return math.sqrt(sum(float(one.grad.double().square().sum()) for one in layer.parameters() if one.grad is not None))


def test_what_no_collector_tells_is_not_made_up(tmp_path: Path) -> None:
    """Without the collectors of training and gradients state and step are null, also if it is saved; the samples are counted."""
    model = Perceptron()
    optimizer = sgd(model)
    exporter = start_exporter(model, None, every=1, collectors=dict.fromkeys(("training", "gradients", "host", "process"), False))
    train(exporter, model, optimizer, 10)
    live = exporter._view.live
    assert eventually(lambda: live.status()["samples"] == 10)
    status = live.status()
    assert (status["state"], status["step"], status["ended"]) == (None, None, None)
    train(exporter, model, optimizer, 1)
    exporter.close()
    exporter.save(tmp_path / "run.json")
    saved = json.loads((tmp_path / "run.json").read_text())["status"]
    assert (saved["state"], saved["step"], saved["samples"]) == (None, None, 11)
    assert abs(saved["ended"] - time.time()) < PATIENCE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_records_nothing(trained: Trained) -> None:
    """It has no recorder's thread, and the parent's goes on."""
    assert len(recorders()) == 1
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(len(recorders())).encode())
        os._exit(0)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        os.close(writing)
        assert pipe.read() == b"0"
    assert recorders()[0].is_alive()
    assert trained.json("/api/v1/status")["step"] == 50


def test_a_saved_file_is_whole(trained: Trained, tmp_path: Path) -> None:
    """Plain and compressed, by text and by path, over a file that is there; nothing else is left in the folder."""
    plain, packed = tmp_path / "history.json", tmp_path / "history.json.gz"
    plain.write_text("before")
    trained.exporter.save(str(plain))
    trained.exporter.save(packed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history.json", "history.json.gz"]
    found = [strict(plain.read_bytes()), strict(gzip.decompress(packed.read_bytes()))]
    for saved in found:
        assert saved["run"]["recent"]["steps"][-1] == 50
        assert saved["layers"]["norm"]["whole"]["layers"] == ["first", "second"]
    assert found[0]["layers"] == found[1]["layers"]
    assert "history" not in errors(trained.exporter)


def test_a_file_that_cannot_be_written_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that is not there, one in the way and a full disk are logged and counted, nothing is raised, and no part is left."""
    exporter = start_exporter(Perceptron(), None, collectors={"host": False, "process": False})
    (tmp_path / "folder").mkdir()
    targets = [tmp_path / "missing" / "a.json", tmp_path / "folder"]
    if Path("/dev/full").exists():
        (tmp_path / "full.json.part").symlink_to("/dev/full")
        targets.append(tmp_path / "full.json")
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        for target in targets:
            exporter.save(target)
        exporter.save(b"bytes")  # type: ignore[arg-type]
    lines = [record.getMessage() for record in caplog.records if "history" in record.getMessage()]
    assert len(lines) == len(targets) + 1
    assert "missing" in lines[0]
    assert errors(exporter) == {"history": len(targets) + 1}
    exporter.close()
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
