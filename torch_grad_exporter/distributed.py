"""Who this process is among the ranks of the run, from what the launcher put into the environment.

No collective is ever called, and the process group is not even asked.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """Rank and place of a process; a run without a launcher is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    run: str = ""
    """The launcher's name for the run, empty if it has none."""


def identity(environment: Mapping[str, str]) -> Identity:
    """The identity that torchrun's variables give; a variable that is no number raises `ValueError`."""
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    return Identity(
        rank=_number(environment, "RANK", 0),
        world_size=_number(environment, "WORLD_SIZE", 1),
        local_rank=_number(environment, "LOCAL_RANK", 0),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", 1),
        run="" if run == "none" else run,
    )


def new_run_name(now: float) -> str:
    """A name for a run that nobody named: its start, UTC, and a few random characters."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(2)}"


def hostname() -> str:
    """This host's name."""
    return socket.gethostname()


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(
            f"environment variable {name}={text!r}: a launcher sets it to a whole number; unset it or correct it"
        ) from None
