"""The regimes of training: importing this enters all of them into `harness.REGIMES`."""

from importlib import import_module

from tests.matrix.harness import REGIMES

__all__ = ["REGIMES"]

for name in (
    "architectures", "changing", "clipping", "closures", "compiled", "graphs", "loops", "optimizers", "outcomes", "precision",
    "several",
):  # fmt: skip
    import_module(f"tests.matrix.{name}")
