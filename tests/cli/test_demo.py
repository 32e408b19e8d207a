"""The demo, by its command line: what it prints, serves and does when something goes wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.notified import SECRET, receiver
from tests.support.tools import PATIENCE, eventually, find, get
from torch_grad_exporter.cli import demo
from torch_grad_exporter.cli import main as cli
from torch_grad_exporter.collectors import exporter
from torch_grad_exporter.errors import UserError
from torch_grad_exporter.metrics.families import scalar

SMALL = ["--port", "0", "--every", "1", "--batch-size", "2", "--context", "16", "--width", "16", "--layers", "2", "--device", "cpu"]
DEADLINE_SECONDS = PATIENCE
CANDIDATES = "torch_grad_clip_candidates_total"


class Scrape:
    """The samples of one scrape."""

    def __init__(self, url: str) -> None:
        self.text = get(url)
        self._samples = [sample for family in text_string_to_metric_families(self.text) for sample in family.samples]

    def rows(self, name: str, **labels: str) -> list[float]:
        """Return the values of a metric's series with these labels."""
        return [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]

    def total(self, name: str, **labels: str) -> float:
        """Return their sum, 0 if there are none."""
        return sum(self.rows(name, **labels))


class Running:
    """A demo in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self._errors = errors
        self.output = ""
        self.url = self.read_until(r"http://\S+/metrics").group()

    def read_until(self, pattern: str) -> re.Match[str]:
        """Wait for a line on standard output; fail if the process ends without it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"ended without {pattern!r}:\n{self.output}\n{self.errors}")

    def scrape_until(self, holds: Callable[[Scrape], bool]) -> Scrape:
        """Scrape until a scrape is as expected."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            scrape = Scrape(self.url)
            if holds(scrape):
                return scrape
            time.sleep(0.05)  # Leaves the core to the training between two looks.
        raise AssertionError(f"not seen in {DEADLINE_SECONDS:.0f} s:\n{self.output}\n{self.errors}")

    def finish(self) -> int:
        """Wait for the end and return the exit code."""
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        return self.process.wait(timeout=DEADLINE_SECONDS)

    def interrupt(self) -> int:
        """Send Ctrl-C and wait for the end."""
        self.process.send_signal(signal.SIGINT)
        return self.finish()

    @property
    def errors(self) -> str:
        """The standard error so far."""
        return self._errors.read_text(errors="replace")


Start = Callable[..., Running]


def summary(output: str, title: str) -> str:
    """Return a value of the summary at the end."""
    found = re.search(rf"^  {title} +(\S+)", output, re.MULTILINE)
    assert found, output
    return found.group(1)


def thirty_steps(seed: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a run of 30 steps prints, in this process."""
    assert cli.main(["demo", *SMALL, "--addr", "127.0.0.1", "--steps", "30", "--seed", str(seed)]) == 0
    return capsys.readouterr().out


def command(*arguments: str) -> list[str]:
    """The command as installed, else the module behind it."""
    script = Path(sys.executable).parent / "torch-grad-exporter"
    start = [str(script)] if script.exists() else [sys.executable, "-m", "torch_grad_exporter"]
    return [*start, "demo", *SMALL, *arguments]


