"""Engines of DeepSpeed that a trainer makes, on the CPU: each integration shows the engine's norm and steps, and no layer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.nn.functional import mse_loss
from transformers import Trainer as TransformersTrainer

from tests.support.scrape import errors, value, values
from tests.trainers.test_deepspeed import LIMIT, ROUND, batch, engine_of, network, one_process, train
from tests.trainers.test_lightning import Module, numbers
from tests.trainers.test_lightning_callback import GradExporterCallback as LightningCallback  # of both packages
from tests.trainers.test_run import HERE, RUN, output
from tests.trainers.test_transformers import Sentences, llama, settings
from tests.trainers.training import QUICK, reset_accelerate
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.integrations.accelerate import GradExporterTracker
from torch_grad_exporter.integrations.session import Session
from torch_grad_exporter.integrations.transformers import GradExporterCallback

__all__ = ["one_process"]

LAYERS = {"torch_grad_norm", "torch_grad_norm_squared", "torch_grad_zero_ratio"}
"""What would be of a gradient that is not the one that is trained with."""


@pytest.fixture(autouse=True)
def begun_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate as in a new process, before and after. It refuses DeepSpeed where it is set to use the CPU."""
    reset_accelerate()
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr("accelerate.state.PartialState.destroy_process_group", lambda *_: None)  # the next test has the same
    yield
    reset_accelerate()


def configuration(stage: int) -> dict[str, Any]:
    """Return a user's configuration of DeepSpeed."""
    return {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": ROUND, "zero_optimization": {"stage": stage},
        "gradient_clipping": LIMIT, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
    }  # fmt: skip


def of_engine(exporter: Exporter, engine: Any, step: int) -> None:
    """Check that norm and steps are the engine's, and that no layer is shown."""
    scrape = values(exporter)
    assert not {name for name, _ in scrape} & LAYERS
    assert value(exporter, "torch_grad_global_norm") == pytest.approx(float(engine.get_global_grad_norm()), rel=1e-6)
    assert value(exporter, "torch_train_steps_total", optimizer="manual") == engine.global_steps == step
    assert errors(exporter) == {}


@pytest.mark.parametrize("stage", [0, 2])
def test_accelerate(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's plugin shows the engine's norm at stage 2 and layers without ZeRO, and restores its methods."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    tracker = GradExporterTracker(**QUICK)
    accelerate = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=configuration(stage)), log_with=tracker)
    bare = network()
    loader = torch.utils.data.DataLoader(torch.cat([batch(number) for number in range(6)]), 4)
    engine, optimizer, given = accelerate.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=0.05), loader)
    accelerate.init_trackers("run")
    exporter = tracker.exporter
    assert exporter is not None
    for number, one in enumerate(given, 1):
        with accelerate.accumulate(engine):
            accelerate.backward(loss := mse_loss(engine(one), one))
            optimizer.step()
            optimizer.zero_grad()
        accelerate.log({"loss": loss.item()})
        assert value(exporter, "torch_train_loss") == loss.item()
        if stage == 2 and number % ROUND == 0:
            of_engine(exporter, engine, number // ROUND)
    if stage == 0:
        assert value(exporter, "torch_grad_norm", layer="0") is not None
        assert value(exporter, "torch_grad_sample_step") == 3
        assert errors(exporter) == {}
    assert "step" in engine.__dict__
    accelerate.end_training()
    assert not {"step", "backward"} & {*engine.__dict__}


def test_transformers(tmp_path: Path) -> None:
    """`TrainingArguments(deepspeed=...)` shows the engine's norm and steps, and no layer."""
    shown: list[float | None] = []

    class Looks(GradExporterCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            super().on_step_end(args, state, control, **more)
            assert self.exporter is not None
            of_engine(self.exporter, trainer.deepspeed, state.global_step)
            shown.append(value(self.exporter, "torch_grad_global_norm"))

    arguments = {"deepspeed": {**configuration(2), "train_micro_batch_size_per_gpu": 2}, "gradient_accumulation_steps": ROUND}
    args = settings(tmp_path, use_cpu=False, max_grad_norm=LIMIT, **arguments)
    trainer = TransformersTrainer(model=llama(), args=args, train_dataset=Sentences(16), callbacks=[Looks(**QUICK)])
    trainer.train()
    assert len(shown) == 4
    logged = [one["grad_norm"] for one in trainer.state.log_history if "loss" in one]
    assert shown == pytest.approx(logged, rel=1e-5)
    assert not {"step", "backward"} & {*trainer.deepspeed.__dict__}


def test_lightning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lightning's strategy shows the engine's norm and steps, and the loss of the callback."""
    monkeypatch.setattr("lightning.pytorch.strategies.deepspeed.CUDAAccelerator", CPUAccelerator)
    monkeypatch.setattr(CPUAccelerator, "get_parallel_devices", lambda _: [torch.device("cpu", 0)])
    losses: list[float] = []

    class Looks(LightningCallback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            losses.append(outputs["loss"].item() * ROUND)
            if len(losses) % ROUND == 0:
                assert self.exporter is not None
                of_engine(self.exporter, trainer.model, len(losses) // ROUND)
                assert value(self.exporter, "torch_train_loss") == pytest.approx(sum(losses[-ROUND:]) / ROUND, rel=1e-5)

    config = {
        name: configuration(2)[name]
        for name in ("zero_optimization", "zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer")
    }
    trainer = Trainer(
        max_epochs=1, strategy=DeepSpeedStrategy(config=config, process_group_backend="gloo"), accelerator="cpu", devices=1,
        gradient_clip_val=LIMIT, accumulate_grad_batches=ROUND, callbacks=[Looks(**QUICK)], default_root_dir=tmp_path, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), numbers(6))
    assert len(losses) == 6
    assert not {"step", "backward"} & {*trainer.model.__dict__}


def test_run(tmp_path: Path) -> None:
    """`torch-grad-exporter run` shows the norm and steps of an engine in a script."""
    saved = tmp_path / "run.json"
    status, _, err = output(tmp_path, sys.executable, *RUN, "--save", saved, HERE / "engine.py")
    assert status == 0, err
    norm, steps = json.loads(err.split("said ")[1].splitlines()[0])
    shown = json.loads(saved.read_text())["status"]
    assert shown["global_norm"] == pytest.approx(norm, rel=1e-6)
    assert shown["step"] == steps == 6
    assert json.loads(saved.read_text())["layer"] == {}
    assert "torch_grad_exporter: DeepSpeed keeps gradients elsewhere (ZeRO stage 2, 1 ranks, float32)" in err
    assert "torch_grad_exporter: watching Sequential, trained by AdamW" in err


def test_the_users_exporter() -> None:
    """The user's exporter continues after a training, and the engine has its own methods again."""
    model = network()
    with start_exporter(model, **QUICK) as exporter:
        engine, session = engine_of(model, 2), Session("Callback")
        session.begin(model)
        train(engine, steps=2)
        of_engine(exporter, engine, 2)
        session.end()
        assert not {"step", "backward"} & {*engine.__dict__}
