"""The demo as its user meets it: the real command line in a process of its own, scraped while it trains."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.notified import SECRET, receiver
from tests.support.real_prometheus import prometheus
from tests.support.tools import PATIENCE, eventually, find
from torch_grad_exporter.cli import demo

SMALL = ["--port", "0", "--every", "1", "--batch-size", "2", "--context", "16", "--width", "16", "--layers", "2", "--device", "cpu"]
DEADLINE_SECONDS = PATIENCE
CANDIDATES = "torch_grad_clip_candidates_total"


class Scrape:
    """The samples of one scrape."""

    def __init__(self, url: str) -> None:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=PATIENCE) as response:
            self.text = response.read().decode()
        self._samples = [sample for family in text_string_to_metric_families(self.text) for sample in family.samples]

    def rows(self, name: str, **labels: str) -> list[float]:
        """The values of a metric's series that carry these labels."""
        return [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]

    def layers(self, name: str) -> set[str]:
        """The layers that a metric has series of."""
        return {s.labels["layer"] for s in self._samples if s.name == name}

    def total(self, name: str, **labels: str) -> float:
        """Their sum; 0 where there are none."""
        return sum(self.rows(name, **labels))


class Running:
    """A demo in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self._errors = errors
        self.output = ""
        self.url = self.read_until(r"http://\S+/metrics").group()

    def read_until(self, pattern: str) -> re.Match[str]:
        """Waits for a line on standard output; fails where the process ends without it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"ended without {pattern!r}:\n{self.output}\n{self.errors}")

    def scrape_until(self, holds: Callable[[Scrape], bool]) -> Scrape:
        """Scrapes until a scrape is as expected."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            scrape = Scrape(self.url)
            if holds(scrape):
                return scrape
            time.sleep(0.05)  # Leaves the core to the training between two looks.
        raise AssertionError(f"not seen in {DEADLINE_SECONDS:.0f} s:\n{self.output}\n{self.errors}")

    def finish(self) -> int:
        """Waits for the end; returns the exit code."""
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        return self.process.wait(timeout=DEADLINE_SECONDS)

    def interrupt(self) -> int:
        """Ctrl-C, then the end."""
        self.process.send_signal(signal.SIGINT)
        return self.finish()

    @property
    def errors(self) -> str:
        """What came on standard error so far."""
        return self._errors.read_text(errors="replace")

    def summary(self, title: str) -> str:
        """A value of the summary at the end."""
        found = re.search(rf"^  {title} +(\S+)", self.output, re.MULTILINE)
        assert found, self.output
        return found.group(1)


Start = Callable[..., Running]


def command(*arguments: str) -> list[str]:
    """The command as installed, else the module behind it."""
    script = Path(sys.executable).parent / "torch-grad-exporter"
    start = [str(script)] if script.exists() else [sys.executable, "-m", "torch_grad_exporter"]
    return [*start, "demo", *SMALL, *arguments]


@contextmanager
def demos(folder: Path) -> Iterator[Start]:
    """Starts demos; whatever still runs at the end is killed."""
    processes: list[subprocess.Popen[str]] = []
    # A child inherits an ignored SIGINT, as a job in the background of a shell has it, but not a handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(*arguments: str, program: list[str] | None = None) -> Running:
        errors = folder / f"errors-{len(processes)}"
        with errors.open("w") as file:
            process = subprocess.Popen(
                program or command(*arguments),
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
    """Starts demos that end with the test."""
    with demos(tmp_path) as start_:
        yield start_


@pytest.fixture(scope="module")
def thirty_steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A run of 30 steps, read to its end."""
    with demos(tmp_path_factory.mktemp("thirty")) as start_:
        demo_ = start_("--steps", "30", "--seed", "1")
        assert demo_.finish() == 0, demo_.errors
        yield demo_


@pytest.mark.process
def test_thirty_steps_are_summed_up(thirty_steps: Running) -> None:
    """A run of 30 steps ends by itself, and its summary says 30 steps."""
    assert thirty_steps.summary("optimizer steps") == "30"
    assert 1.0 < float(thirty_steps.summary("loss")) < 10.0
    assert float(thirty_steps.summary("gradient norm")) > 0.0
    assert thirty_steps.summary("non-finite steps") == "0"
    assert thirty_steps.summary("overhead").endswith("%")
    assert "Traceback" not in thirty_steps.errors