@contextmanager
def demos(folder: Path) -> Iterator[Start]:
    """Start demos, and kill what still runs at the end."""
    processes: list[subprocess.Popen[str]] = []
    # A child inherits an ignored SIGINT, as a job in the background of a shell has it, but not a handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(*arguments: str) -> Running:
        errors = folder / f"errors-{len(processes)}"
        with errors.open("w") as file:
            process = subprocess.Popen(
                command(*arguments),
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                # One thread: with more, a model this small only waits for them.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        processes.append(process)
        return Running(process, errors)

    try:
        yield start
    finally:
        signal.signal(signal.SIGINT, before)
        for process in processes:
            with process:
                process.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start demos that end with the test."""
    with demos(tmp_path) as start_:
        yield start_


@pytest.mark.slow
def test_thirty_steps_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    """A run of 30 steps ends by itself with a summary; the same seed has the same loss and norm, another has not."""
    first, same, other = (thirty_steps(seed, capsys) for seed in (1, 1, 2))
    assert summary(first, "optimizer steps") == "30"
    assert 1.0 < float(summary(first, "loss")) < 10.0
    assert summary(first, "non-finite steps") == "0"
    assert summary(first, "overhead").endswith("%")
    results = [(summary(output, "loss"), summary(output, "gradient norm")) for output in (first, same, other)]
    assert results[0] == results[1] != results[2]


def test_first_samples_are_apart_in_the_summary() -> None:
    """Until they are paid back, the first samples are not in the overhead that is printed, but beside it."""
    families = [scalar(exporter.EXPORTER_OVERHEAD_RATIO, 0.0195), scalar(exporter.EXPORTER_STARTUP_RATIO, 0.012)]
    assert summary(demo.summary(families), "overhead") == "0.75%"
    assert "1.20% for the first samples" in demo.summary(families)
    assert summary(demo.summary(families[:1]), "overhead") == "1.95%"


@pytest.mark.process
def test_a_scraped_demo_ends_by_ctrl_c(start: Start) -> None:
    """Without `--steps` the demo trains until Ctrl-C and exits with 0; a NaN in one layer is counted and its step skipped."""
    demo_ = start("--inject", "nan@5")
    scrape = demo_.scrape_until(lambda s: s.total("torch_train_steps_total") >= 20)
    steps = scrape.total("torch_train_steps_total")
    assert scrape.total("torch_grad_nonfinite_steps_total") == 1
    assert scrape.total("torch_grad_nonfinite_steps_total", outcome="skipped") == 1
    # The weight of the first block's second linear layer, 64 inputs by 16 outputs, and nothing else.
    assert scrape.total("torch_grad_nonfinite_elements_total", layer="blocks.0.linear2", kind="nan") == 64 * 16
    assert scrape.total("torch_grad_nonfinite_elements_total") == 64 * 16
    assert 0.0 < scrape.total("torch_train_loss") < 10.0
    assert scrape.total("torch_grad_exporter_errors_total") == 0
    assert demo_.interrupt() == 0
    assert int(summary(demo_.output, "optimizer steps").replace(",", "")) >= steps
    assert "Traceback" not in demo_.errors


@pytest.mark.full
def test_injected_dead_units_show_in_their_layer(start: Start) -> None:
    """Every unit of one layer is dead in all samples, and its counterpart is not."""
    demo_ = start("--inject", "dead@1")
    scrape = demo_.scrape_until(lambda s: bool(s.rows("torch_grad_dead_ratio", layer="blocks.0.linear1")))
    assert scrape.rows("torch_grad_dead_ratio", layer="blocks.0.linear1") == [1.0]
    assert scrape.rows("torch_grad_zero_units_ratio", layer="blocks.0.linear1") == [1.0]
    assert scrape.total("torch_grad_dead_ratio", layer="blocks.1.linear1") < 0.5


@pytest.mark.full
def test_explosion_under_a_policy_is_answered(start: Start) -> None:
    """With `--clip` the exporter clips and compares policies; an explosion halves the learning rate and notifies a receiver."""
    with receiver() as there:
        demo_ = start("--clip", "agc", "--inject", "explode@60", "--act", "--notify", there.url, "--steps", "1000000")
        said = demo_.read_until(r"GradientExploding: ScaleLearningRate\(factor=0.5, min_lr=0\) changed the training at step (\d+)$")
        assert int(said.group(1)) >= 62
        # The cosine has hardly begun to fall from 1e-3.
        demo_.scrape_until(lambda s: 4e-4 < s.total("torch_train_learning_rate") <= 5e-4)
        demo_.scrape_until(lambda s: s.total("torch_grad_exporter_actions_total", action="ScaleLearningRate", result="done") == 1)
        page = get(demo_.url.replace("/metrics", "/api/v1/status"))
        assert [(one["step"], one["name"], one["result"]) for one in json.loads(page)["actions"]] == [
            (int(said.group(1)), "GradientExploding", "done")
        ]
        assert eventually(lambda: [one.json["alert"] for one in there.asked] == ["GradientExploding"])
        scrape = Scrape(demo_.url)
        assert demo_.interrupt() == 130
    for shown in (demo_.output, demo_.errors, scrape.text, page):
        assert SECRET not in shown
    assert "Traceback" not in demo_.errors
    others = {"MaxNorm(1.0)", "ZClip()", "AutoClip()", "MaxValue(0.1)"}
    assert {policy: len(scrape.rows(CANDIDATES, policy=policy)) for policy in others} == dict.fromkeys(others, 1)
    assert scrape.rows(CANDIDATES, policy="AGC()") == []
    # AGC's limit is a hundredth of each unit's weights: it makes these gradients much smaller, and those of layers differently.
    assert scrape.total("torch_grad_global_norm_after_clip") < 0.5 * scrape.total("torch_grad_global_norm")
    assert len(set(scrape.rows("torch_grad_layer_clip_coefficient"))) > 3
    compared = demo_.output.partition("Steps that other policies would have clipped:\n")[2]
    assert {line.split()[0] for line in compared.splitlines()} == others


@pytest.mark.slow
def test_stop_action_ends_the_run_at_a_nan(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo ends long before its last step and prints the reason and a summary."""
    assert cli.main(["demo", *SMALL, "--addr", "127.0.0.1", "--inject", "nan@30", "--act", "--steps", "100000"]) == 0
    output = capsys.readouterr().out
    said = re.search(
        r"^torch_grad_exporter: non-finite gradients: Stop\(\) changed the training at step (\d+)$", output, re.MULTILINE
    )
    assert said, output
    assert int(summary(output, "optimizer steps").replace(",", "")) == int(said.group(1)) >= 29
    assert summary(output, "non-finite steps") == "1"


def test_wrong_webhook_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A webhook without a valid scheme or without an address exits with 2, and the message does not contain the address."""
    monkeypatch.delenv("TORCH_GRAD_EXPORTER_WEBHOOK_URL", raising=False)
    for arguments, word in (
        (["--notify", f"ftp://example.org/{SECRET}"], "https://"),
        (["--notify"], "TORCH_GRAD_EXPORTER_WEBHOOK_URL"),
    ):
        assert cli.main(["demo", *SMALL, "--steps", "1", *arguments]) == 2
        said = capsys.readouterr()
        assert word in said.err
        assert SECRET not in said.out + said.err
        assert "Traceback" not in said.err


@pytest.mark.server
def test_printed_scrape_configuration_is_valid(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The scrape configuration that the demo prints, behind the live page, passes promtool; its job is that of the dashboards."""
    printed = re.search(r"^Open http://\S+:\d+/ in .*\n\n(scrape_configs:\n.+\n)", thirty_steps(1, capsys), re.MULTILINE)
    assert printed
    assert "{job_name: training, honor_labels: true," in printed[1]
    (tmp_path / "prometheus.yml").write_text(printed[1])
    check = [find("promtool"), "check", "config", tmp_path / "prometheus.yml"]
    subprocess.run(check, check=True, capture_output=True, timeout=PATIENCE)


def test_python_without_source_is_an_error(tmp_path: Path) -> None:
    """Without the standard library's source the demo says that it needs it."""
    with pytest.raises(UserError, match="source of Python's standard library"):
        demo.read_corpus(tmp_path)
