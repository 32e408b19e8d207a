"""Draws a run of each framework into docs/frameworks/: the same small model, trained by the framework's own trainer.

Run it in the environment of the trainers: `make pictures ARGS='lightning ray'`. With `--cost` (`make bench-frameworks`) it measures
instead what the line costs: in each round the same training once with it, at defaults, and twice without, in turn, by the
processor time of all threads of the process. Ray trains in other processes, so it is not measured.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from torch.nn.functional import cross_entropy

import tests.trainers  # noqa: F401 - nothing here asks the network
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.cli.main import main

WHERE = Path(__file__).resolve().parent.parent / "docs" / "frameworks"
STEPS, BATCH, CONTEXT, WIDTH = 300, 16, 24, 48
LONG, ROUNDS = 6000, 3
"""Steps of a training whose cost is measured, and rounds of three of them."""

OPTIONS: dict[str, Any] = {"port": None, "every": 1}


class Block(torch.nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the shape of its input."""
        out: torch.Tensor = hidden + self.down(torch.relu(self.up(self.norm(hidden))))
        return out


class NextByte(torch.nn.Module):
    """Predicts a byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(256, WIDTH)
        self.mix = torch.nn.Linear(CONTEXT * WIDTH, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(4)))
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of each batch."""
        hidden = self.blocks(self.mix(self.embedding(text).flatten(1)))
        return {"loss": cross_entropy(self.head(hidden), labels)}