@pytest.mark.full
def test_seed_decides_the_training(start: Start, thirty_steps: Running) -> None:
    """Two runs with one seed end with the same loss and norm, one with another seed does not."""
    runs = [start("--steps", "30", "--seed", seed) for seed in ("1", "2")]
    assert [run.finish() for run in runs] == [0, 0]
    first, same, other = [(run.summary("loss"), run.summary("gradient norm")) for run in (thirty_steps, *runs)]
    assert first == same
    assert first != other


@pytest.mark.process
def test_ctrl_c_ends_a_scraped_demo(start: Start) -> None:
    """Without `--steps` the demo trains until Ctrl-C, prints a summary and exits with 0."""
    demo_ = start()
    scrape = demo_.scrape_until(lambda s: s.total("torch_train_steps_total") >= 30)
    steps = scrape.total("torch_train_steps_total")
    # Steps are counted first, and training goes on while the rest is read; what is observed may be half a second late.
    durations = "torch_train_step_duration_seconds"
    half_a_second = 2 + 0.5 * scrape.total(f"{durations}_count") / scrape.total(f"{durations}_sum")
    assert abs(steps - scrape.total("torch_train_tokens_total") / (2 * 16)) <= half_a_second
    assert abs(scrape.total("torch_train_samples_total") - steps * 2) <= 2 * 2
    assert {"blocks.0.linear1", "blocks.1.linear2", "head"} <= scrape.layers("torch_grad_norm")
    assert demo_.interrupt() == 0
    assert int(demo_.summary("optimizer steps").replace(",", "")) >= steps
    assert "Traceback" not in demo_.errors


@pytest.mark.server
def test_prometheus_scrapes_the_demo(start: Start, tmp_path: Path) -> None:
    """Prometheus sees the demo up, with its steps, a norm for each layer, and no scrape error."""
    running = start("--steps", "0")
    port = urllib.parse.urlsplit(running.url).port
    assert port is not None
    with prometheus(tmp_path, port, run="demo") as real:
        assert eventually(real.is_scraping)
        assert eventually(lambda: real.value("sum(torch_train_steps_total)") > 20)
        assert real.value("count(torch_grad_norm > 0)") == real.value("torch_grad_exporter_layers")
        assert real.value("sum(torch_grad_exporter_errors_total)") == 0
        assert real.value("min(torch_grad_exporter_collector_success)") == 1
    assert running.interrupt() == 0


@pytest.mark.full
def test_early_ctrl_c_exits_with_130(start: Start) -> None:
    """A run interrupted before its last step exits with 130."""
    demo_ = start("--steps", "1000000")
    demo_.scrape_until(lambda s: s.total("torch_train_steps_total") > 0)
    assert demo_.interrupt() == 130
    assert "Traceback" not in demo_.errors


@pytest.mark.process
def test_injected_nan_is_a_skipped_step(start: Start) -> None:
    """A NaN in one layer is counted, its step is skipped, and later steps are finite."""
    demo_ = start("--inject", "nan@5")
    scrape = demo_.scrape_until(lambda s: s.total("torch_train_steps_total") >= 20)
    assert scrape.total("torch_grad_nonfinite_steps_total") == 1
    assert scrape.total("torch_grad_nonfinite_steps_total", outcome="skipped") == 1
    # The weight of the first block's second linear layer, 64 inputs by 16 outputs, and nothing else.
    assert scrape.total("torch_grad_nonfinite_elements_total", layer="blocks.0.linear2", kind="nan") == 64 * 16
    assert scrape.total("torch_grad_nonfinite_elements_total") == 64 * 16
    assert 0.0 < scrape.total("torch_train_loss") < 10.0


