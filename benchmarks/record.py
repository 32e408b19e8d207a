"""Results on disk: one JSON file per benchmark, each with the same head that says where and when it was measured.

A file has the form `{"header": {...}, "tables": [...], ...}`. A table is `{"title", "columns", "rows", "notes"}`: strings or
numbers in rows as wide as `columns`, and notes as a list of sentences; `benchmarks/report.py` renders any of them.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

import torch_grad_exporter

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"

Cell = str | int | float | None
Table = dict[str, Any]


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], notes: Sequence[str] = ()) -> Table:
    """A table for the report. Every row has as many cells as there are columns."""
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"row {list(row)} of {title!r} has {len(row)} cells, expected {len(columns)}")
    return {"title": title, "columns": list(columns), "rows": [list(row) for row in rows], "notes": list(notes)}


def save(name: str, results: Mapping[str, Any], *, directory: Path | None = None) -> Path:
    """Writes `results` with the head in front to `NAME.json` and returns the path."""
    path = (directory or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"header": header(), **results}, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def load(name: str, *, directory: Path | None = None) -> dict[str, Any] | None:
    """What `save` wrote under that name, `None` if it has not been measured."""
    path = (directory or RESULTS) / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def header() -> dict[str, Cell]:
    """Where and when: date, machine, versions, commit, threads."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "exporter": torch_grad_exporter.__version__,
        "commit": _commit(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def installed(package: str) -> str | None:
    """The installed version of a package, `None` if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's name, with its family and model where the name alone says little."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    known = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = known.get("model name", platform.machine())
    return f"{name} (family {known.get('cpu family', '?')}, model {known.get('model', '?')})"


def _commit() -> str:
    """The commit, with `+changes` if the tree differs from it; `unknown` outside of a checkout."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "torch_grad_exporter", "benchmarks")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603, S607
    return done.stdout.strip()
