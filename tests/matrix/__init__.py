"""The regimes of training: importing this enters all of them into `harness.REGIMES`."""

from matrix import loops
from matrix.harness import REGIMES

__all__ = ["REGIMES", "loops"]
