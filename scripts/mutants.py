"""Change a folder of the package in small ways, one at a time, and print the changes that no test notices: `make mutants`.

    python scripts/mutants.py torch_grad_exporter/statistics --tests tests/statistics tests/matrix --count 40

Cosmic Ray makes the changes, in a copy of the tree. A sample of them is tried, since a folder has thousands. A change that
survives is either equivalent to the code, or a test is missing.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import toml
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkResult

ROOT = Path(__file__).resolve().parents[1]

EQUIVALENT = ("ReplaceBinaryOperator_BitOr_", "RemoveDecorator", "ExceptionReplacer")
"""Operators of Cosmic Ray that mostly change annotations, caches and guards, which no behaviour depends on."""


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="what to change: a folder or a file of the package")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="the tests that should notice (default: tests)")
    parser.add_argument("--select", default="not full and not server and not process", help="their markers")
    parser.add_argument("--count", type=int, default=40, help="how many changes to try (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--seconds", type=int, default=600, help="after which a run of the tests counts as failed (default: 600)")
    arguments = parser.parse_args()
    if not (ROOT / arguments.folder).exists():
        parser.error(f"{arguments.folder}: no such folder; name one like torch_grad_exporter/statistics")
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        _try_changes(Path(place), arguments)


def _try_changes(place: Path, arguments: argparse.Namespace) -> None:
    """Make a session of Cosmic Ray in a copy of the tree, run it and print what survived."""
    _copy_tree(place)
    # -m comes last: it replaces the selection in pyproject.toml.
    tests = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments.tests, "-m", arguments.select]
    settings = {
        "module-path": str(arguments.folder),
        "timeout": arguments.seconds,
        "excluded-modules": [],
        "test-command": shlex.join(tests),
        "distributor": {"name": "local"},
    }
    (place / "mutants.toml").write_text(toml.dumps({"cosmic-ray": settings}))

    def cosmic_ray(program: str, *options: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run([Path(sys.executable).with_name(program), *options], cwd=place, env=environment, check=True)

    cosmic_ray("cosmic-ray", "init", "mutants.toml", "session.sqlite")
    with use_db(str(place / "session.sqlite"), WorkDB.Mode.open) as session:
        _keep_sample(session, arguments.count, arguments.seed)
    cosmic_ray("cosmic-ray", "baseline", "mutants.toml")
    cosmic_ray("cosmic-ray", "exec", "mutants.toml", "session.sqlite")
    with use_db(str(place / "session.sqlite"), WorkDB.Mode.open) as session:
        _report(session)


def _copy_tree(place: Path) -> None:
    """Copy what git knows, and link the servers that the tests run."""
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, stdout=-1)
    for name in filter(None, names.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    if (ROOT / ".tools").exists():
        (place / ".tools").symlink_to(ROOT / ".tools")


def _keep_sample(session: WorkDB, count: int, seed: int) -> None:
    """Leave a random sample of the changes to be tried."""
    items = sorted(
        session.pending_work_items, key=lambda item: [(m.module_path, m.start_pos, m.operator_name) for m in item.mutations]
    )
    useful = [item for item in items if not any(_is_useless(mutation) for mutation in item.mutations)]
    chosen = {item.job_id for item in random.Random(seed).sample(useful, min(count, len(useful)))}
    skipped = WorkResult(worker_outcome=WorkerOutcome.SKIPPED, output="not in the sample")
    session.set_multiple_results([item.job_id for item in items if item.job_id not in chosen], skipped)
    print(f"trying {len(chosen)} of {len(items)} changes", flush=True)


def _is_useless(mutation: MutationSpec) -> bool:
    """Return whether a change is mostly equivalent, or in a program of Triton, which only `make kernels` runs."""
    return "kernels" in mutation.module_path.parts or any(name in mutation.operator_name for name in EQUIVALENT)


def _report(session: WorkDB) -> None:
    """Print the changes that no test noticed, and how many of those that were tried these are."""
    tried = [(item, result) for item, result in session.completed_work_items if result.worker_outcome is not WorkerOutcome.SKIPPED]
    survived = [(item, result) for item, result in tried if result.test_outcome is TestOutcome.SURVIVED]
    for item, result in survived:
        print(*(f"\n{mutation.module_path}: {mutation.operator_name}" for mutation in item.mutations))
        print(result.diff)
    print(f"\n{len(survived)} of {len(tried)} changes survived")


if __name__ == "__main__":
    main()
