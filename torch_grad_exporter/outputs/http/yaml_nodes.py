"""A YAML file as nodes with their line numbers.

Nothing is constructed from the file but text, numbers, switches and lists of text, so that no tag in it can run
code. Every error is a `ValueError` that names the file and the line, and shows no value that may be a secret.
"""

from __future__ import annotations

import difflib
import stat
from collections.abc import Collection
from pathlib import Path

import yaml

_STANDARD = "tag:yaml.org,2002:"
_SCALARS = frozenset(_STANDARD + kind for kind in ("str", "int", "float", "bool", "timestamp"))
_NULL = _STANDARD + "null"
# As in YAML 1.1, which Prometheus' own files are written in.
_SWITCH = {
    **dict.fromkeys(("y", "yes", "true", "on"), True),
    **dict.fromkeys(("n", "no", "false", "off"), False),
}

Fields = dict[str, yaml.Node]


class Document:
    """One file, read and split into nodes. Raises `ValueError` if it cannot be read or is no YAML."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.root = yaml.compose(_text_of(path), Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            # Not the whole error: it quotes the line, which may be a key or a hash.
            line = 1 if error.problem_mark is None else error.problem_mark.line + 1
            raise ValueError(f"{path}, line {line}: not valid YAML: {error.problem or error.context}") from None
        except (yaml.YAMLError, RecursionError):
            raise ValueError(f"{path}: not valid YAML; it holds control characters, or is nested too deeply") from None

    def place(self, node: yaml.Node) -> str:
        """Where a node stands."""
        return f"{self.path}, line {node.start_mark.line + 1}"

    def error(self, node: yaml.Node, message: str) -> ValueError:
        """An error at a node, to be raised."""
        return ValueError(f"{self.place(node)}: {message}")

    def pairs(self, node: yaml.Node, where: str) -> Fields:
        """The entries of a mapping; one without a value as well. No key twice."""
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{where} takes keys with values, such as 'key: value'")
        found: Fields = {}
        for key, value in node.value:
            name = self.text(key, f"a key in {where}")
            if name in found:
                raise self.error(key, f"{name!r} stands twice in {where}; remove one of them")
            found[name] = value
        return found

    def fields(self, node: yaml.Node, where: str, known: Collection[str]) -> Fields:
        """The entries of a mapping that have a value; none but the known ones."""
        if is_null(node):
            return {}
        found = self.pairs(node, where)
        for name, value in found.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                fix = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
                raise self.error(value, f"unknown key {name!r} in {where}; {fix}")
        return {name: value for name, value in found.items() if not is_null(value)}

    def text(self, node: yaml.Node, where: str) -> str:
        """A single value as it is written, also where it could be a number or a switch."""
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALARS:
            raise self.error(node, f"{where} takes text; put it in quotes if it has a special meaning in YAML")
        value: str = node.value
        return value

    def texts(self, node: yaml.Node, where: str) -> list[tuple[yaml.Node, str]]:
        """The entries of a list with their nodes."""
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(node, f"{where} takes a list, such as [a, b]")
        return [(entry, self.text(entry, f"an entry of {where}")) for entry in node.value]

    def switch(self, node: yaml.Node, where: str) -> bool:
        """A value that is on or off; in quotes it would be text."""
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        value = _SWITCH.get(node.value.lower()) if plain else None
        if value is None:
            raise self.error(node, f"{where} takes true or false, without quotes")
        return value

    def integer(self, node: yaml.Node, where: str) -> int:
        """A whole number."""
        if node.tag == _STANDARD + "int":
            try:
                return int(node.value.replace("_", ""))
            except ValueError:  # written in another base
                pass
        raise self.error(node, f"{where} takes a whole number, without quotes")


def is_null(node: yaml.Node) -> bool:
    """Whether a key has no value."""
    return node.tag == _NULL


def _text_of(path: str) -> str:
    try:
        # Opening a pipe would wait for a writer, here and again at each check for changes.
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ValueError(f"{path}: not a regular file; give the path of a web configuration in YAML")
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; give the path of a web configuration in YAML") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8; save the file in UTF-8") from None
