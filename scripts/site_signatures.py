"""Shows in the API page the defaults of options that hold, in place of `UNSET`, as `help()` does."""

from __future__ import annotations

from typing import Any

import griffe

from torch_grad_exporter.config.option import options_of
from torch_grad_exporter.config.settings import Settings

SHOWN = {option.name: option.shown for option in options_of(Settings)}


class ShownDefaults(griffe.Extension):
    """Changes what griffe has read of a signature."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:  # noqa: ANN401 - what griffe gives besides
        """Replace the defaults of a function."""
        for parameter in func.parameters:
            if str(parameter.default) == "UNSET":
                parameter.default = SHOWN[parameter.name]
                parameter.annotation = str(parameter.annotation).replace(" | Unset", "")
