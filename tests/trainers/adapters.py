"""What the conformance of the callbacks needs of each framework: a model, the exporter's callback, and a training with options.

Each training has batches of four, eight an epoch, and AdamW at a learning rate of 0.01.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import lightning
import mmengine.hooks
import torch
import transformers
from accelerate.tracking import GeneralTracker
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from lightning.pytorch.loggers.logger import Logger
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.nn.functional import mse_loss

from tests.trainers.test_accelerate import accelerator, loader
from tests.trainers.test_lightning import Module, Through, numbers
from tests.trainers.test_transformers import Sentences, gpt2, settings
from torch_grad_exporter.integrations.accelerate import GradExporterTracker
from torch_grad_exporter.integrations.ignite import GradExporterHandler
from torch_grad_exporter.integrations.lightning import GradExporterCallback
from torch_grad_exporter.integrations.mmengine import GradExporterHook
from torch_grad_exporter.integrations.transformers import GradExporterCallback as TransformersCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

BATCHES = 8
EPOCHS = 2

Look = Callable[[int, float], object]
"""Gets the number of a step and the mean loss of its batches, behind the exporter's callbacks."""

Logged = list[tuple[int, Mapping[str, float]]]
"""What the framework's loggers got, with the number of the step."""


def ignored(step: int, loss: float) -> None:
    """Look at nothing."""


@dataclass(frozen=True)
class Chosen:
    """Options of a training: `limit` of the global norm, `accumulate` of batches for a step."""

    epochs: int = EPOCHS
    limit: float | None = None
    accumulate: int = 1
    evaluated: bool = False
    bf16: bool = False
    log_every: int = 1


class Means:
    """Calls `look` after each step with the mean loss of its batches."""

    def __init__(self, look: Look, accumulate: int) -> None:
        self._look, self._accumulate = look, accumulate
        self._losses: list[float] = []

    def add(self, loss: float) -> None:
        """Add the loss of a batch."""
        self._losses.append(loss)
        step, rest = divmod(len(self._losses), self._accumulate)
        if not rest:
            self._look(step, sum(self._losses[-self._accumulate :]) / self._accumulate)


class Framework(Protocol):
    """One framework."""

    kind: Any
    options: tuple[str, ...] = ("limit", "accumulate", "evaluated", "bf16")
    sees_failures = True  # else a `with` around the training does
    interrupted: type[BaseException] = KeyboardInterrupt
    logged_steps: tuple[int, ...] = (3, 6, 9, 12, 15)  # with `log_every=3`

    def model(self) -> torch.nn.Module:
        """Return a model."""

    def callback(self, model: torch.nn.Module, exporter: Any = None, **options: Any) -> Any:
        """Return the exporter's callback."""
        return self.kind(exporter, **options)

    def epoch(self, step: int, steps: int) -> float:
        """Return the epoch after this step, where there are this many in an epoch."""
        return (step - 1) // steps

    def train(self, model: Any, callbacks: list[Any], folder: Path, look: Look = ignored, **options: Any) -> Logged:
        """Train, and return what was logged."""
        return self.fit(model, callbacks, folder, look, Chosen(**options))

    def fit(self, model: Any, callbacks: list[Any], folder: Path, look: Look, chosen: Chosen) -> Logged:
        """Train as chosen."""


class Lightning(Framework):
    """`Trainer` with a module that calls itself."""

    kind = GradExporterCallback
    module: type[Module] = Through
    interrupted = SystemExit

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return self.module()

    def fit(self, model: Any, callbacks: list[Any], folder: Path, look: Look, chosen: Chosen) -> Logged:
        means, logged = Means(look, chosen.accumulate), Logged()

        class Looks(lightning.pytorch.callbacks.Callback):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
                means.add(float(outputs["loss"]) * chosen.accumulate)

        class Keeps(Logger):
            name, version = "keeps", 0

            def log_metrics(self, metrics: Any, step: int | None = None) -> None:
                logged.append(((step or 0) + 1, metrics))

            def log_hyperparams(self, *_: Any, **__: Any) -> None:
                pass

        trainer = lightning.Trainer(
            accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            callbacks=[*callbacks, Looks()], max_epochs=chosen.epochs, gradient_clip_val=chosen.limit,
            accumulate_grad_batches=chosen.accumulate, precision="bf16-mixed" if chosen.bf16 else "32-true",
            logger=Keeps(), log_every_n_steps=chosen.log_every, val_check_interval=0.5,
        )  # fmt: skip
        trainer.fit(model, numbers(BATCHES), numbers(2) if chosen.evaluated else None)
        return logged