class Source(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of the source of Python's own library."""

    def __init__(self, steps: int) -> None:
        text = inspect.getsource(inspect) + inspect.getsource(inspect.getmodule(Path) or inspect)
        self._text = torch.tensor(list(text.encode()), dtype=torch.long)
        self._starts = torch.randint(0, len(self._text) - CONTEXT - 1, (steps * BATCH,), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = int(self._starts[index])
        return {"text": self._text[start : start + CONTEXT], "labels": self._text[start + CONTEXT]}


def loader(steps: int = STEPS) -> torch.utils.data.DataLoader[dict[str, torch.Tensor]]:
    """All pieces once."""
    return torch.utils.data.DataLoader(Source(steps), BATCH)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all of them."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


# One for each framework


def transformers(path: Path, exporter: Exporter | None, model: NextByte, steps: int) -> None:
    """By `Trainer`."""
    from transformers import Trainer, TrainingArguments

    from torch_grad_exporter.integrations.transformers import GradExporterCallback

    arguments = TrainingArguments(
        output_dir=str(path.parent), per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=3e-3, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=50,
    )  # fmt: skip
    callbacks = [] if exporter is None else [GradExporterCallback(exporter)]
    Trainer(model, arguments, train_dataset=Source(steps), callbacks=callbacks).train()


def lightning(path: Path, exporter: Exporter | None, model: NextByte, steps: int) -> None:
    """By `Trainer`; the exporter watches the network within the module."""
    import lightning.pytorch as pl

    from torch_grad_exporter.integrations.lightning import GradExporterCallback

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.network(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self.network)

    callbacks = [] if exporter is None else [GradExporterCallback(exporter)]
    pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks,
    ).fit(Module(), loader(steps))  # fmt: skip


def accelerate(path: Path, exporter: Exporter | None, model: NextByte, steps: int) -> None:
    """By a loop with an `Accelerator`."""
    from accelerate import Accelerator

    from torch_grad_exporter.integrations.accelerate import GradExporterTracker

    accelerator = Accelerator(cpu=True, log_with=None if exporter is None else GradExporterTracker(exporter))
    accelerator.init_trackers("pictures")
    prepared, optimizer, batches = accelerator.prepare(model, adam(model), loader(steps))
    for batch in batches:
        optimizer.zero_grad()
        loss = prepared(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        accelerator.log({"loss": loss.item()})
    accelerator.end_training()


def ignite(path: Path, exporter: Exporter | None, model: NextByte, steps: int) -> None:
    """By an `Engine`."""
    from ignite.engine import Engine

    from torch_grad_exporter.integrations.ignite import GradExporterHandler

    optimizer = adam(model)

    def update(_engine: Engine, batch: dict[str, torch.Tensor]) -> float:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)
    if exporter is not None:
        GradExporterHandler(model, exporter).attach(trainer)
    trainer.run(loader(steps), max_epochs=1)


def mmengine(path: Path, exporter: Exporter | None, model: NextByte, steps: int) -> None:
    """By a `Runner`."""
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]  # MMEngine asks for its version alone
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    from torch_grad_exporter.integrations.mmengine import GradExporterHook

    class Model(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def forward(self, text: torch.Tensor, labels: torch.Tensor, mode: str = "loss") -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = self.network(text, labels)
            return found

    hooks = [] if exporter is None else [GradExporterHook(exporter)]
    Runner(
        Model(), str(path.parent), train_dataloader=loader(steps), optim_wrapper={"optimizer": adam(model)},
        train_cfg={"by_epoch": True, "max_epochs": 1}, custom_hooks=hooks, log_level="ERROR",
    ).train()  # fmt: skip


def deepspeed(path: Path, exporter: Exporter | None, model: NextByte, steps: int) -> None:
    """By an engine in float32."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DS_ACCELERATOR="cpu")
    import deepspeed as package

    from torch_grad_exporter.integrations.deepspeed import watch_engine

    package.init_distributed(dist_backend="gloo")
    settings = {"train_micro_batch_size_per_gpu": BATCH, "zero_allow_untested_optimizer": True}
    engine, *_ = package.initialize(model=model, optimizer=adam(model), config=settings)
    if exporter is not None:
        watch_engine(engine, exporter)
    for batch in loader(steps):
        engine.backward(engine(**batch)["loss"])
        engine.step()


def hook_list(path: Path, exporter: Exporter | None, model: NextByte, steps: int) -> None:
    """By a plain loop with hooks."""
    from torch_grad_exporter.integrations.hook_list import GradExporterHook, HookList

    hooks, optimizer = HookList(), adam(model)
    if exporter is not None:
        hooks.register(GradExporterHook(model, exporter))
    hooks.call("before_train")
    for batch in loader(steps):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        hooks.call("after_train_iter", loss=loss.detach())
    hooks.call("after_train")


FRAMEWORKS: dict[str, Callable[[Path, Exporter | None, NextByte, int], None]] = {
    one.__name__: one for one in (transformers, lightning, accelerate, ignite, mmengine, deepspeed, hook_list)
}
"""Ray Train's workers are processes of their own: see `ray`."""


def ray(path: Path) -> None:
    """In the worker that Ray starts, which saves the run."""
    import ray as package
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer, prepare_model

    def train() -> None:
        from scripts.framework_pictures import OPTIONS, NextByte, adam, loader
        from torch_grad_exporter.integrations.ray import start_exporter as start

        model = prepare_model(NextByte())
        optimizer = adam(model)
        with start(model, **OPTIONS) as exporter:
            for batch in loader():
                optimizer.zero_grad()
                loss = model(**batch)["loss"]
                loss.backward()
                optimizer.step()
                exporter.observe(loss=loss.detach())
        exporter.save(path)

    package.init(include_dashboard=False, num_cpus=2, runtime_env={"env_vars": {"PYTHONPATH": str(WHERE.parent.parent)}})
    TorchTrainer(
        train, scaling_config=ScalingConfig(num_workers=1), run_config=RunConfig(storage_path=str(path.parent), name="pictures")
    ).fit()
    package.shutdown()


def draw(name: str) -> None:
    """Trains and draws."""
    WHERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json.gz")
        if name == "ray":
            ray(path)
        else:
            model = NextByte()
            with start_exporter(model, run=name, **OPTIONS) as exporter:
                FRAMEWORKS[name](path, exporter, model, STEPS)
            exporter.save(path)
        picture = WHERE / f"{name.replace('_', '-')}.png"
        if main(["plot", str(path), "--out", str(picture)]):
            raise SystemExit(f"{name}: nothing was drawn")
        with Image.open(picture) as image:
            small = (
                image.convert("RGB").resize((image.width * 2 // 3, image.height * 2 // 3)).quantize(256, Image.Quantize.MAXCOVERAGE)
            )
        small.save(picture, optimize=True)


# What the line costs


def seconds(name: str, *, watched: bool) -> tuple[float, float | None]:
    """Processor time of a training, and what the exporter says of its own share of the time."""
    model = NextByte()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        exporter = stack.enter_context(start_exporter(model, None)) if watched else None
        before = time.process_time()
        FRAMEWORKS[name](Path(folder, "run"), exporter, model, LONG)
        taken = time.process_time() - before
        return taken, None if exporter is None else exporter.values("overhead_ratio$").get("torch_grad_exporter_overhead_ratio")


def cost(name: str) -> None:
    """Prints a row of the table in docs/frameworks.md."""
    seconds(name, watched=False)
    with_it, control, own = [], [], []
    for number in range(ROUNDS):
        kinds = ("plain", "watched", "control")
        taken = {}
        for kind in (*kinds[number % 3 :], *kinds[: number % 3]):
            taken[kind], account = seconds(name, watched=kind == "watched")
            own += [] if account is None else [account]
        with_it.append(taken["watched"] / taken["plain"] - 1)
        control.append(taken["control"] / taken["plain"] - 1)

    def shown(ratios: list[float]) -> str:
        return f"{median(ratios):+.1%} ({min(ratios):+.1%} to {max(ratios):+.1%})"

    print(f"| {name} | {shown(with_it)} | {shown(control)} | {median(own):.2%} |", flush=True)


if __name__ == "__main__":
    names = [one for one in sys.argv[1:] if one != "--cost"]
    for one in names or (*FRAMEWORKS, *(() if "--cost" in sys.argv else ("ray",))):
        (cost if "--cost" in sys.argv else draw)(one)