@pytest.mark.full
def test_explosion_halves_the_rate_and_notifies(start: Start) -> None:
    """The learning rate is halved once, printed, marked on the page, and sent to a receiver."""
    with receiver() as there:
        demo_ = start("--inject", "explode@60", "--act", "--notify", there.url)
        said = demo_.read_until(r"GradientExploding: ScaleLearningRate\(factor=0.5, min_lr=0\) changed the training at step (\d+)$")
        assert int(said.group(1)) >= 62
        # The cosine has hardly begun to fall from 1e-3.
        demo_.scrape_until(lambda s: 4e-4 < s.total("torch_train_learning_rate") <= 5e-4)
        demo_.scrape_until(lambda s: s.total("torch_grad_exporter_actions_total", action="ScaleLearningRate", result="done") == 1)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            demo_.url.replace("/metrics", "/api/v1/status"), timeout=PATIENCE
        ) as answer:
            page = answer.read().decode()
        assert [(one["step"], one["name"], one["result"]) for one in json.loads(page)["actions"]] == [
            (int(said.group(1)), "GradientExploding", "done")
        ]
        assert eventually(lambda: [one.json["alert"] for one in there.asked] == ["GradientExploding"])
        scraped = Scrape(demo_.url).text
        assert demo_.interrupt() == 0
    for shown in (demo_.output, demo_.errors, scraped, page):
        assert SECRET not in shown
    assert "Traceback" not in demo_.errors


@pytest.mark.full
def test_stop_action_ends_the_run_at_a_nan(start: Start) -> None:
    """The demo ends long before its last step and prints the reason and a summary."""
    demo_ = start("--inject", "nan@30", "--act", "--steps", "1000000")
    assert demo_.finish() == 0, demo_.errors
    said = re.search(
        r"^torch_grad_exporter: non-finite gradients: Stop\(\) changed the training at step (\d+)$", demo_.output, re.MULTILINE
    )
    assert said, demo_.output
    assert int(demo_.summary("optimizer steps").replace(",", "")) == int(said.group(1)) >= 29
    assert demo_.summary("non-finite steps") == "1"


@pytest.mark.full
def test_clip_policy_replaces_clipping(start: Start) -> None:
    """With `--clip` the exporter clips instead of the loop, and the summary compares the other policies."""
    demo_ = start("--clip", "agc", "--steps", "60", "--inject", "stall@50:600")
    demo_.read_until("step 50: stall")
    scrape = demo_.scrape_until(lambda s: s.total("torch_train_steps_total") == 49 and bool(s.rows(CANDIDATES)))
    others = {"MaxNorm(1.0)", "ZClip()", "AutoClip()", "MaxValue(0.1)"}
    assert {policy: len(scrape.rows(CANDIDATES, policy=policy)) for policy in others} == dict.fromkeys(others, 1)
    assert scrape.rows(CANDIDATES, policy="AGC()") == []
    assert scrape.rows("torch_grad_clip_threshold", policy="MaxNorm(1.0)") == [1.0]
    # AGC's limit is a hundredth of each unit's weights: it makes these gradients much smaller, and those of layers differently.
    assert scrape.total("torch_grad_global_norm_after_clip") < 0.5 * scrape.total("torch_grad_global_norm")
    assert len(set(scrape.rows("torch_grad_layer_clip_coefficient"))) > 3
    assert scrape.total("torch_grad_exporter_errors_total") == 0
    assert demo_.interrupt() == 130
    said = demo_.output.partition("Steps that other policies would have clipped:\n")[2]
    assert {line.split()[0] for line in said.splitlines()} == others