class LightningByParts(Lightning):
    """`Trainer` with a module that only calls its submodules."""

    module = Module


class Transformers(Framework):
    """`Trainer` of a GPT-2."""

    kind = TransformersCallback
    sees_failures = False

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return gpt2()

    def epoch(self, step: int, steps: int) -> float:
        return step / steps

    def fit(self, model: Any, callbacks: list[Any], folder: Path, look: Look, chosen: Chosen) -> Logged:
        logged = Logged()

        class Looks(transformers.TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                if "loss" in logs:
                    logged.append((state.global_step, logs))
                    look(state.global_step, logs["loss"])

        arguments = settings(
            folder, per_device_train_batch_size=4, num_train_epochs=chosen.epochs, max_grad_norm=chosen.limit or 0.0,
            bf16=chosen.bf16, gradient_accumulation_steps=chosen.accumulate, logging_steps=chosen.log_every,
            lr_scheduler_type="constant", **({"eval_strategy": "steps", "eval_steps": 2} if chosen.evaluated else {}),
        )  # fmt: skip
        transformers.Trainer(
            model=model, args=arguments, train_dataset=Sentences(4 * BATCHES), eval_dataset=Sentences(6),
            callbacks=[*callbacks, Looks()],
        ).train()  # fmt: skip
        return logged


class Keeps(GeneralTracker):
    """A tracker of Accelerate that keeps what it gets."""

    name = "keeps"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: Logged = []

    @property
    def tracker(self) -> None:
        return None

    def log(self, values: dict[str, Any], step: int | None = None, **_more: Any) -> None:
        self.logged.append((step or 0, values))


class Accelerate(Framework):
    """A prepared loop that logs each step."""

    kind = GradExporterTracker
    options = ("limit", "accumulate", "bf16")
    logged_steps = tuple(range(1, EPOCHS * BATCHES + 1))

    def model(self) -> torch.nn.Module:
        return network()

    def fit(self, model: Any, callbacks: list[Any], folder: Path, look: Look, chosen: Chosen) -> Logged:
        keeps, mixed = Keeps(), "bf16" if chosen.bf16 else "no"
        accelerate = accelerator(log_with=[keeps, *callbacks], gradient_accumulation_steps=chosen.accumulate, mixed_precision=mixed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, given = accelerate.prepare(model, optimizer, loader(BATCHES))
        accelerate.init_trackers("run")

        def take(step: int, loss: float) -> None:
            accelerate.log({"loss": loss, "epoch": (step * chosen.accumulate - 1) // BATCHES}, step=step)
            look(step, loss)

        means, epochs = Means(take, chosen.accumulate), iter(range(chosen.epochs))
        try:
            while next(epochs, None) is not None and not any(callback.should_stop for callback in callbacks):
                for (batch,) in given:
                    with accelerate.accumulate(model):
                        accelerate.backward(loss := mse_loss(model(batch), batch))
                        if accelerate.sync_gradients and chosen.limit is not None:
                            accelerate.clip_grad_norm_(model.parameters(), chosen.limit)
                        optimizer.step()
                        optimizer.zero_grad()
                    means.add(loss.item())
        finally:
            accelerate.end_training()
        return keeps.logged


class Net(BaseModel):
    """A model of MMEngine whose targets are its inputs."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)

    def forward(self, inputs: torch.Tensor, mode: str = "loss") -> Any:
        outputs = self.decoder(self.encoder(inputs).relu())
        return {"loss_mse": mse_loss(outputs, inputs)} if mode == "loss" else [outputs]


class Missed(BaseMetric):
    """The sum of all outputs."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(float(sum(one.sum() for one in data_samples)))

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"missed": sum(results)}


def mm_loader(batches: int = BATCHES) -> dict[str, Any]:
    """Return the configuration of batches of four, shuffled with the runner's seed."""
    numbers = torch.randn(4 * batches, 6, generator=torch.Generator().manual_seed(1))
    return {
        "dataset": [{"inputs": one} for one in numbers], "batch_size": 4, "num_workers": 0,
        "sampler": {"type": "DefaultSampler", "shuffle": True}, "collate_fn": {"type": "default_collate"},
    }  # fmt: skip


def runner_of(model: torch.nn.Module, folder: Path, *hooks: Any, evaluated: bool = False, **options: Any) -> Runner:
    """Return a quiet runner of two epochs."""
    wrapper = {"optimizer": {"type": "AdamW", "lr": 0.01}, **options.pop("optim", {})}
    chosen = {"train_cfg": {"by_epoch": True, "max_epochs": EPOCHS}, **options}
    if evaluated:
        chosen |= {"val_dataloader": mm_loader(2), "val_cfg": {}, "val_evaluator": [Missed()]}
    return Runner(
        model, str(folder), train_dataloader=mm_loader(), optim_wrapper=wrapper, custom_hooks=list(hooks), log_level="ERROR",
        randomness={"seed": 0}, experiment_name=f"run-{id(model)}-{len(list(folder.iterdir()))}", **chosen,
    )  # fmt: skip


class RunnerLooks(mmengine.hooks.Hook):
    """Calls a function with the runner after each batch, behind all other hooks."""

    priority = "LOWEST"

    def __init__(self, look: Callable[[Any], object]) -> None:
        self._look = look

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self._look(runner)


class MMEngine(Framework):
    """A `Runner`."""

    kind = GradExporterHook
    options = ("limit", "accumulate", "evaluated")
    sees_failures = False
    logged_steps = (3, 6, 11, 14)

    def model(self) -> torch.nn.Module:
        return Net()

    def fit(self, model: Any, callbacks: list[Any], folder: Path, look: Look, chosen: Chosen) -> Logged:
        means, folder = Means(look, chosen.accumulate), Path(tempfile.mkdtemp(dir=folder))
        looks = RunnerLooks(lambda runner: means.add(runner.message_hub.get_scalar("train/loss").current()))
        optim = {"accumulative_counts": chosen.accumulate, "clip_grad": chosen.limit and {"max_norm": chosen.limit}}
        length = {"by_epoch": True, "max_epochs": chosen.epochs}
        if chosen.evaluated:
            length = {"by_epoch": False, "max_iters": chosen.epochs * BATCHES, "val_interval": 4}
        runner_of(
            model, folder, *callbacks, looks, evaluated=chosen.evaluated, optim=optim, train_cfg=length,
            default_hooks={"logger": {"type": "LoggerHook", "interval": chosen.log_every}},
            visualizer={"type": "Visualizer", "name": f"own-{folder.name}", "vis_backends": [{"type": "LocalVisBackend"}]},
        ).train()  # fmt: skip
        lines = (json.loads(line) for file in folder.glob("*/vis_data/scalars.json") for line in file.read_text().splitlines())
        return [(line["step"], line) for line in lines]


def network() -> torch.nn.Sequential:
    """Return two layers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))


def batches(count: int = BATCHES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs that are their own targets."""
    numbers = torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(1))
    return [(batch, batch) for batch in numbers]


def engine_of(model: torch.nn.Module, **options: Any) -> Engine:
    """Return one of Ignite's trainers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return create_supervised_trainer(model, optimizer, mse_loss, **options)


class Ignite(Framework):
    """A supervised trainer, or a step of one's own that clips."""

    kind = GradExporterHandler
    options = ("limit", "accumulate", "evaluated")

    def model(self) -> torch.nn.Module:
        return network()

    def callback(self, model: torch.nn.Module, exporter: Any = None, **options: Any) -> Any:
        return self.kind(model, exporter, **options)

    def epoch(self, step: int, steps: int) -> float:
        return 1 + (step - 1) // steps

    def fit(self, model: Any, callbacks: list[Any], folder: Path, look: Look, chosen: Chosen) -> Logged:
        means, logged = Means(look, chosen.accumulate), Logged()
        trainer = engine_of(model, gradient_accumulation_steps=chosen.accumulate)
        if chosen.limit is not None:
            trainer = Engine(partial(clipping_step, model, torch.optim.AdamW(model.parameters(), lr=0.01), chosen))
        if chosen.evaluated:
            evaluator = create_supervised_evaluator(model)
            trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: (evaluator.run(batches(3)), model.train()))
        for callback in callbacks:
            callback.attach(trainer)

        def over() -> None:
            metrics, output = dict(trainer.state.metrics), trainer.state.output
            if metrics and (not logged or logged[-1][1] != metrics):
                logged.append((trainer.state.iteration // chosen.accumulate, metrics))
            means.add(float(output["loss"] if isinstance(output, dict) else output))

        trainer.add_event_handler(Events.ITERATION_COMPLETED, over)
        trainer.run(batches(), max_epochs=chosen.epochs)
        return logged


def clipping_step(model: Any, optimizer: Any, chosen: Chosen, engine: Engine, batch: Any) -> dict[str, torch.Tensor]:
    """Train on a batch, with clipping."""
    loss = mse_loss(model(batch[0]), batch[1])
    (loss / chosen.accumulate).backward()
    if engine.state.iteration % chosen.accumulate == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.limit)
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": loss.detach()}


FRAMEWORKS: tuple[Framework, ...] = (Lightning(), LightningByParts(), Transformers(), Accelerate(), MMEngine(), Ignite())
