"""VictoriaMetrics' vmalert accepts the shipped rules."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.rules.test_rules import ALERTS, RULES
from tests.support.tools import PATIENCE, find

pytestmark = pytest.mark.server


def dry_run(*paths: Path) -> subprocess.CompletedProcess[str]:
    """Let vmalert check files of rules: their form, expressions and templates."""
    command = [find("vmalert"), "-dryRun", *(f"-rule={path}" for path in paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_vmalert_takes_the_rules() -> None:
    """Vmalert accepts all files of rules and alerts together."""
    done = dry_run(*RULES, *ALERTS)
    assert done.returncode == 0, done.stdout + done.stderr
    read = re.findall(r"finished reading 1 files.*", done.stderr)
    assert all(any(path.name in line for line in read) for path in (*RULES, *ALERTS)), read


@pytest.mark.parametrize(("right", "wrong"), [("max by (run", "max by run"), ("record: ", "recorded: "), ("groups:", "group:")])
def test_vmalert_refuses_a_wrong_rule(tmp_path: Path, right: str, wrong: str) -> None:
    """It does not accept a file with a wrong expression or an unknown key."""
    (joins,) = [path for path in RULES if path.name == "joins.rules.yml"]
    text = joins.read_text(encoding="utf-8")
    assert right in text
    file = tmp_path / "joins.rules.yml"
    file.write_text(text.replace(right, wrong), encoding="utf-8")
    assert dry_run(file).returncode != 0
