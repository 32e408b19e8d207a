"""`torch-grad-exporter run`: its arguments, what it says, and that a script ends under it as it would by itself."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import Starter
from tests.support.tools import REPOSITORY
from torch_grad_exporter import start_exporter
from torch_grad_exporter.cli import run
from torch_grad_exporter.cli.main import main
from torch_grad_exporter.cli.script import Target

SCRIPTS = Path(__file__).parent / "scripts"

QUIET = ["--port", "off", "--every", "1"]

# Arguments


def test_options_stand_before_the_script() -> None:
    """Options before the script are ours, and everything after it is the script's."""
    options = run.parse(
        ["--port", "9200", "--every=5", "--moments", "--include", "a", "--include=b", "train.py", "--port", "1", "-m", "x"]
    )
    assert options.target == Target("train.py", ["--port", "1", "-m", "x"])
    assert options.options == {"port": 9200, "every": 5, "moments": True, "include": ["a", "b"]}
    assert run.parse(["-m", "package.train", "--port", "1"]).target == Target("package.train", ["--port", "1"], is_module=True)
    assert run.parse(["-mpackage.train", "a"]).target == Target("package.train", ["a"], is_module=True)
    assert run.parse(["--", "--odd.py", "a"]).target == Target("--odd.py", ["a"])


def test_start_exporter_arguments_are_options() -> None:
    """Each keyword of `start_exporter` that a text can express is an option."""
    objects = {"model", "optimizers", "grad_scaler", "clip", "dry_run", "alerts", "registry", "extra_registries", "meter_provider"}
    assert {one.name for one in run.OFFERED} == set(inspect.signature(start_exporter).parameters) - objects


WRONG = [
    (["--lr", "3", "train.py"], "unknown option --lr; options of the script stand behind it"),
    (["--clip=1", "train.py"], "unknown option --clip"),
    (["--evry", "5", "train.py"], "unknown option --evry; did you mean --every?"),
    (["--port", "1"], "name the script to run"),
    (["-m"], "name the module"),
    (["--port"], "argument --port: expected a value"),
    (["--port=many", "train.py"], "--port='many': expected a number or off"),
    (["--otlp-interval=0", "train.py"], "otlp_interval=0.0: expected"),
    (["--save", "/nowhere/at/all.json", "train.py"], "cannot be written; name a file in an existing folder"),
]


def test_wrong_options_exit_before_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong option or variable exits with 2 and the fix before the script starts."""
    for arguments, said in WRONG:
        with pytest.raises(SystemExit) as ended:
            main(["run", *arguments])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


UNRUNNABLE = [
    (["torchrun", "--nproc-per-node=2", "train.py"], "torchrun --nproc-per-node=2 -m torch_grad_exporter run train.py"),
    (["/usr/bin/accelerate", "launch"], "accelerate launch -m torch_grad_exporter run train.py"),
    (["-m", "torch.distributed.run", "train.py"], "torchrun --nproc-per-node=2 -m torch_grad_exporter run train.py"),
    (["python", "train.py"], "torch-grad-exporter run train.py"),
    (["no_such_script.py"], "there is no script 'no_such_script.py'"),
    (["gpt"], "there is no script 'gpt'; there is 'gpt.py'"),
    (["."], "'.' is a directory"),
    (["-"], "standard input"),
    (["-m", "no_such_module"], "there is no module 'no_such_module'"),
    (["-m", "no_such_package.train"], "module 'no_such_package.train' cannot be imported: ModuleNotFoundError"),
    (["-m", "tests"], "there is no module 'tests.__main__'"),
]


def test_unrunnable_scripts_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher, a directory and a missing file are named with what to do, and exit with 2."""
    monkeypatch.chdir(SCRIPTS)
    path = [*sys.path]
    for arguments, said in UNRUNNABLE:
        assert main(["run", *arguments]) == 2
        assert said in capsys.readouterr().err
        assert path == sys.path


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    """`run --help-all` lists every option with its default."""
    with pytest.raises(SystemExit):
        main(["run", "--help-all"])
    shown = capsys.readouterr().out
    assert all(f"--{one.name.replace('_', '-')} " in shown for one in run.OFFERED)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "run a training script" in capsys.readouterr().out


# How a script ends


LOOP = """
import sys
import torch
from pathlib import Path

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train():
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        if step == 3:
            HERE

print(sys.argv[1:], __name__, Path(__file__).name, sys.modules["__main__"].train is train)
train()
print("done", model.weight.sum().item())
"""

FAIL_AGAIN = """try:
                [][0]
            except IndexError as error:
                raise OSError from error"""