@pytest.mark.process
@pytest.mark.parametrize("where", ["argument", "environment"])
def test_wrong_webhook_is_an_error(where: str) -> None:
    """A webhook without a valid scheme exits with 2, and the message does not contain the address."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_GRAD_EXPORTER_WEBHOOK_URL"}
    arguments = ["--notify", f"ftp://example.org/{SECRET}"] if where == "argument" else ["--notify"]
    result = subprocess.run(
        command("--steps", "1", *arguments), capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment
    )
    assert result.returncode == 2
    assert ("https://" if where == "argument" else "TORCH_GRAD_EXPORTER_WEBHOOK_URL") in result.stderr
    assert SECRET not in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.full
def test_injected_explosion_is_a_spike(start: Start) -> None:
    """For some steps the norms are thousands of times larger, and the spike counter rises."""
    demo_ = start("--inject", "explode@60")
    scrape = demo_.scrape_until(lambda s: s.total("torch_train_steps_total") >= 80)
    assert scrape.total("torch_grad_global_norm_spikes_total") >= 1
    usual = scrape.total("torch_grad_norm", layer="head")
    assert scrape.total("torch_grad_norm_recent_max", layer="head") > 100 * usual
    assert 0.0 < scrape.total("torch_train_loss") < 10.0


@pytest.mark.full
def test_injected_vanishing_hits_early_layers(start: Start) -> None:
    """Norms of early layers are below 1e-7 of the global norm and not zero; late layers keep theirs."""
    demo_ = start("--inject", "vanish@3")
    scrape = demo_.scrape_until(lambda s: s.total("torch_train_steps_total") >= 10)
    global_norm = scrape.total("torch_grad_global_norm")
    assert 0.0 < scrape.total("torch_grad_norm", layer="blocks.0.linear1") < 1e-7 * global_norm
    assert scrape.total("torch_grad_norm", layer="blocks.1.linear1") > 1e-3 * global_norm


@pytest.mark.full
def test_injected_dead_units_show_in_their_layer(start: Start) -> None:
    """Every unit of one layer is dead in all samples, and its counterpart is not."""
    demo_ = start("--inject", "dead@1")
    scrape = demo_.scrape_until(lambda s: bool(s.rows("torch_grad_dead_ratio", layer="blocks.0.linear1")))
    assert scrape.rows("torch_grad_dead_ratio", layer="blocks.0.linear1") == [1.0]
    assert scrape.rows("torch_grad_zero_units_ratio", layer="blocks.0.linear1") == [1.0]
    assert scrape.total("torch_grad_dead_ratio", layer="blocks.1.linear1") < 0.5


@pytest.mark.full
def test_stalled_loop_is_still_scraped(start: Start) -> None:
    """While the loop hangs, `/metrics` answers with the time of the last step."""
    demo_ = start("--inject", "stall@6:600")
    demo_.read_until("step 6: stall")
    # Two seconds are some hundred steps of this model.
    scrape = demo_.scrape_until(lambda s: time.time() - s.total("torch_train_last_step_timestamp_seconds") > 2.0)
    assert scrape.total("torch_train_steps_total") == 5
    assert demo_.interrupt() == 0
    assert demo_.summary("optimizer steps") == "5"
    assert "Traceback" not in demo_.errors


@pytest.mark.full
def test_progress_without_tqdm(start: Start) -> None:
    """Without tqdm the demo prints step and loss in plain lines."""
    hidden = "import sys; sys.modules['tqdm'] = None; from torch_grad_exporter.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["demo", *SMALL, "--addr", "127.0.0.1", "--steps", "4", "--inject", "stall@3:1.1"]
    demo_ = start(program=[sys.executable, "-c", hidden, *arguments])
    assert demo_.finish() == 0, demo_.errors
    assert re.search(r"^step 3/4, loss \d\.\d{3}$", demo_.output, re.MULTILINE)
    assert demo_.errors == ""


@pytest.mark.process
def test_bad_arguments_exit_with_2() -> None:
    """The process exits with 2 and one message without a traceback."""
    result = subprocess.run(command("--inject", "flood@3"), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 2
    assert "there is no fault 'flood'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.server
def test_printed_scrape_configuration_is_valid(thirty_steps: Running, tmp_path: Path) -> None:
    """The scrape configuration that the demo prints passes promtool."""
    printed = re.search(r"^scrape_configs:\n.+\n", thirty_steps.output, re.MULTILINE)
    assert printed
    assert "honor_labels: true" in printed.group()
    (tmp_path / "prometheus.yml").write_text(printed.group())
    check = [find("promtool"), "check", "config", tmp_path / "prometheus.yml"]
    subprocess.run(check, check=True, capture_output=True, timeout=PATIENCE)


def test_python_without_source_is_an_error(tmp_path: Path) -> None:
    """Without the standard library's source the demo says that it needs it."""
    with pytest.raises(demo.DemoError, match="source of Python's standard library"):
        demo.read_corpus(tmp_path)
