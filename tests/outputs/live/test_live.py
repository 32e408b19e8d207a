"""The page's JSON interface on real trainings: its numbers are those of `/metrics`, and its answers are safe for a browser."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import itertools
import math
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.outputs.live.support import Json, decoded, strict
from tests.support.models import Perceptron, batch, sgd
from tests.support.programs import Starter
from tests.support.scrape import Key, errors, key, value, values
from tests.support.tools import PATIENCE, eventually, full_disk
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.rules import RULES

OFF = dict.fromkeys(("gpu", "cuda_memory", "container"), False)
QUIET = {"host": False, "process": False, **OFF}
QUANTITIES = {
    "norm": "torch_grad_norm",
    "zero_ratio": "torch_grad_zero_ratio",
    "dead_ratio": "torch_grad_dead_ratio",
    "zscore": "torch_grad_norm_zscore",
    "mean": "torch_grad_mean",
    "stddev": "torch_grad_stddev",
}


@dataclass
class Trained:
    """A small training that is served, and its `/metrics` after each step."""

    exporter: Exporter
    scrapes: dict[int, dict[Key, float]]

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.exporter.port or 0, timeout=PATIENCE)) as client:
            client.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
            answer = client.getresponse()
            return answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read()

    def json(self, path: str) -> Json:
        status, _, body = self.get(f"/api/v1/{path}")
        assert status == 200, body
        return strict(body)


def train(exporter: Exporter, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Take clipped steps, whose loss is observed."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        exporter.observe(loss=loss, samples=5, tokens=50, epoch=2)


def saved(exporter: Exporter, folder: Path) -> dict[str, Any]:
    """Return what the exporter saves."""
    exporter.save(folder / "saved.json")
    return strict((folder / "saved.json").read_bytes())


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    """A training of 50 steps, all of them recorded."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = sgd(model)
    with start_exporter(model, 0, addr="127.0.0.1", every=1, dead_window=5, moments=True, collectors=OFF) as exporter:
        made = Trained(exporter, {})
        for step in range(1, 51):
            train(exporter, model, optimizer, 1)
            made.scrapes[step] = values(exporter)
        assert made.scrapes[50][key("torch_grad_captures_total", layer="first")] == 50
        for path in ("run", "layers"):
            assert eventually(lambda path=path: made.json(path)["steps"][-1:] == [50])
        assert eventually(lambda: made.json("status")["step"] == 50)  # its scrape is shared for a second
        yield made


@pytest.mark.slow
def test_status_agrees_with_metrics(trained: Trained) -> None:
    """Each number of the status is that of the metric."""
    status, metrics, exporter = trained.json("status"), trained.scrapes[50], trained.exporter
    assert (status["run"], status["rank"], status["world_size"], status["state"]) == (exporter.run, 0, 1, "training")
    assert (status["host"], status["ranks"]) == (socket.gethostname(), [])
    for name, metric in {
        "step": "torch_train_steps_total",
        "loss": "torch_train_loss",
        "epoch": "torch_train_epoch",
        "learning_rate": "torch_train_learning_rate",
        "global_norm": "torch_grad_global_norm",
        "global_norm_after_clip": "torch_grad_global_norm_after_clip",
        "clip_coefficient": "torch_grad_clip_coefficient",
        "started": "torch_train_start_timestamp_seconds",
        "last_step": "torch_train_last_step_timestamp_seconds",
        "last_sample_step": "torch_grad_sample_step",
        "layers": "torch_grad_exporter_layers",
        "sampling_interval_steps": "torch_grad_exporter_sampling_interval_steps",
    }.items():
        [expected] = [number for (other, _), number in metrics.items() if other == metric]
        assert status[name] == pytest.approx(expected, rel=1e-9), name
    assert (status["step"], status["layers"]) == (50, 2)
    assert status["overhead_budget_ratio"] is None  # every=1 has none
    for name in ("nonfinite_elements", "nonfinite_steps"):
        assert status[name] == sum(number for (other, _), number in metrics.items() if other == f"torch_grad_{name}_total") == 0
    dead = [number for (name, _), number in metrics.items() if name == "torch_grad_dead_ratio"]
    assert status["dead_layers"] == sum(ratio > 0.9 for ratio in dead)
    resources = {row["name"]: row for row in status["resources"]}
    assert resources["Process memory"]["limit"] == metrics[key("torch_host_memory_total_bytes")]
    assert resources["Process memory"]["value"] == pytest.approx(metrics[key("process_resident_memory_bytes")], rel=0.2)


