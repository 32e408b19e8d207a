"""`python -m dashboards.generate [--check]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dashboards.generate import exporter, layers, ranks, resources, training
from dashboards.generate.board import plain

FOLDER = Path(__file__).resolve().parent.parent / "grafana"


def rendered() -> dict[str, str]:
    """The text of each file, by its name: the same, byte for byte, whenever it is made."""
    made = {
        module.__name__.rpartition(".")[2]: plain(module.dashboard()) for module in (training, layers, resources, ranks, exporter)
    }
    return {f"{name}.json": json.dumps(made[name], indent=2, sort_keys=True, ensure_ascii=False) + "\n" for name in made}


def differing(folder: Path = FOLDER) -> list[str]:
    """The names of files in the folder that are not what is made now, also of those that are missing or too many."""
    texts = rendered()
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return sorted(name for name in texts.keys() | there.keys() if texts.get(name) != there.get(name))


def main() -> int:
    """Writes the files, or with `--check` says which differ. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.generate", description="Make the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file differs from what is made")
    if parser.parse_args().check:
        for name in (differ := differing()):
            sys.stderr.write(f"dashboards/grafana/{name} differs from what is made: run `make dashboards`\n")
        return 1 if differ else 0
    FOLDER.mkdir(exist_ok=True)
    for name, text in rendered().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
