"""Plants the faults of `faults.py` one at a time in a copy of the tree, and says which test finds each: `make mutants`.

    python -m tests.mutants                       # all; writes tests/mutants/README.md
    python -m tests.mutants 'a buffer' 'rank 0'   # those whose names begin so; writes their lines anew

A fault is found by a test of the suite that fails with it and passes without it. The nearest tests are run first, then wider ones,
and then those that are far from any one file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.faults import FAR, FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
README = Path(__file__).with_name("README.md")

SECONDS = 900
"""For one run of tests; one that takes longer hangs, and has found the fault."""

FLAKY = 3
"""Tests that fail without the fault as well, after which a set of tests is given up."""

HEAD = """# Planted faults

Written by `make mutants`, which plants each of these {count} faults alone and runs the tests. A fault is found by a test that fails with
it and passes without it. What is planted where stands in [faults.py](faults.py).

{found} of {count} found.

| fault | file | found by |
|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run of tests. `test`: the first one that failed, by its node; `None` if none did."""

    test: str | None
    hung: bool = False


class Copy:
    """A copy of the tree as it stands, without what git ignores, in which faults are planted."""

    def __init__(self, place: Path) -> None:
        self.place = place
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
        )
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, place / name)
        if (ROOT / ".tools").exists():
            (place / ".tools").symlink_to((ROOT / ".tools").resolve())

    def plant(self, fault: Fault) -> None:
        """Plants a fault. Raises `ValueError` where its text does not stand there once."""
        self._write(fault, fault.instead)

    def mend(self, fault: Fault) -> None:
        """Takes it out again."""
        shutil.copy2(ROOT / "torch_grad_exporter" / fault.file, self.place / "torch_grad_exporter" / fault.file)

    def _write(self, fault: Fault, instead: str) -> None:
        content = (ROOT / "torch_grad_exporter" / fault.file).read_text("utf-8")
        if content.count(fault.text) != 1:
            raise ValueError(f"{fault.name}: its text stands {content.count(fault.text)} times in {fault.file}, expected once")
        (self.place / "torch_grad_exporter" / fault.file).write_text(content.replace(fault.text, instead), "utf-8")

    def run(self, tests: list[str], without: list[str]) -> Outcome:
        """Runs tests up to the first that fails."""
        environment = {**os.environ, "PYTHONPATH": str(self.place), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *(f"--deselect={one}" for one in without)]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        try:
            done = subprocess.run(
                command, cwd=self.place, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome(tests[0], hung=True)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?|\S+)(?: - .*)?$", done.stdout, re.MULTILINE)
        if done.returncode not in (0, 1, 5) or (done.returncode == 1 and failed is None):
            raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return Outcome(failed[1] if failed is not None and done.returncode == 1 else None)


def finder(copy: Copy, fault: Fault) -> str | None:
    """The test that finds a fault, `None` if there is none."""
    for tests in (fault.nearest, fault.wider, FAR):
        paths = [f"tests/{path}" for path in tests]
        without: list[str] = []
        while paths and len(without) < FLAKY:
            copy.plant(fault)
            outcome = copy.run(paths, without)
            copy.mend(fault)
            if outcome.test is None:
                break
            if outcome.hung or copy.run([outcome.test], []).test is None:
                return outcome.test
            without.append(outcome.test)
    return None


def told(content: str) -> dict[str, str]:
    """What a README says of each fault: its name, and the last cell of its line."""
    return {line[1].replace("\\|", "|"): line[2] for line in re.finditer(r"^\| (.*?) \| `.*?` \| (.*?) \|$", content, re.MULTILINE)}


def written(found: dict[str, str]) -> str:
    """The README, of the faults of which something is known."""
    known = [fault for fault in FAULTS if fault.name in found]
    count = sum(not found[fault.name].startswith("survived") for fault in known)
    lines = [f"| {fault.name} | `{fault.file}` | {found[fault.name]} |\n" for fault in known]
    return HEAD.format(found=count, count=len(known)) + "".join(lines)


def main(names: list[str]) -> int:
    """Runs the faults whose names begin with one of these, or all; whether any survived."""
    chosen = [fault for fault in FAULTS if not names or fault.name.startswith(tuple(names))]
    found = told(README.read_text("utf-8")) if names and README.exists() else {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        for fault in chosen:
            began = time.monotonic()
            test = finder(copy, fault)
            found[fault.name] = "survived" if test is None else f"`{test}`"
            verdict = "survived" if test is None else f"found by {test}"
            print(f"{fault.name} ({fault.file}): {verdict} ({time.monotonic() - began:.0f} s)", flush=True)  # noqa: T201
            README.write_text(written(found), "utf-8")
    survived = sum(found[fault.name] == "survived" for fault in chosen)
    print(f"{len(chosen) - survived} of {len(chosen)} found")  # noqa: T201
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
