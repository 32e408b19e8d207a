"""`python -m dashboards.generate [--check]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dashboards.generate import alerts, exporter, goodput, layers, ranks, resources, rl, training, v2
from dashboards.generate import runbook as runbook_page
from dashboards.generate.board import plain

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = "docs/runbook.md"
SERVED_RUNBOOK = "torch_grad_exporter/outputs/live/page/runbook.html"


def rendered() -> dict[str, str]:
    """The text of each file, by its path in the repository: the same, byte for byte, whenever it is made."""
    boards = {
        module.__name__.rpartition(".")[2]: plain(module.dashboard())
        for module in (training, layers, resources, ranks, rl, goodput, exporter)
    }
    runbook = alerts.with_table((ROOT / RUNBOOK).read_text(encoding="utf-8"))
    return {
        **{f"dashboards/grafana/{name}.json": _json(board) for name, board in boards.items()},
        **{f"dashboards/grafana-v2/{name}.json": _json(v2.resource(board)) for name, board in boards.items()},
        **{f"dashboards/prometheus/{name}": text for name, text in alerts.rendered().items()},
        RUNBOOK: runbook,
        SERVED_RUNBOOK: runbook_page.rendered(runbook),
    }


def _json(board: object) -> str:
    return json.dumps(board, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def differing(root: Path = ROOT) -> list[str]:
    """The paths of files that are not what is made now, also of those that are missing or too many."""
    texts = rendered()
    patterns = ("grafana/*.json", "grafana-v2/*.json", "prometheus/*.alerts.yml")
    found = [path for pattern in patterns for path in (root / "dashboards").glob(pattern)]
    made = [*found, root / RUNBOOK, root / SERVED_RUNBOOK]
    there = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in made if path.exists()}
    return sorted(path for path in texts.keys() | there.keys() if texts.get(path) != there.get(path))


def main() -> int:
    """Writes the files, or with `--check` says which differ. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.generate", description="Make the dashboards and alert rules.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file differs from what is made")
    if parser.parse_args().check:
        for path in (differ := differing()):
            sys.stderr.write(f"{path} differs from what is made: run `make dashboards`\n")
        return 1 if differ else 0
    for path, text in rendered().items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
