"""Programs that run as `python program.py` would, in processes forked off one that has imported torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.tools import eventually

STARTER = """
import gc, json, os, signal, sys, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs this in the background may ignore it
import torch, torch.utils.data
import torch_grad_exporter.cli.main

torch_grad_exporter.start_exporter  # imports what it is made of
torch.set_num_threads(1)
model = torch.nn.Linear(1, 1)  # the first step of a process imports half of torch
model(torch.ones(1, 1)).sum().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
torch.optim.SGD(model.parameters()).step()
gc.freeze()
for line in sys.stdin:
    program, arguments, out, err, options, variables = json.loads(line)
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
if "triton" in sys.modules:
    gc.unfreeze()  # it prints a leak for each of its objects that is frozen when the process ends
for number, path in ((1, out), (2, err)):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.environ.update(variables)
if options is not None:
    import tests.support.last_values
    sys.argv = ["torch-grad-exporter", "run", *options, program, *arguments]
    sys.exit(torch_grad_exporter.cli.main.main())
sys.argv = [program, *arguments]
sys.path[0] = os.path.dirname(program)
with open(program) as file:
    code = compile(file.read(), program, "exec")
starter, main = sys.modules["__main__"], types.ModuleType("__main__")
main.__file__, sys.modules["__main__"] = program, main
exec(code, main.__dict__)
"""


@dataclass
class Program:
    """A program that runs."""

    pid: int
    starter: subprocess.Popen[str]
    out: Path
    err: Path
    started: float = field(default_factory=time.monotonic)
    status: int | None = None
    ended: float | None = None

    def line(self, number: int = 0) -> str:
        """A line of its output, waited for."""
        assert eventually(lambda: self.out.read_text().count("\n") > number or self._over()), "it prints nothing"
        return self.out.read_text().split("\n")[number]

    def port(self) -> int:
        """The port that it prints first."""
        return int(self.line())

    def wait(self, seconds: float = 300.0) -> int:
        """Return its exit status; kill it if it still runs after this many seconds."""
        killer = threading.Timer(seconds, os.kill, (self.pid, signal.SIGKILL))
        killer.start()
        if self.status is None:
            assert self.starter.stdout is not None
            self.status = int(self.starter.stdout.readline())
            self.ended = time.monotonic()
        killer.cancel()
        killer.join()
        return self.status

    def _over(self) -> bool:
        return not Path(f"/proc/{self.pid}/stat").exists()


class Starter:
    """Starts programs, one at a time."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        environment.pop("PYTHONWARNINGS", None)
        self._folder = folder
        self._number = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self, text: str, *arguments: str) -> Program:
        """Runs a program with these arguments."""
        path = self._folder / "program.py"  # the same name each time: tracebacks name it
        path.write_text(textwrap.dedent(text))
        return self.start_file(path, *arguments)

    def start_file(
        self, path: Path, *arguments: str, run: Sequence[str] | None = None, variables: Mapping[str, str] | None = None
    ) -> Program:
        """Runs a file with these arguments; `run`: by `torch-grad-exporter run` with these options."""
        self._number += 1
        out, err = self._folder / f"out{self._number}", self._folder / f"err{self._number}"
        out.touch()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(path), arguments, str(out), str(err), run, variables or {}]), file=self._process.stdin, flush=True)
        return Program(int(self._process.stdout.readline()), self._process, out, err)

    def pytest(self, folder: Path, *arguments: str, **variables: str) -> Program:
        """Runs the tests of a folder."""
        path = folder / "run.py"
        path.write_text("import os, sys, pytest\nos.chdir(sys.path[0])\nsys.exit(pytest.main(sys.argv[1:]))\n")
        return self.start_file(path, "-q", "-p", "no:cacheprovider", *arguments, variables=variables)

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(300)
        finally:
            self._process.kill()
            self._process.stdout.close()