def test_layer_codes_agree_with_metrics(trained: Trained) -> None:
    """Decoded as documented, each value of a layer is that of `/metrics` at its step, within half a code."""
    for view, (quantity, metric) in itertools.product(("recent", "whole"), QUANTITIES.items()):
        answer = trained.json(f"layers?quantity={quantity}&view={view}")
        assert (answer["quantity"], answer["view"], answer["layers"]) == (quantity, view, ["first", "second"])
        assert answer["scale"] == {"norm": "log", "mean": "raw", "stddev": "raw"}.get(quantity, "linear")
        assert answer["steps"] == list(range(1, 51))
        rows = [
            [trained.scrapes[step].get(key(metric, layer=name), math.nan) for name in answer["layers"]] for step in range(1, 51)
        ]
        shown, expected = decoded(answer), np.array(rows)
        assert np.isfinite(expected).any()
        if quantity == "norm":
            shown, expected = np.log10(shown), np.log10(expected)
        half = (answer["high"] - answer["low"]) / 65533 / 2
        np.testing.assert_allclose(shown, expected, atol=half * 1.01 + 1e-6)


def test_a_saved_file_has_all_answers(trained: Trained, tmp_path: Path) -> None:
    """A saved file, plain or compressed, replaces the one before and has the answers of all other paths."""
    plain, packed = tmp_path / "history.json", tmp_path / "history.json.gz"
    plain.write_text("before")
    trained.exporter.save(str(plain))
    trained.exporter.save(packed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history.json", "history.json.gz"]
    for content in (strict(plain.read_bytes()), strict(gzip.decompress(packed.read_bytes())), trained.json("saved")):
        assert (content["format"], content["version"]) == ("torch_grad_exporter history", 1)
        for view in ("whole", "recent"):
            assert content["run"][view] == trained.json(f"run?view={view}")
            for quantity in QUANTITIES:
                assert content["layers"][quantity][view] == trained.json(f"layers?quantity={quantity}&view={view}")
        for name in ("first", "second"):
            alone = trained.json(f"layer?name={name}")
            assert content["layer"][name] == {what: part for what, part in alone.items() if what not in ("whole", "recent")}
        assert content["status"].keys() == trained.json("status").keys()
    assert "history" not in errors(trained.exporter)


# Over HTTP


def test_types_and_compression(trained: Trained) -> None:
    """Each path answers GET and HEAD under its type, compressed where the client accepts it; a first load is small."""
    for path, kind in {"/": "text/html; charset=utf-8", "/static/page.js": "text/javascript; charset=utf-8"}.items():
        status, headers, body = trained.get(path)
        assert (status, headers["content-type"], int(headers["content-length"])) == (200, kind, len(body))
        assert "content-encoding" not in headers
        status, packed, compressed = trained.get(path, accept_encoding="br, gzip")
        assert (status, packed["content-encoding"], packed["vary"]) == (200, "gzip", "Accept-Encoding")
        assert gzip.decompress(compressed) == body
        assert trained.get(path, method="HEAD")[2] == b""
    assert trained.get("/api/v1/status")[1]["content-type"] == "application/json"
    index = trained.get("/")[2].decode()
    paths = ["/", *(f"/{name}" for name in re.findall(r'(?:src|href)="(static/[^"]+)"', index))]
    assert 10_000 < sum(len(trained.get(path, accept_encoding="gzip")[2]) for path in paths) <= 150_000


def test_every_answer_restricts_the_browser(trained: Trained) -> None:
    """Answers and errors carry a policy that allows nothing from elsewhere, and are neither stored nor sniffed."""
    outside = ("/static/../live.py", "/static/%2e%2e/live.py", "/static/", "/static//etc/passwd", "/static/app.js%00", "//")
    for path, expected in {
        **dict.fromkeys(("/", "/runbook", "/static/app.js", "/api/v1/status"), 200),
        **dict.fromkeys((*outside, "/static/nothing.js", "/api/v1/layer?name=%3Cscript%3E"), 404),
        "/api/v1/run?since=-1": 400,
    }.items():
        status, headers, body = trained.get(path)
        assert status == expected, path
        if path in outside:
            continue
        assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert (headers["referrer-policy"], headers["cross-origin-opener-policy"]) == ("no-referrer", "same-origin")
        assert (status == 200 and path != "/runbook") or b"<script" not in body.lower()


def test_wrong_queries_get_a_4xx(trained: Trained) -> None:
    """A wrong query gets a 400 and an unknown layer a 404; the exporter counts no error of its own."""
    long = "9" * 3000
    for query in (
        "run?since=-1", "run?since=NaN", "run?view=all", f"run?stride=-{long}", "layers?quantity=__class__", "run?since=%00",
        "layers?quantity=activation_rms", "run?" + "&".join(f"k{i}=1" for i in range(50)), "layer?name=%ff%fe",
        f"run?since={'9' * 5000}",
    ):  # fmt: skip
        assert trained.get(f"/api/v1/{query}")[0] == 400, query
    for name in ("", "third", "first%2F", "FIRST", long):
        assert trained.get(f"/api/v1/layer?name={name}")[0] == 404
    assert errors(trained.exporter) == {}


# Trainings in which something happens


def test_problems_are_those_of_the_page(tmp_path: Path) -> None:
    """`exporter.problems()` and the saved status begin with a NaN and the first steps against it, also after the end."""
    model = Perceptron()
    optimizer = sgd(model)
    with start_exporter(model, None, every=1, collectors=QUIET) as exporter:
        for weight in (1.0, math.nan):
            optimizer.zero_grad()
            (model(batch()).square().mean() * weight).backward()
            optimizer.step()
        assert eventually(lambda: bool(exporter.problems()))
        problems = exporter.problems()
        shown = saved(exporter, tmp_path)["status"]["problems"]
    assert [problem.alert for problem in problems] == [problem["alert"] for problem in shown]
    assert (problems[0].alert, problems[0].severity) == ("TrainingNonFiniteGradients", "critical")
    (rule,) = [rule for rule in RULES if rule.name == problems[0].alert]
    assert problems[0].first_steps == rule.first_steps
    assert exporter.problems()[:1] == problems[:1]


@pytest.mark.slow
def test_a_failing_recorder_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Failures of the thread that records are counted, and it records again once they are over."""
    failing, clock = threading.Event(), time.time

    def now() -> float:
        if failing.is_set() and threading.current_thread().name == "torch-grad-exporter-history":
            raise OSError("no clock")
        return clock()

    monkeypatch.setattr(time, "time", now)
    model = Perceptron()
    optimizer = sgd(model)
    failing.set()
    with start_exporter(model, None, every=1, collectors=QUIET) as exporter:
        train(exporter, model, optimizer, 3)
        assert eventually(lambda: errors(exporter).get("history", 0) >= 2)
        failing.clear()
        train(exporter, model, optimizer, 2)
        assert eventually(lambda: saved(exporter, tmp_path)["run"]["recent"]["steps"][-1:] == [5])
        assert value(exporter, "torch_grad_captures_total", layer="first") == 5


def test_save_says_what_it_cannot_write(tmp_path: Path) -> None:
    """A missing folder, a folder or device in place of the file, and a full disk raise, and leave what was there."""
    exporter = start_exporter(Perceptron(), None, collectors=QUIET)
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.json").write_text("before")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("missing/a.json", "folder", "zero", "full.json", "there.json"):
        full = full_disk() if name in ("full.json", "there.json") else contextlib.nullcontext()
        with full, pytest.raises(OSError, match=rf"save\(\) cannot write: .*{name}") as raised:
            exporter.save(tmp_path / name)
        assert raised.value.__cause__ is None
    with pytest.raises(TypeError):
        exporter.save(b"bytes")  # type: ignore[arg-type]
    assert errors(exporter) == {}
    exporter.close()
    assert (tmp_path / "there.json").read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "there.json", "zero"}


def test_save_keeps_a_symbolic_link(tmp_path: Path) -> None:
    """What a link points to is replaced; the link and its target's name stay."""
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "latest.json", tmp_path / "there" / "run.json"
    link.symlink_to(target)
    with start_exporter(Perceptron(), None, collectors=QUIET) as exporter:
        for _ in range(2):  # at first there is no target
            exporter.save(link)
    assert link.readlink() == target
    assert strict(target.read_bytes())["version"] == 1
    assert [path.name for path in target.parent.iterdir()] == ["run.json"]


KILLED = """
import resource, signal, sys, torch
from torch_grad_exporter import start_exporter
exporter = start_exporter(torch.nn.Linear(2, 2), None)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
exporter.save(sys.argv[1])
"""


@pytest.mark.process
def test_a_killed_save_leaves_nothing(starter: Starter, tmp_path: Path) -> None:
    """A process that is killed in the middle of writing leaves no part of a file."""
    assert starter.start(KILLED, str(tmp_path / "run.json")).wait() == -signal.SIGXFSZ
    assert [*tmp_path.iterdir()] == []
