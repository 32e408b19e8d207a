"""The regimes of training: importing this enters all of them into `harness.REGIMES`."""

from tests.matrix import (
    architectures,
    changing,
    clipping,
    closures,
    compiled,
    graphs,
    loops,
    optimizers,
    outcomes,
    precision,
    several,
)
from tests.matrix.harness import REGIMES

__all__ = [
    "REGIMES",
    "architectures",
    "changing",
    "clipping",
    "closures",
    "compiled",
    "graphs",
    "loops",
    "optimizers",
    "outcomes",
    "precision",
    "several",
]
