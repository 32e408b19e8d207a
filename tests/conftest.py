"""What holds for all tests: the order of their files, the servers they need, and that each begins alike."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tests.support.compiled import forget_what_was_compiled
from tests.support.programs import Starter
from tests.support.tools import is_there

PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager", "amtool", "victoria-metrics", "docker-compose", "chromium")
"""What tests with the marker `server` run."""

TRAINERS = (
    "transformers", "lightning", "accelerate", "peft", "timm", "opacus", "mmengine", "ignite", "ray", "deepspeed", "tensorboard",
)  # fmt: skip
collect_ignore = [] if all(map(importlib.util.find_spec, TRAINERS)) else ["trainers"]
"""What `make trainers` runs, in an environment of its own; named on the command line it is never left out."""
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore.append("kernels")  # what `make kernels` runs, with Triton, whose interpreter is no part of other tests

LONG = {"slow", "process", "server"}
"""Markers of tests that take long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files with the most long tests first, so that no worker is left with one of them at the end."""
    long = Counter(item.path for item in items if LONG & {marker.name for marker in item.iter_markers()})
    items.sort(key=lambda item: -long[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for the servers before the first test, and keep torch out of garbage collections, which take a second with it."""
    missing = [name for name in PROGRAMS if not is_there(name)]
    is_worker = hasattr(session.config, "workerinput")  # of pytest-xdist, which `make test` starts after `make tools`
    if missing and not is_worker and any(item.get_closest_marker("server") for item in session.items):
        pytest.exit(f"{', '.join(missing)} not found: run `make tools`, or select -m 'not server'", returncode=3)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """One for all tests of a worker."""
    with contextlib.closing(Starter(tmp_path_factory.mktemp("programs"))) as programs:
        yield programs


@pytest.fixture(autouse=True)
def _each_by_itself() -> Iterator[None]:
    """Seed torch, and forget what an earlier test compiled, which would change what the exporter sees in a first round."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
    yield
    forget_what_was_compiled()
