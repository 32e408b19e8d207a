"""What is compared: this exporter, watching by hand, single calls of PyTorch, and the monitors of other packages (`rivals.py`).

What each computes is its own business; `MONITORS` says what comes out, and the page says what is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import prometheus_client
import torch
from torch import Tensor, nn

from benchmarks.monitor import Monitor, Plain
from benchmarks.record import installed
from benchmarks.rivals import ComposerMonitor, LightningGradNorm, WandbWatch
from benchmarks.workloads import Training
from torch_grad_exporter import Exporter, start_exporter


class ThisExporter(Plain):
    """`start_exporter(model, port=0)`, served but not scraped while the clock runs.

    It appears in a registry as well, to see its own counts right after a block: what is served is up to a second old.
    """

    def __init__(self, every: int | None = None, *, activations: bool = False) -> None:
        self._every: int | Literal["auto"] = "auto" if every is None else every
        self._activations = activations
        self._registry = prometheus_client.CollectorRegistry()
        self._exporter: Exporter | None = None

    def attach(self, training: Training) -> None:
        """The one line of the README."""
        self._exporter = start_exporter(
            training.model, port=0, registry=self._registry, every=self._every, activations=self._activations
        )

    def scrape(self) -> dict[str, float]:
        """The exporter's current metrics about itself, by name; of those with labels of their own only the last row."""
        ours = (metric for metric in self._registry.collect() if metric.name.startswith("torch_grad_exporter"))
        return {sample.name: sample.value for metric in ours for sample in metric.samples}

    def close(self) -> None:
        """Removes everything."""
        if self._exporter is not None:
            self._exporter.close()


class ModuleHooks(Plain):
    """By hand: a full backward hook on every layer that has parameters, `.item()` of the norm of its output's gradient."""

    def attach(self, training: Training) -> None:
        """One hook per layer."""
        self.norms: dict[str, float] = {}
        layers = {
            name: layer for name, layer in training.model.named_modules() if next(layer.parameters(recurse=False), None) is not None
        }
        self._handles = [layer.register_full_backward_hook(self._hook(name)) for name, layer in layers.items()]

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:  # noqa: ANN401 - torch's own signature
            self.norms[name] = outputs[0].norm().item()

        return hook

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


class ParameterHooks(Plain):
    """By hand: a hook on every parameter, its gradient's norm into a `prometheus_client` gauge and histogram."""

    def attach(self, training: Training) -> None:
        """One hook, one gauge and one histogram per parameter; labels are looked up once, here."""
        registry = prometheus_client.CollectorRegistry()
        self._gauge = prometheus_client.Gauge("grad_norm", "Norm.", ["layer"], registry=registry)
        buckets = [10.0**exponent for exponent in range(-8, 5)]
        self._histogram = prometheus_client.Histogram("grad_norms", "Norms.", ["layer"], registry=registry, buckets=buckets)
        self._handles = [p.register_post_accumulate_grad_hook(self._hook(name)) for name, p in training.model.named_parameters()]

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        gauge, histogram = self._gauge.labels(name), self._histogram.labels(name)

        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None  # noqa: S101 - torch has just accumulated it
            norm = parameter.grad.norm().item()
            gauge.set(norm)
            histogram.observe(norm)

        return hook

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


class ClipGradNorm(Plain):
    """`clip_grad_norm_` alone, which many loops call anyway."""

    def after_backward(self) -> None:
        """The call."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)


class ForeachNorm(Plain):
    """One bare `torch._foreach_norm` over all gradients, its result unread: what reading each gradient once costs."""

    def after_backward(self) -> None:
        """The call."""
        torch._foreach_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the table: what it is called, how to make it, and the package that it needs, if any."""

    title: str
    make: Callable[[], Monitor]
    gives: str
    package: str | None = None

    @property
    def missing(self) -> bool:
        """Whether the package is not there."""
        return self.package is not None and installed(self.package) is None


# At the same rate costs can be compared; each 1,000th step is wandb's default.
RATES = {1000: "each 1,000th step", 100: "each 100th step", 1: "each step"}

MONITORS = {
    "exporter": Entry("this exporter, defaults", ThisExporter, "all its metrics, of sampled steps"),
    "exporter_activations": Entry(
        "this exporter, `activations=True`", lambda: ThisExporter(activations=True), "the same and the outputs of all modules"
    ),
    **{
        f"exporter_every_{every}": Entry(
            f"this exporter, `every={every}`", partial(ThisExporter, every), f"all its metrics, {rate}"
        )
        for every, rate in RATES.items()
    },
    "foreach_norm": Entry("one `torch._foreach_norm`", ForeachNorm, "norms, unread"),
    "clip_grad_norm": Entry("`clip_grad_norm_`", ClipGradNorm, "the global norm, unread, and clipping"),
    "composer": Entry("Composer `OptimizerMonitor`", lambda: ComposerMonitor(10), "norms, each 10th step", "mosaicml"),
    "composer_1": Entry(
        "Composer `OptimizerMonitor`, `batch_log_interval=1`", lambda: ComposerMonitor(1), "norms, each step", "mosaicml"
    ),
    "lightning": Entry("Lightning `grad_norm`", LightningGradNorm, "norms, read each 50th step", "lightning"),
    "module_hooks": Entry("module hooks with `.item()`", ModuleHooks, "norms of the gradients of layers' outputs"),
    "parameter_hooks": Entry("parameter hooks into `prometheus_client`", ParameterHooks, "norms and their histograms"),
    "wandb_log": Entry("`wandb.log` of the loss alone", lambda: WandbWatch(None), "nothing of gradients", "wandb"),
    **{
        f"wandb_{every}": Entry(f"`wandb.watch`, `log_freq={every}`", partial(WandbWatch, every), f"histograms, {rate}", "wandb")
        for every, rate in RATES.items()
    },
}
