"""Rule files in which a minute is a second."""

from __future__ import annotations

import re

SHORTEST_FOR = 8
"""Seconds. Prometheus takes up to 5 to drop a target whose file is gone; the shipped 2 minutes are longer."""


PUSH_SECONDS = 6
"""Three pushes, and as much again for a busy machine."""


def hastened(text: str) -> str:
    """Return a rule file with a second for each minute."""
    seconds = {"m": 1, "h": 60}
    text = re.sub(r"\binterval: \w+", "interval: 1s", text)
    text = re.sub(r"\b(\d+)([mh])\b", lambda found: f"{int(found[1]) * seconds[found[2]]}s", text)
    text = re.sub(r"\bfor: (\d+)s", lambda found: f"for: {max(SHORTEST_FOR, int(found[1]))}s", text)
    # A target stays down until the test reads it.
    text = re.sub(r"(max_over_time\(up|last_over_time\([^\[]*)\[60s\]", r"\1[1h]", text)
    text = text.replace("torch_train_state[3s]", f"torch_train_state[{PUSH_SECONDS}s]")
    lines = [
        line
        if line.lstrip().startswith("#")
        else re.sub(r"\b(300|600|900|1200|1800|4500)\b", lambda found: str(int(found[1]) // 60), line)
        for line in text.splitlines()
    ]
    return "\n".join(lines)
