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
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.mutants.faults import FAR, FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
README = Path(__file__).with_name("README.md")

SECONDS = 900
"""For one run of tests; one that takes longer hangs, and has found the fault."""

ROUNDS = 3
"""Looks at the tests that found something without any fault; what fails then as well has found nothing, and is left out."""

HEAD = """# Planted faults

Written by `make mutants`, which plants each of these {count} faults alone and runs the tests. A fault is found by a test that
fails with it and passes without it. What is planted where stands in [faults.py](faults.py).

{found} of {count} found.

| fault | file | found by |
|---|---|---|
"""


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

    def failing(self, tests: Sequence[str], without: Iterable[str] = (), *, all_of_them: bool = False) -> list[str]:
        """The first of these tests that fails, or all that do. One that hangs has failed, and is not known by its name."""
        environment = {**os.environ, "PYTHONPATH": str(self.place), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        options = ["-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *(f"--deselect={one}" for one in without)]
        command = [sys.executable, "-m", "pytest", *options, *([] if all_of_them else ["-x"]), *tests]
        try:
            done = subprocess.run(
                command, cwd=self.place, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return [tests[0]]
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.*?|\S+)(?: - .*)?$", done.stdout, re.MULTILINE)
        if done.returncode not in (0, 1, 5) or bool(failed) != (done.returncode == 1):
            raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return failed


def finder(copy: Copy, fault: Fault, without: Iterable[str]) -> str | None:
    """The test that finds a fault, `None` if there is none."""
    copy.plant(fault)
    try:
        for tests in (fault.nearest, fault.wider, FAR):
            failed = copy.failing([f"tests/{path}" for path in tests], without) if tests else []
            if failed:
                return failed[0]
    finally:
        copy.mend(fault)
    return None


def finders(copy: Copy, faults: Sequence[Fault]) -> dict[str, str | None]:
    """By the name of the fault the test that finds it, `None` if there is none. Tests that fail without any fault find nothing."""
    found: dict[str, str | None] = {}
    without: set[str] = set()
    waiting = list(faults)
    for _ in range(ROUNDS):
        for fault in waiting:
            began = time.monotonic()
            test = found[fault.name] = finder(copy, fault, without)
            verdict = "survived" if test is None else f"found by {test}"
            print(f"{fault.name} ({fault.file}): {verdict} ({time.monotonic() - began:.0f} s)", flush=True)  # noqa: T201
        suspects = sorted({test for fault in waiting if (test := found[fault.name]) is not None})
        fail_anyway = set(copy.failing(suspects, all_of_them=True)) if suspects else set()
        without |= fail_anyway
        waiting = [fault for fault in faults if found[fault.name] in fail_anyway]
        if not waiting:
            break
        print(f"these fail without a fault, too: {', '.join(sorted(fail_anyway))}", flush=True)  # noqa: T201
    return found


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
        for name, test in finders(Copy(Path(folder)), chosen).items():
            found[name] = "survived" if test is None else f"`{test}`"
    README.write_text(written(found), "utf-8")
    survived = sum(found[fault.name] == "survived" for fault in chosen)
    print(f"{len(chosen) - survived} of {len(chosen)} found")  # noqa: T201
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
