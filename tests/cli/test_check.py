"""The gate: the verdict on real runs, by exit code, table and JUnit's XML."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree as ET

import pytest
import torch

from tests.cli.test_plot import PASSWORD, answering, folder, training
from tests.support.models import Perceptron, batch, sgd
from tests.support.saved_runs import OFF, STEPS, trained
from tests.support.tools import PATIENCE
from torch_grad_exporter import start_exporter
from torch_grad_exporter.cli import main as cli
from torch_grad_exporter.rules import RULES
from torch_grad_exporter.rules.catalogue import promql_only

__all__ = ["folder"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a healthy run, and one with each of the faults that several tests read."""
    found = tmp_path_factory.mktemp("runs")
    trained(found / "healthy.json.gz")
    for kind in ("explode", "vanish"):
        trained(found / f"{kind}.json", kind)
    return found


def checked(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """The exit code and what is printed."""
    try:
        code = cli.main(["check", *map(str, arguments)])
    except SystemExit as end:
        code = int(end.code or 0)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.slow
def test_healthy_run_exits_with_zero(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A healthy run exits with 0, is named, and shows each rule as passed or as not judged with the reason."""
    code, out = checked(capsys, runs / "healthy.json.gz")
    assert code == 0, out
    assert f"{STEPS} steps, {STEPS} samples" in out.splitlines()[0]
    assert out.splitlines()[-1].startswith("HEALTHY: ")
    assert "  ok      GradientVanishing\n" in out
    assert all(rule.name in out for rule in RULES)
    assert re.search(r"only Prometheus judges it: [\w\s,]*TrainingTargetDown", out)
    assert "the run has no torch_weight_update_ratio: LayerNotUpdating" in out
    assert "takes 30 minutes or 144 samples: LayerDead" in out


def test_planted_faults_fail_by_their_rules(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each planted fault fails with its alert, severity and steps, unless it is below `--fail-on` and is not named there."""
    for kind, told in (
        ("explode", "GradientExploding: warning, steps 32 to 120: The global gradient norm spiked 5 times"),
        ("vanish", "GradientVanishing\n          warning, steps "),
    ):
        code, out = checked(capsys, runs / f"{kind}.json")
        assert code == 1, out
        assert f"FAILED  {told}" in out
        assert out.splitlines()[-1].startswith("NOT HEALTHY: ")
    code, out = checked(capsys, runs / "explode.json", "--fail-on", "critical")
    assert code == 0, out
    assert "noted   GradientExploding" in out
    assert checked(capsys, runs / "explode.json", "--fail-on", "critical,GradientExploding")[0] == 1


@pytest.mark.slow
def test_limits_find_what_no_alert_covers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A skipped NaN step and a stall of a second pass without options, and fail against a limit."""
    run = trained(tmp_path / "run.json", "nan", "stall", steps=60)
    assert checked(capsys, run)[0] == 0
    for limit in ("torch_grad_nonfinite_steps_total=0", "torch_train_slowest_step_seconds=1.1"):
        code, out = checked(capsys, run, "--max", limit)
        assert code == 1, out
        assert f"FAILED  --max {limit}" in out


def test_step_on_a_nan_is_critical(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step on a NaN fails also with `--fail-on critical`, and its norms keep no limit."""
    model = Perceptron()
    optimizer = sgd(model)
    with start_exporter(model, None, every=1, collectors=OFF) as exporter:
        for step in range(12):
            (model(batch()).square().mean() * (float("nan") if step == 9 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    exporter.save(tmp_path / "run.json")
    code, out = checked(capsys, tmp_path / "run.json", "--fail-on", "critical")
    assert code == 1, out
    assert "FAILED  TrainingNonFiniteGradients" in out
    assert checked(capsys, tmp_path / "run.json", "--fail-on", "warning,TrainingFailed")[0] == 0
    code, out = checked(capsys, tmp_path / "run.json", "--fail-on", "info", "--max", "torch_grad_norm=1e9")
    assert (code, 'torch_grad_norm{layer="first"} is nan' in out) == (1, True), out


def test_last_line_says_that_the_loss_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a training that reports no loss the verdict says so, and how to report it; of one that does it says nothing."""
    for reported in (False, True):
        model = Perceptron()
        optimizer = sgd(model)
        with start_exporter(model, None, every=1, collectors=OFF) as exporter:
            for _ in range(12):
                loss = model(batch()).square().mean()
                loss.backward()
                exporter.observe(loss=loss if reported else None)
                optimizer.step()
                optimizer.zero_grad()
        exporter.save(tmp_path / "run.json")
        code, out = checked(capsys, tmp_path / "run.json")
        last = out.splitlines()[-1]
        assert (code, last.startswith("HEALTHY: ")) == (0, True), out
        assert last.endswith("; the loss was not judged: the training has to call exporter.observe(loss=loss)") != reported


# Where nothing can be said


def test_run_without_samples_is_unusable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without a sample exits with 2, in the table and in the XML."""
    with start_exporter(torch.nn.Linear(2, 2), None, collectors=OFF) as exporter:
        pass
    exporter.save(tmp_path / "run.json")
    code, out = checked(capsys, tmp_path / "run.json", "--junit", tmp_path / "junit.xml")
    assert code == 2
    assert "UNUSABLE: the run has no samples" in out
    assert [case.tag for case in ET.parse(tmp_path / "junit.xml").iterfind(".//testcase/*")] == ["error"]  # noqa: S314 - what we wrote


def test_other_files_are_unusable(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing, foreign, damaged or older file and a missing server exit with 2."""
    healthy = json.loads(_text(runs / "healthy.json.gz"))
    contents = {
        "foreign.json": {"a": 1},
        "earlier.json": {key: value for key, value in healthy.items() if key != "judged"},
        "damaged.json": {**healthy, "judged": {**healthy["judged"], "wrong": [{"alert": "x"}]}},
        "damaged2.json": {**healthy, "metrics": {"torch_train_loss": {"labels": ["x"], "rows": [[]], "values": [1]}}},
        "damaged3.json": {**healthy, "judged": 3},
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "cut.json").write_bytes((runs / "healthy.json.gz").read_bytes()[:1000])
    for source in (*contents, "cut.json", "missing.json"):
        code, out = checked(capsys, tmp_path / source, "--junit", tmp_path / "junit.xml")
        assert code == 2, source
        assert "check: error: " in out
        assert b"<error " in (tmp_path / "junit.xml").read_bytes()
    code, out = checked(capsys, "http://127.0.0.1:1")
    assert (code, "does not answer" in out) == (2, True)


def test_named_rules_must_be_judged(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A named alert or comparison that cannot be judged fails; one that was not named does not."""
    healthy = runs / "healthy.json.gz"
    assert checked(capsys, healthy, "--fail-on", "critical")[0] == 0
    code, out = checked(capsys, healthy, "--fail-on", "critical,LayerDead")
    assert code == 1
    assert "FAILED LayerDead: asked for by name, and could not be judged: takes" in " ".join(out.split())
    assert checked(capsys, healthy)[1].endswith(" were not judged\n")
    without = json.loads(_text(healthy))
    for view in ("whole", "recent"):
        without["run"][view]["loss"] = [None] * len(without["run"][view]["loss"])
    path = runs / "without.json"
    path.write_text(json.dumps(without))
    assert checked(capsys, path, "--baseline", path)[0] == 0
    code, out = checked(capsys, path, "--baseline", path, "--tolerance", "final_loss=0.1")
    assert (code, "FAILED  final_loss" in out, "FAILED  mean_loss" in out) == (1, True, False)


@pytest.mark.slow
def test_worst_of_several_runs_counts(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run has its table and suite, and an unreadable one makes the result unusable."""
    healthy, failed = runs / "healthy.json.gz", trained(tmp_path / "failed.json", steps=30, raises=True)
    code, out = checked(capsys, healthy, failed, healthy, "--junit", tmp_path / "junit.xml")
    assert (code, out.count("\nHEALTHY: "), out.count("NOT HEALTHY: ")) == (1, 2, 1)
    suites = ET.parse(tmp_path / "junit.xml").findall("testsuite")  # noqa: S314 - what we wrote
    assert [int(suite.attrib["failures"]) > 0 for suite in suites] == [False, True, False]
    assert len({suite.attrib["name"] for suite in suites}) == 3
    code, out = checked(capsys, tmp_path / "missing.json", healthy)
    assert (code, out.count("HEALTHY: "), "cannot read" in out) == (2, 1, True)


def test_hostile_names_do_not_reach_the_terminal(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name with line breaks, escapes or half a character is printed on one line without them."""
    found = json.loads(_text(runs / "healthy.json.gz"))
    found["status"]["run"] = "a\n::error file=b::c\x1b[2J\x9b2J\u2028d\ud800"
    path = tmp_path / "run.json"
    path.write_text(json.dumps(found))
    code, out = checked(capsys, path, "--junit", tmp_path / "junit.xml")
    assert code == 0
    assert out.splitlines()[0].startswith("run a ::error file=b::c [2J 2J d?, rank 0")
    assert not {"\x1b", "\x9b", "\u2028"} & set(out)
    ET.parse(tmp_path / "junit.xml")  # noqa: S314 - what we wrote


def test_password_is_never_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Output and XML never contain the password of an address."""
    with answering(b"<html>please log in</html>") as address:
        for source in (address.replace("://", "://ci:S3CR@ET@"), "http://ci:S3CR@ET@host:port", "http://ci:S3CR@ET@127.0.0.1:1"):
            code, out = checked(capsys, source, "--junit", tmp_path / "junit.xml")
            assert code == 2
            told = out + (tmp_path / "junit.xml").read_text()
            assert "S3CR" not in told
            assert "ET@" not in told


HEAD = b'{"format": "torch_grad_exporter history", "version": 1, "x": '
HOSTILE = {
    "bomb": (gzip.compress(bytes(2**26), compresslevel=1), "unpacked, is larger than 48 MiB"),
    "large": (bytes(2**26), "is larger than 48 MiB"),
    "many values": (HEAD + b"[" + b"[]," * 1_000_000, "has more than 1,000,000 values"),
    "deep": (HEAD + b"[" * 10**5, "is not a history"),
    "cut": (gzip.compress(HEAD * 1000)[:-9], "is not a history"),
    "empty parts": (gzip.compress(b"") * 10**4, "is not a history"),
    "terminal": (HEAD.replace(b": 1,", b': "\\u001b[2J",') + b"1}", "has version"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Content that would take much memory or time is refused in a line before it does."""
    content, reason = HOSTILE[name]
    (tmp_path / "run.json").write_bytes(content)
    tracemalloc.start()
    code, out = checked(capsys, tmp_path / "run.json")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (code, out.count("\n")) == (2, 1), out
    assert reason in out
    assert "\x1b" not in out
    assert peak < 100 * 2**20


@pytest.mark.parametrize("claim", ["steps", "cells", "rules", "name"])
def test_claims_beyond_any_run_are_refused(claim: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with more steps, cells or rules than one can have is damaged."""
    run = json.loads(_text(runs / "healthy.json.gz"))
    if claim == "rules":
        run["judged"]["rules"] *= 1_000
    elif claim == "name":
        run["status"]["run"] = "a" * 100_000
    else:
        many = list(range(20_000 if claim == "steps" else 9_000))
        for course in (run["run"]["whole"], run["layers"]["norm"]["whole"]):
            course["steps"] = course["times"] = many
    if claim == "cells":
        run["run"]["whole"] = run["run"]["recent"]
        run["layers"]["norm"]["whole"]["layers"] *= 30
    (tmp_path / "run.json").write_text(json.dumps(run))
    code, out = checked(capsys, tmp_path / "run.json")
    assert code == 2
    assert "has more than" in out or "is too long" in out


def test_what_is_no_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder, a pipe without a writer and an endless device are refused in a line, and nothing waits."""
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        code, out = checked(capsys, source)
        assert (code, out.count("\n")) == (2, 1), out
        assert "is a folder, a pipe or a device, not a file" in out


# Where it is printed


def printed(stream: io.TextIOBase, *arguments: str | Path) -> int:
    """The exit code of a command with this standard output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        return cli.main([*map(str, arguments)])


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_names_beyond_the_encoding_are_escaped(encoding: str, runs: Path, tmp_path: Path) -> None:
    """A name that standard output cannot have is printed with escapes, and the verdict is the same."""
    run = json.loads(_text(runs / "healthy.json.gz"))
    run["status"]["run"] = "schicht.ä.層"
    (tmp_path / "run.json").write_text(json.dumps(run), encoding="utf-8")
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    assert printed(out, "check", tmp_path / "run.json") == 0
    assert out.buffer.getvalue().decode(encoding).startswith(("run schicht.\\xe4.\\u5c64, rank 0", "run schicht.ä.\\u5c64, rank 0"))


@pytest.mark.parametrize("command", ["check", "plot", "assets", "demo"])
@pytest.mark.parametrize("where", ["a full disk", "a closed pipe"])
def test_output_that_takes_nothing_is_no_verdict(
    where: str, command: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command ends with 2 and one line where standard output takes nothing; the XML of a verdict is written all the same."""
    arguments: dict[str, list[str | Path]] = {
        "check": [runs / "healthy.json.gz", "--junit", tmp_path / "junit.xml"],
        "plot": [runs / "healthy.json.gz", "--out", tmp_path / "a.html"],
        "assets": ["--out", tmp_path / "assets"],
        "demo": ["--steps", "1", "--width", "8", "--layers", "1", "--port", "0", "--addr", "127.0.0.1"],
    }
    reader, writer = os.pipe()
    os.close(reader)
    taken = os.open("/dev/full", os.O_WRONLY) if where == "a full disk" else os.dup(writer)
    os.close(writer)
    with os.fdopen(taken, "w") as stream:
        assert printed(stream, command, *arguments[command]) == 2
    err = capsys.readouterr().err.splitlines()
    reason = "No space left on device" if where == "a full disk" else "Broken pipe"
    assert [line for line in err if "error" in line] == [f"torch-grad-exporter {command}: error: cannot print: {reason}"]
    assert (tmp_path / "junit.xml").exists() == (command == "check")


@pytest.mark.process
def test_exit_code_of_a_closed_pipe(runs: Path) -> None:
    """The process itself ends with 2, in a line, where the reader of a pipe is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torch_grad_exporter", "check", runs / "healthy.json.gz"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (2, "torch-grad-exporter check: error: cannot print: Broken pipe\n")


def test_wrong_options_suggest_names(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown alert, metric, label or comparison is an error that suggests a name."""
    run = runs / "healthy.json.gz"
    for arguments, told in (
        (["--fail-on", "GradientsExploding"], "GradientExploding"),
        (
            ["--fail-on", "CudaOutOfMemory"],
            "only Prometheus judges this alert; limit a metric, as in --max torch_cuda_ooms_total=0",
        ),
        (["--max", "torch_grad_globl_norm=1"], "did you mean torch_grad_global_norm"),
        (["--max", 'torch_grad_norm{leyer="head"}=1'], "labels layer, not leyer"),
        (["--max", "torch_grad_norm_distribution=1"], "is a histogram"),
        (["--max", "torch_grad_norm"], "write METRIC=VALUE"),
        (["--max", "torch_grad_norm{layer=head}=1"], "write METRIC=VALUE"),
        (["--max", "torch_grad_norm=nan"], "write METRIC=VALUE"),
        (["--max", 'torch_grad_norm{layer=~"("}=1'], "not a regular expression"),
        (["--peak", "torch_train_steps_total=1"], "--peak takes"),
        (["--tolerance", "loss=1"], "final_loss"),
        (["--tolerance", "final_loss=x"], "a number of at least 0"),
        (["--tolerance", "final_loss=1"], "there is no baseline"),
        (["--fail-on", ""], 'or "none"'),
        (["--junit", "/nowhere/at/all.xml"], "cannot write"),
    ):
        code, out = checked(capsys, run, *arguments)
        assert code == 2, arguments
        assert told in out, out


# Limits


def test_values_are_held_against_limits(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A value at the limit passes, every series is judged, and an absent one fails."""
    for option, limit, code in (
        ("--max", f"torch_train_steps_total={STEPS}", 0),
        ("--max", f"torch_train_steps_total={STEPS - 1}", 1),
        ("--min", f"torch_train_steps_total={STEPS}", 0),
        ("--min", f"torch_train_steps_total={STEPS + 1}", 1),
        ("--max", 'torch_grad_norm{layer="head"}=1e-9', 1),
        ("--max", 'torch_grad_norm{layer="head"}=1e9', 0),
        ("--max", 'torch_grad_norm{layer=~"blocks\\..*"}=1e-9', 1),
        ("--max", 'torch_grad_norm{layer="nowhere"}=1e9', 1),
        ("--peak", "torch_train_loss=5", 1),
        ("--max", "torch_train_loss=5", 0),
        ("--peak", 'torch_grad_norm{layer="head"}=0.01', 1),
    ):
        found, out = checked(capsys, runs / "healthy.json.gz", option, limit)
        assert found == code, out


# Against a baseline


@pytest.mark.slow
def test_other_seed_matches_the_baseline(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another seed passes every comparison except the time of a step."""
    code, out = checked(
        capsys, trained(tmp_path / "run.json", seed=1), "--baseline", runs / "healthy.json.gz", "--tolerance", "step_seconds=1000"
    )
    assert code == 0, out
    for name in ("final_loss", "mean_loss", "global_norm_median", "global_norm_p95", "layer_norm_median", "skipped_steps"):
        assert f"ok      {name}: " in out


@pytest.mark.slow
def test_run_unlike_its_baseline_fails(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers of only one run are named, and a loss beyond its tolerance fails."""
    deeper = trained(tmp_path / "run.json", layers=3, seed=3)
    code, out = checked(capsys, deeper, "--baseline", runs / "healthy.json.gz", "--tolerance", "layer_norm_median=0")
    assert code == 1, out
    assert "FAILED  layer_norm_median" in out
    assert "only in this run: blocks.2.self_attn" in " ".join(out.split())
    worse = runs / "vanish.json"
    code, out = checked(capsys, worse, "--baseline", runs / "healthy.json.gz", "--fail-on", "none")
    assert code == 1, out
    assert "FAILED  layer_norm_median" in out
    code, out = checked(capsys, runs / "healthy.json.gz", "--baseline", worse, "--tolerance", "layer_norm_median=1e15")
    assert "FAILED  layer_norm_median" not in out


# JUnit


CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"testcase", "system-out"},
    "testcase": {"skipped", "error", "failure", "system-out"},
    "skipped": set(),
    "error": set(),
    "failure": set(),
    "system-out": set(),
}
NEEDED = {"testsuite": {"name", "tests", "failures", "errors"}, "testcase": {"name"}}
ALLOWED = {
    "testsuites": {"name", "time", "tests", "failures", "errors"},
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time", "timestamp", "hostname"},
    "testcase": {"name", "classname", "time"},
    "skipped": {"message", "type"},
    "error": {"message", "type"},
    "failure": {"message", "type"},
    "system-out": set(),
}
"""What the schema of Jenkins' xUnit plugin, version 10, has of what is used here."""


@pytest.mark.slow
def test_junit_xml_has_a_case_for_each_row(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rule, limit and comparison is a test case, whatever a layer is called."""
    run = json.loads(_text(runs / "vanish.json"))
    for one in run["judged"]["wrong"]:
        one["text"] = "a\x00b <&> \ud800 " + one["text"]
    (tmp_path / "run.json").write_text(json.dumps(run))
    arguments = ["--baseline", runs / "healthy.json.gz", "--max", 'torch_grad_norm{layer="head"}=0', "--junit", tmp_path / "j.xml"]
    assert checked(capsys, tmp_path / "run.json", *arguments)[0] == 1
    root = ET.parse(tmp_path / "j.xml").getroot()  # noqa: S314 - what we wrote
    for element in root.iter():
        assert {child.tag for child in element} <= CHILDREN[element.tag]
        assert NEEDED.get(element.tag, set()) <= set(element.attrib) <= ALLOWED[element.tag]
    [suite] = root
    cases = {(case.get("classname"), case.get("name")): case for case in suite.iterfind("testcase")}
    rules = {rule.name for rule in RULES} | promql_only()
    assert int(suite.get("tests", "")) == len(cases) == len(rules) + 7 + 1
    assert {name for group, name in cases if group == "torch_grad_exporter.rules"} == rules
    failed = {name for (_, name), case in cases.items() if case.find("failure") is not None}
    assert {"GradientVanishing", "layer_norm_median", '--max torch_grad_norm{layer="head"}=0'} <= failed
    assert int(suite.get("failures", "")) == len(failed)
    assert int(suite.get("skipped", "")) == len(suite.findall("testcase/skipped"))
    told = cases["torch_grad_exporter.rules", "GradientVanishing"].find("failure")
    assert told is not None
    assert "a?b <&> ?" in (told.text or "")


def test_junit_xml_goes_into_a_pipe(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe or a device in place of the file, such as /dev/stdout, gets the XML and stays."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert checked(capsys, runs / "healthy.json.gz", "--junit", pipe)[0] == 0
    assert ET.fromstring(os.read(reader, 1 << 16)).tag == "testsuites"  # noqa: S314 - what we wrote
    os.close(reader)
    assert pipe.is_fifo()


# A run that goes on


def test_running_exporter_is_judged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A running exporter is judged by its address, with password and certificate authority."""
    with training(folder / "both.yml") as exporter:
        address = f"https://alice:{quote(PASSWORD, safe='')}@localhost:{exporter.port}"
        code, out = checked(capsys, address, "--cacert", folder / "ca.crt", "--min", "torch_train_steps_total=3")
        assert code == 0, out
        assert f"run {exporter.run}, rank 0 of 1: 3 steps, 3 samples" in out
        assert "training" in out.splitlines()[0]
        assert checked(capsys, address)[0] == 2
        assert checked(capsys, address, "--cacert", folder / "ca.crt", "--max", "torch_train_steps_total=2")[0] == 1


def test_local_addresses_bypass_proxies(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter of this host is asked itself; the refusal of another address by a proxy is said to be one, without advice."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with answering(b"no", status=403) as proxy, training() as exporter:
        monkeypatch.setenv("http_proxy", proxy.replace("://", "://ci:S3CRET@"))
        assert checked(capsys, f"http://127.0.0.1:{exporter.port}")[0] == 0
        assert checked(capsys, f"http://localhost:{exporter.port}")[0] == 0
        code, out = checked(capsys, "http://node-7.invalid:9100")
    assert code == 2
    assert f"asked through the proxy {proxy.removeprefix('http://')}, answers 403" in out
    assert "no_proxy=node-7.invalid" in out
    assert "password" not in out
    assert "S3CRET" not in out


def _text(path: Path) -> str:
    """A saved run as text."""
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
