"""Checks names and words that no linter knows: `python scripts/names.py`, a part of `make lint`.

A class name stands for one class of the package. Words that read like a translation, and variables that do not say what they hold,
become fewer: each has a ceiling, to be lowered with every change that removes some.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "torch_grad_exporter"

# Of integrations, whose users import one of them.
SEVERAL = frozenset({"GradExporterCallback", "GradExporterHook"})

# Variables and arguments.
NAMES = {"one": 5, "found": 17}

WORDS = {"is no": 62, "told": 0, "as of": 2, "anew": 0, "so many": 1, "lately": 0, "nobody": 2, "somebody": 0}


def assigned(tree: ast.AST) -> Iterator[str]:
    """Yield the name of each variable that is assigned, and of each argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def problems() -> list[str]:
    """Return what is wrong, a line each."""
    classes: defaultdict[str, set[str]] = defaultdict(set)
    names: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(str(path.relative_to(PACKAGE)))
        names.update(assigned(tree))
        words.update(re.findall(rf"\b(?:{'|'.join(WORDS)})\b", text))
    doubled = {name: files for name, files in classes.items() if len(files) > 1 and name not in SEVERAL}
    wrong = [f"class {name} is defined in {', '.join(sorted(files))}" for name, files in doubled.items()]
    wrong += [f"class {name} is no longer in several files; see SEVERAL" for name in sorted(SEVERAL) if len(classes[name]) < 2]
    for what, counts, ceilings in (("variable", names, NAMES), ("word", words, WORDS)):
        over = {text: counts[text] for text, most in ceilings.items() if counts[text] > most}
        wrong += [f"{what} {text!r}: {count} times, at most {ceilings[text]}; see CONTRIBUTING.md" for text, count in over.items()]
    return wrong


def main() -> int:
    """Print what is wrong; status 1 if anything is."""
    wrong = problems()
    print("\n".join(wrong), file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
