"""Whose method is calling."""

from __future__ import annotations

from torch_grad_exporter.integrations.caller import calling


def asks() -> Trainer | None:
    """What a callback does."""
    return calling(Trainer)


class Trainer:
    """Calls a function without telling who it is."""

    def trains(self) -> Trainer | None:
        return asks()


def test_the_object_whose_method_calls() -> None:
    """The nearest one of the type, or none."""
    trainer = Trainer()
    assert trainer.trains() is trainer
    assert calling(Trainer) is None


def test_the_scripts_own_variables_stay_as_they_are() -> None:
    """What `locals()` has returned to a function among the callers is not added to."""

    def train(lr: float) -> dict[str, object]:
        hparams = locals()
        calling(Trainer)
        return hparams

    assert train(0.1) == {"lr": 0.1}