# As by Ctrl-C while autograd runs: the first Python code behind it is interrupted.
INTERRUPTED = """import _thread, functools
            loss = model(torch.randn(4, 3)).square().mean()
            loss.register_hook(functools.partial(next, iter(_thread.interrupt_main, 0)))
            loss.backward()"""

ENDS = {
    "by sys.exit": ("sys.exit(3)", 3, "failed"),
    "by an exception from another": (FAIL_AGAIN, 1, "failed"),
    "by KeyboardInterrupt": ("raise KeyboardInterrupt", -signal.SIGINT, "finished"),
    "by Ctrl-C in a backward": (INTERRUPTED, -signal.SIGINT, "finished"),
}


@pytest.mark.process
@pytest.mark.parametrize("name", ENDS)
def test_script_ends_as_without_the_exporter(starter: Starter, tmp_path: Path, name: str) -> None:
    """Status, output and traceback are the same, and an orderly end writes the history."""
    here, status, state = ENDS[name]
    script = tmp_path / "train.py"
    script.write_text(LOOP.replace("HERE", here))
    plain, saved = starter.start_file(script, "a", "-b"), tmp_path / "run.json"
    assert plain.wait() == status
    ran = starter.start_file(script, "a", "-b", run=[*QUIET, "--save", str(saved)])
    assert ran.wait() == status, ran.err.read_text()
    assert ran.out.read_text() == plain.out.read_text()
    assert re.fullmatch(rf"{state}.* after [34] steps: 4 samples, .*; saved to {saved}", said(ran.err.read_text())[-1])
    mine = [line for line in ran.err.read_text().splitlines() if not line.startswith("torch_grad_exporter: ")]
    # The starter of plain programs is in their tracebacks, which the interpreter's own frames are not.
    theirs = [line for line in plain.err.read_text().splitlines() if '"<string>"' not in line]
    assert mine == theirs
    assert f'"{state}"' in saved.read_text()


@pytest.mark.process
def test_run_ends_with_a_summary(starter: Starter, tmp_path: Path) -> None:
    """The last line says what became of the run and how to keep it, once, whatever the script's own log shows."""
    script = tmp_path / "train.py"
    script.write_text(
        "import logging\nlogging.basicConfig(level=0)\n"
        + LOOP.replace("HERE", "optimizer.param_groups[0]['lr'] = math.nan").replace("import sys", "import math, sys")
    )
    ran = starter.start_file(script, run=["--port", "0", "--addr", "127.0.0.1", "--every", "1"])
    assert ran.wait() == 0, ran.err.read_text()
    *_, line = ran.err.read_text().splitlines()
    assert line.startswith("torch_grad_exporter: finished after 6 steps: 6 samples, last gradient norm nan, NaN or Inf in 1 step, ")
    assert "problems: TrainingNonFiniteGradients; " in line
    assert ran.err.read_text().count("--save") == 1
    assert "nothing has read" not in ran.err.read_text()


def output(*command: str | Path, **variables: str) -> tuple[int, str, str]:
    """Status, output and errors of a process of its own, without the lines of the exporter."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **variables}
    done = subprocess.run(command, env=environment, cwd=SCRIPTS.parent, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, re.sub(r"^torch_grad_exporter: .*\n", "", done.stderr, flags=re.MULTILINE)


REAL = """
import pickle, sys, multiprocessing, helper

class Net:
    pass

def child(queue):
    queue.put(__name__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(), process.join(), sys.argv, sys.path[0], sys.path[1:2], __file__, __spec__, __package__, __doc__)
    print(sorted(name for name in globals() if name.startswith("__")), type(pickle.loads(pickle.dumps(Net()))) is Net)
    raise RuntimeError("at the end")
"""


@pytest.mark.process
def test_run_behaves_like_the_interpreter(tmp_path: Path) -> None:
    """`run train.py` agrees with `python train.py` on arguments, path, main module, pickles, children and traceback."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "helper.py").write_text("")
    script = tmp_path / "real" / "train.py"
    script.write_text(REAL)
    link = tmp_path / "link.py"
    link.symlink_to(script)
    command = Path(sys.executable).with_name("torch-grad-exporter")
    assert output(command, "run", *QUIET, link, "--lr", "1") == output(sys.executable, link, "--lr", "1")


