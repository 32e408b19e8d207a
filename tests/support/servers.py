"""Real servers for tests: started on a free port, waited for until they answer, and started once more if they end before that."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

READY_SECONDS = 300.0
"""How long a server may take until it answers, on a machine with other work."""

Command = Callable[[int], Sequence[str | Path]]


def free_port() -> int:
    """Return a port of loopback that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(name: str, command: Command, is_ready: Callable[[int], bool], folder: Path, cwd: Path | None = None) -> Iterator[int]:
    """Run a server for a block, and give its port once it answers.

    Args:
        name: What to call it in a failure.
        command: Returns the program and its arguments for a port.
        is_ready: Returns whether the server on a port answers; never raises.
        folder: Where the file with the output of the server is put; made if it is missing.
        cwd: The folder in which the server is started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    for _ in range(2):  # another process may take the port, or the machine may run out of memory for a moment
        port = free_port()
        with log.open("wb") as output:
            process = subprocess.Popen(command(port), stdout=output, stderr=subprocess.STDOUT, cwd=cwd)
        try:
            if _answers(process, lambda port=port: is_ready(port)):
                yield port
                return
        finally:
            _end(process)
    lines = log.read_text("utf-8", "replace").splitlines()[-15:]
    pytest.fail(f"{name} did not answer, started twice; its last lines:\n" + "\n".join(lines))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the server, and kill it if it does not end."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answers(process: subprocess.Popen[bytes], is_ready: Callable[[], bool]) -> bool:
    """Wait until the server answers; return False if it ends before, or takes too long."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if is_ready():
            return True
        time.sleep(0.05)
    return False
