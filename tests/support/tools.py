"""What several test files need: the real Prometheus tools, and waiting for a condition."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent

PATIENCE = 120.0
"""Seconds after which something hangs. A test waits for an event, and no longer; only one that fails waits for so long."""

FOREVER = 10 * PATIENCE
"""Seconds that a test gives to what must not be waited for: whoever waits for it is caught by `PATIENCE`."""


def _path(name: str) -> str | None:
    local = REPOSITORY / ".tools" / "usr" / "bin" / name
    return str(local) if local.exists() else shutil.which(name)


def is_there(name: str) -> bool:
    """Return whether a command is in the repository's tools or on PATH."""
    return _path(name) is not None


def find(name: str) -> Path:
    """Return a command from the repository's tools, else from PATH; fail the test without it."""
    path = _path(name)
    if path is None:
        pytest.fail(f"{name} is missing: run `make tools`")
    return Path(path)


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Return whether the condition comes true within the time.

    It may be that an attempt takes no longer than it should: load slows down some attempts, a wait that is too long all of them.
    """
    give_up_at = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.01)
    return True


def get(url: str | None, **headers: str) -> str:
    """Return the body that this machine serves at an address, whatever proxy there is."""
    assert url is not None, "nothing is served"
    request = urllib.request.Request(url, headers={name.replace("_", "-"): text for name, text in headers.items()})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=PATIENCE) as answer:
        return str(answer.read(), "utf-8")


@contextlib.contextmanager
def machine_of_its_own() -> Iterator[None]:
    """One such block at a time, in all processes of the tests: of trainings by the dozen each slows the others down."""
    with (Path(tempfile.gettempdir()) / f"torch_grad_exporter-tests-{os.getuid()}.lock").open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lasting_threads() -> list[str]:
    """The names of all threads but those of the exporter's that end by themselves within moments, each at its own time."""
    passing = ("torch-grad-exporter-address", "torch-grad-exporter-collect", "torch-grad-exporter-textfile")
    return sorted(thread.name for thread in threading.enumerate() if thread.name not in passing)


def threads_of_ours() -> set[threading.Thread]:
    """The exporters' threads that run now."""
    return {thread for thread in threading.enumerate() if "torch-grad-exporter" in thread.name}


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let no file that this process writes meanwhile become larger than 1,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
