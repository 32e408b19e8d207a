"""The address of a receiver, which is a secret: it leaves this file for the request only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from torch_grad_exporter.errors import caught

HIDDEN = "<hidden>"
"""What stands for an address, everywhere."""

_EXPECTED = "expected an address that begins with https:// or http:// and names a host"


class Address:
    """An address as it was given, or in a file that is read anew for each request, so that it can be replaced.

    Raises `TypeError` or `ValueError` where neither or both are given, or it is none; an error never contains it.
    """

    __slots__ = ("_file", "_url")

    def __init__(self, url: object, file: object, variable: str, environment: Mapping[str, str]) -> None:
        if url is not None and file is not None:
            raise ValueError(f"url={HIDDEN}, url_file={shown(file)}: give one of them")
        self._file = None if file is None else _path(file)
        source = "url"
        if url is None and file is None:
            url, source = environment.get(variable, "").strip() or None, f"environment variable {variable}"
            if url is None:
                raise ValueError(f"url=None: {_EXPECTED}; or give url_file=, or set the {source}")
        self._url = None if url is None else _checked(url, source)
        self.text()

    def text(self) -> str:
        """The address. Raises `ValueError`, which does not contain it, where the file is no longer right."""
        return self._read(self._file) if self._url is None else self._url

    def _read(self, file: str | None) -> str:
        texts: list[str] = []
        error = caught(lambda: texts.append(Path(file or "").read_text(encoding="utf-8").strip()))
        if error is not None:
            raise ValueError(f"url_file={shown(file)}: cannot be read: {type(error).__name__}; give a file with the address in it")
        return _checked(texts[0], f"url_file={shown(file)}, what is in it")

    def __repr__(self) -> str:
        return HIDDEN


def shown(value: object) -> str:
    """An argument as an error shows it: not where it may be an address in the wrong place."""
    return HIDDEN if isinstance(value, str) and "//" in value else repr(value)


def _path(file: object) -> str:
    path = os.fspath(file) if isinstance(file, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise TypeError(f"url_file={file!r}: expected the path of a file with the address in it")
    return path


def _checked(url: object, source: str) -> str:
    """The address, if it is one. What is wrong with it is not said: that may be its secret part."""
    if not isinstance(url, str):
        raise TypeError(f"{source}={type(url).__name__}: {_EXPECTED}")

    def prepare() -> None:
        import requests  # noqa: PLC0415 - slow to import

        parts = urlsplit(url)
        if parts.scheme.lower() not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError
        if not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
            raise ValueError
        requests.Request("POST", url).prepare()

    if caught(prepare) is not None:  # raised anew: the error of a library has the address in it
        raise ValueError(f"{source}={HIDDEN}: {_EXPECTED}")
    return url