@pytest.mark.process
def test_run_module_behaves_like_python_m(tmp_path: Path) -> None:
    """`run -m package.train` agrees with `python -m package.train`."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("value = 7")
    (package / "train.py").write_text(
        "import sys\nfrom .other import value\nprint(value, sys.argv, __spec__.name, __package__, __file__)\n1 / 0\n"
    )
    own = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY)))}
    ran = output(sys.executable, "-m", "torch_grad_exporter", "run", *QUIET, "-m", "package.train", "x", **own)
    assert ran == output(sys.executable, "-m", "package.train", "x", **own)
    assert ran[0] == 1


# What it says, and whom it leaves the training to


def said(text: str) -> list[str]:
    """The lines of the exporter."""
    return [line.removeprefix("torch_grad_exporter: ") for line in text.splitlines() if line.startswith("torch_grad_exporter: ")]


@pytest.mark.process
def test_script_without_training_is_reported(starter: Starter, tmp_path: Path) -> None:
    """A script that trains nothing keeps its status, a line says why, and no history of an earlier run is left for a gate."""
    script, saved = tmp_path / "untrained.py", tmp_path / "run.json"
    script.write_text("import torch\nprint(torch.ones(3).sum())\n")
    saved.write_text("{}")
    ran = starter.start_file(script, run=[*QUIET, "--save", str(saved)])
    assert ran.wait() == 0
    assert said(ran.err.read_text())[0].startswith("nothing was watched: this process never trained")
    assert not saved.exists()


@pytest.mark.process
@pytest.mark.parametrize("at", [0, 4])
def test_script_keeps_its_own_exporter(starter: Starter, tmp_path: Path, at: int) -> None:
    """A script's own exporter gets the port and the models, and its numbers are right and saved."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"VALUES": str(tmp_path / "values"), "RECORD": str(tmp_path / "record")}
    options = ["--port", port, "--addr", "127.0.0.1", "--save", str(tmp_path / "run.json")]
    ran = starter.start_file(SCRIPTS / "watched.py", str(at), port, run=options, variables=variables)
    assert ran.wait() == 0, ran.err.read_text()
    assert ran.out.read_text() == "True\n"
    lines = said(ran.err.read_text())
    assert any(line.startswith("the script starts an exporter of its own") for line in lines)
    assert f"serving http://127.0.0.1:{port}/ (metrics at /metrics)" in lines
    rounds = json.loads((tmp_path / "record").read_text())
    *_, last = [json.loads(line) for line in (tmp_path / "values").read_text().splitlines()]
    assert last["torch_grad_norm/weight"] == pytest.approx(rounds[-1]["weight"], rel=1e-5)
    assert last["torch_grad_captures_total/weight"] == len(rounds)
    assert (tmp_path / "run.json").exists()


FORKS = """
import os, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if os.fork() == 0:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    os._exit(0)
os.wait()
print("over")
"""


@pytest.mark.process
def test_training_in_a_forked_child_is_reported(starter: Starter, tmp_path: Path) -> None:
    """Training in a forked process goes on unwatched, which is logged once."""
    script = tmp_path / "train.py"
    script.write_text(FORKS)
    ran = starter.start_file(script, run=QUIET)
    assert ran.wait() == 0
    assert said(ran.err.read_text())[0].startswith("a process that the script has forked trains: it is not watched")


DDP = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from record import note

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()
    note(model)
    optimizer.step()
os.write(1, f"{dist.get_rank()} of {dist.get_world_size()}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.full
def test_torchrun_watches_each_rank(tmp_path: Path) -> None:
    """`torchrun -m torch_grad_exporter run` shows the reduced norm once and writes a history for each rank."""
    script = tmp_path / "train.py"
    script.write_text(DDP)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    status, out, _ = output(
        *torchrun, "-m", "torch_grad_exporter", "run", *QUIET, "--save", tmp_path / "run.json", script,
        RECORD=str(tmp_path / "record"), PYTHONPATH=os.pathsep.join((str(REPOSITORY), str(SCRIPTS))),
    )  # fmt: skip
    assert status == 0
    assert sorted(out.splitlines()) == ["0 of 2", "1 of 2"]
    rounds = json.loads((tmp_path / "record").read_text())
    assert json.loads((tmp_path / "record1").read_text()) == rounds
    saved = [json.loads((tmp_path / name).read_text()) for name in ("run.json", "run-rank1.json")]
    assert [(one["status"]["rank"], one["status"]["world_size"], one["status"]["state"]) for one in saved] == [
        (0, 2, "finished"), (1, 2, "finished"),
    ]  # fmt: skip
    assert {*saved[0]["layer"]} == {*rounds[-1]}
    assert not saved[1]["layer"]
    assert saved[0]["status"]["global_norm"] == pytest.approx(math.sqrt(sum(norm**2 for norm in rounds[-1].values())), rel=1e-5)
