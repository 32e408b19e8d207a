"""What `torch.compile` leaves behind in a process, for tests that must not see what earlier ones compiled."""

from __future__ import annotations

import sys
import warnings


def forget_what_was_compiled() -> None:
    """As in a fresh process: nothing is compiled, and no compiled backward has run."""
    compiler, utils = sys.modules.get("torch._dynamo"), sys.modules.get("torch._dynamo.utils")
    if compiler is not None and utils is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # with a GPU it imports more of torch, which warns of itself
            compiler.reset()
        utils.counters.clear()
