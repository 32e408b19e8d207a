"""What a restart knows of the run: the steps that it computes again, and where the time of earlier processes went."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from tests.support.models import Perceptron, batch, sgd
from tests.support.scrape import OFF, errors, value
from torch_grad_exporter import Exporter, start_exporter

TIME, EARLIER = "torch_train_time_seconds_total", "torch_train_earlier_time_seconds"


class Crashed(RuntimeError):
    pass


def started(folder: Path, run: str = "a/run") -> Exporter:
    """Start an exporter that keeps its state there."""
    return start_exporter(Perceptron(), None, run=run, rank=3, state_dir=folder, collectors=OFF)


def train(exporter: Exporter, model: torch.nn.Module, steps: int) -> None:
    """Take steps of about 10 ms."""
    optimizer = sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        time.sleep(0.01)
        optimizer.step()


def by_cause(exporter: Exporter, name: str) -> dict[str, float]:
    """Return a metric by the label `cause`."""
    return {key.partition("/")[2]: seconds for key, seconds in exporter.values(f"^{name}/").items()}


def test_a_restart_knows_what_it_computes_again(tmp_path: Path) -> None:
    """Steps up to the last one of a run that failed are recomputed; all causes of all processes are the wall clock."""
    before, model = time.perf_counter(), Perceptron()
    options = {"run": "a/run", "rank": 3, "state_dir": tmp_path / "state", "collectors": OFF}
    with pytest.raises(Crashed), start_exporter(model, None, **options) as first:  # noqa: PT012 - what is in it is the run
        start = time.perf_counter()  # the exporter counts from a moment between the two
        train(first, model, 60)
        assert by_cause(first, TIME)["recomputed"] == 0
        assert value(first, "torch_train_restarts") == 0
        assert by_cause(first, EARLIER) == {}
        raise Crashed
    time.sleep(0.5)
    with start_exporter(model, None, **options) as second:
        assert "recomputed" not in by_cause(second, TIME)  # until it is known where the run goes on
        second.resume(20)
        train(second, model, 100)
        shown, earlier = by_cause(second, TIME), by_cause(second, EARLIER)
        end = time.perf_counter()
        together = (shown["step"] + earlier["step"]) / (sum(shown.values()) + sum(earlier.values()))
        assert value(second, "torch_train_goodput_ratio") == pytest.approx(together, abs=0.02)
        assert errors(second) == {}
        assert value(second, "torch_train_restarts") == 1
    # Steps 21 to 60; the first one is that of the start.
    assert shown["recomputed"] / (shown["recomputed"] + shown["step"]) == pytest.approx(39 / 99, abs=0.1)
    assert earlier["down"] >= 0.5
    assert earlier["step"] >= 0.01 * 59
    assert 0.99 * (end - start) - 0.1 <= sum(shown.values()) + sum(earlier.values()) <= 1.01 * (end - before)

    with start_exporter(model, None, **options) as third:  # the last one has ended as it should
        assert by_cause(third, EARLIER)["down"] == earlier["down"]
        assert value(third, "torch_train_restarts") == 2
        third.resume(120)
        train(third, model, 3)
        assert by_cause(third, TIME)["recomputed"] == 0
    with start_exporter(model, None, **options) as fourth:  # which ends before the step that the run had reached
        fourth.resume(100)
        train(fourth, model, 2)
    (state,) = (json.loads(path.read_text()) for path in (tmp_path / "state").glob("*.json"))
    assert (state["step"], state["processes"], state["run"]) == (123, 4, "a/run")


def test_a_run_that_ended_to_go_on_later(tmp_path: Path) -> None:
    """After a process that was asked to end the time until the next one is `down`, if that goes on from a step."""
    with started(tmp_path):
        pass
    (path,) = tmp_path.glob("*.json")
    state = json.loads(path.read_text())
    assert state["ended"] == "finished"
    path.write_text(json.dumps({**state, "step": 5, "at": state["at"] - 3600}))
    with started(tmp_path) as exporter:
        assert by_cause(exporter, EARLIER)["down"] == 0
        exporter.resume(0)
        assert by_cause(exporter, EARLIER)["down"] == 0
        exporter.resume(5)
        exporter.resume(5)
        assert 3600 <= by_cause(exporter, EARLIER)["down"] < 3700


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version": 2}', b'{"version": 1, "seconds": {}}', b"\xff\xfe", b'{"version": 1, "step": -1}']
)
def test_a_state_of_something_else(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once and kept aside; what is recomputed is unknown, and the file is a state in the end."""
    with started(tmp_path):
        pass
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(content)
    model = Perceptron()
    with start_exporter(model, None, run="a/run", rank=3, state_dir=tmp_path, collectors=OFF) as exporter:
        exporter.resume(10)
        train(exporter, model, 3)
        assert value(exporter, "torch_train_restarts") == 0
        assert "recomputed" not in by_cause(exporter, TIME)
    assert path.with_suffix(".unreadable").read_bytes() == content
    assert sum("is not what an exporter has written" in record.message for record in caplog.records) == 1
    assert json.loads(path.read_text())["step"] == 13


def test_a_state_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that can be neither read nor replaced is said once and counted; the training goes on."""
    with started(tmp_path):
        pass
    (path,) = tmp_path.glob("*.json")
    path.unlink()
    path.mkdir()
    (path / "something").touch()
    model = Perceptron()
    with start_exporter(model, None, run="a/run", rank=3, state_dir=tmp_path, collectors=OFF) as exporter:
        train(exporter, model, 3)
        assert errors(exporter) == {"state": 1}
        assert value(exporter, "torch_train_steps_total", optimizer="SGD") == 3
    assert sum("state failed" in record.message for record in caplog.records) == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """It is refused before anything is registered, with its name and what to do."""
    (tmp_path / "file").touch()
    fix = "expected a directory that this process can write to"
    with pytest.raises(ValueError, match=rf"^state_dir='.*file/state': cannot be written to: .*; {fix}$"):
        started(tmp_path / "file" / "state")


def test_a_run_without_a_name(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose name is new each time is said to find no state."""
    for name in ("TORCH_GRAD_EXPORTER_RUN", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with started(tmp_path, run="named"):
        pass
    assert caplog.text == ""
    with start_exporter(Perceptron(), None, state_dir=tmp_path, collectors=OFF):
        pass
    assert "a restart will be another run; pass run=" in caplog.text
