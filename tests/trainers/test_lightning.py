"""Lightning: automatic and manual optimization, Fabric, and what its callbacks do with the model."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
)
from torch.nn.functional import mse_loss, softplus

from tests.matrix.harness import CUMULATIVE, Way
from tests.support.scrape import value
from tests.trainers.training import AMPLE, Training, compared

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self._numbers = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._numbers[index]


def numbers(batches: int) -> torch.utils.data.DataLoader[torch.Tensor]:
    """Return batches of four, shuffled with a seed."""
    return torch.utils.data.DataLoader(Numbers(4 * batches), 4, shuffle=True, generator=torch.Generator().manual_seed(2))


def network(inputs: int = 6, outputs: int = 6) -> torch.nn.Sequential:
    """Return two layers."""
    return torch.nn.Sequential(torch.nn.Linear(inputs, 8), torch.nn.ReLU(), torch.nn.Linear(8, outputs))


class Module(lightning.LightningModule):
    """A module whose `training_step` calls submodules, so that the forward of the root never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = network(), network()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return mse_loss(self.decoder(self.encoder(batch)), batch)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("missed", self.training_step(batch, index))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Through(Module):
    """A module whose `training_step` calls the module itself."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(batch))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return mse_loss(self(batch), batch)


def trained(
    run: Training,
    kind: type[Module],
    *,
    batches: int = 8,
    callbacks: Any = tuple,
    where: Path | None = None,
    **options: Any,
) -> None:
    """Train two epochs; `options` go to Lightning's trainer."""
    torch.manual_seed(0)
    module = kind()
    chosen = {"max_epochs": 2, "logger": False, "enable_checkpointing": where is not None, **options}
    trainer = lightning.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks()),
        default_root_dir=where, **chosen,
    )  # fmt: skip
    with run.watching(module):
        trainer.fit(module, numbers(batches))
    run.told.append(trainer.global_step)


DIRECTLY = (*CUMULATIVE, "torch_train_backward_passes_total")
"""What lacks the first rounds where the forward of the root is never run."""


def test_clipping_by_value() -> None:
    """Norms are those before clipping by value; the callback's tests have the other ways."""
    clips = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    compared(partial(trained, kind=Through, batches=9, **clips), by_limit=False)


# Manual optimization


def deceives(judged: torch.Tensor) -> torch.Tensor:
    """Return the distance of what is judged from being accepted."""
    return softplus(-judged).mean()


class Gan(Module):
    """Two optimizers in turn, each with the other's parameters frozen by `toggle_optimizer`."""

    def __init__(self, *, toggled: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.judge = network(), network(outputs=1)
        del self.encoder, self.decoder
        self._toggled = toggled

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        drawn, judged = self.optimizers()
        self._half_step(drawn, lambda: deceives(self.judge(self.generator(batch))))
        self._half_step(judged, lambda: deceives(self.judge(batch)) + deceives(-self.judge(self.generator(batch))))

    def _half_step(self, optimizer: Any, loss: Any) -> None:
        if self._toggled:
            self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss())
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()
        if self._toggled:
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.generator.parameters(), lr=0.01), torch.optim.SGD(self.judge.parameters(), lr=0.01)


class Untoggled(Gan):
    """The same, where each backward leaves gradients in the other's parameters."""

    def __init__(self) -> None:
        super().__init__(toggled=False)


@pytest.mark.parametrize("kind", [Gan, Untoggled])
@pytest.mark.parametrize("way", [Way.EVERYTHING, Way.DEFAULTS])
def test_two_optimizers_in_turn(kind: type[Gan], way: Way) -> None:
    """Each network's values are those of its own optimizer's last sample, and all layers are shown."""
    run = compared(
        partial(trained, kind=kind, batches=10 if way is Way.EVERYTHING else 100), way, between=0, without=DIRECTLY, **AMPLE
    )
    assert run.exporter is not None
    for layer in ("generator.0", "generator.2", "judge.0", "judge.2"):
        assert value(run.exporter, "torch_grad_norm", layer=layer) is not None


# What a module or a callback does with rounds


class Leaves(Through):
    """A module that skips every third batch."""

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        return None if index % 3 == 2 else super().training_step(batch, index)


def test_skipped_batches() -> None:
    """A step without a backward is counted and has no sample."""
    compared(partial(trained, kind=Leaves))
    compared(partial(trained, kind=Leaves, accumulate_grad_batches=2, batches=9))


class Pretrained(Through):
    """A module with a backbone that is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.encoder
        del self.encoder

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.backbone(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.01)


def test_a_backbone_that_is_trained_later() -> None:
    """Layers of a backbone are shown from the first step that trains them."""
    compared(partial(trained, kind=Pretrained, max_epochs=4, callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=2)]))


# What has the model beside the loop


# Fabric


def by_fabric(run: Training, *, accumulation: int = 1, limit: float | None = None, watched: str, precision: str) -> None:
    """Train by Fabric; `watched`: whether the exporter gets the model or its wrapper."""
    torch.manual_seed(0)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    bare = network()
    model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=0.01))
    with run.watching(bare if watched == "model" else model):
        loader = fabric.setup_dataloaders(run.loader(numbers(9)))
        for number, batch in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=(number + 1) % accumulation != 0):
                fabric.backward(mse_loss(model(batch), batch) / accumulation)
            if (number + 1) % accumulation == 0:
                if limit is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=limit)
                optimizer.step()
                optimizer.zero_grad()
        run.told.append(len(loader))


@pytest.mark.parametrize(("watched", "precision"), [("model", "32-true"), ("wrapper", "bf16-mixed")])
def test_fabric(watched: str, precision: str) -> None:
    """Numbers under Fabric are right with accumulation and clipping, for the model and for its wrapper."""
    train = partial(by_fabric, watched=watched, precision=precision)
    compared(partial(train, accumulation=3, limit=0.05))
