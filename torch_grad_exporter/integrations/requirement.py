"""The packages that integrations are for: each is there, and new enough, or an error says what to install."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

PACKAGE = "torch-grad-exporter"


def require(module: str, at_least: str, *, extra: str, instead: str = "") -> ModuleType:
    """A package's module, such as `transformers`, in this version or a newer one.

    `extra`: of this package, which installs it. `instead`: another package that would do as well, for the message.

    Raises `ModuleNotFoundError` where it is not installed, and `ImportError` where it is older; both say what to run. What the
    package's own import raises passes.
    """
    needs = f"torch_grad_exporter.integrations.{extra} needs {module} {at_least} or newer"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and lacks something itself
        other = f" (or {instead})" if instead else ""
        message = f"{needs}{other}, which is not installed; run: pip install '{PACKAGE}[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from None
    version = str(getattr(found, "__version__", ""))
    if numbers(version) and numbers(version) < numbers(at_least):
        message = f"{needs}, and {version} is installed; run: pip install --upgrade '{PACKAGE}[{extra}]'"
        raise ImportError(message, name=module)
    return found


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (5, 1, 0) of `5.1.0rc1`."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
