"""A failure at any seam of the exporter: the training ends with the same parameters, and the failure is counted and logged.

The seams are found by looking: every public function, method and property of every module of the package, but for the rooms in
`LEFT_OUT`. In the place of each one in turn stands a double that raises, at its first and its seventh call, or at each.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import logging
import math
import pkgutil
import socket
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import torch_grad_exporter
from tests.support.models import Perceptron
from tests.support.scrape import errors
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.actions import AGC, AutoClip, MaxNorm
from torch_grad_exporter.aggregation import worker as host
from torch_grad_exporter.capture.count_only import budget, counting
from torch_grad_exporter.outputs.live import view
from torch_grad_exporter.outputs.prometheus import series

STEPS = 40

FRAMEWORKS = ("accelerate", "deepspeed", "ignite", "lightning", "mmengine", "opentelemetry", "ray", "transformers")
"""Those that have an integration."""

LEFT_OUT = {
    **dict.fromkeys(
        (f"actions.clip.{room}" for room in (
            "adaptive", "changing", "clipper", "fixed", "measuring", "policy", "running", "skipping", "table",
        )),
        "called by the user's own loop, or behind the guard of `at_steps`; tests/actions/test_clipper.py and test_clip_at_steps.py",
    ),
    "cli.main": "a program of its own",
    **dict.fromkeys(("cli.demo", "cli.run", "cli.script"), "a program of its own"),
    **dict.fromkeys(
        (f"integrations.{room}" for room in ("attach", "roots")),
        "behind the guard of `integrations.attach`, tests/integrations/test_attach.py",
    ),
    **dict.fromkeys(
        ("config.checked", "config.kinds", "config.option", "config.settings"),
        "wrong options raise before the training",
    ),
    "distributed.identity": "read at the start only",
    "metrics.catalogue": "declared at import",
    "collectors.registry": "read at the start only",
    "errors": "the guard itself, which has no guard",
    "exporter": "the user's door, which the scenes go through",
    "actions.users_code": "in the threads of notifications and actions",
    "composition": "as `exporter`",
    "stages": "as `exporter`",
    "start": "as `exporter`",
    "lifecycle": "as `exporter`",
    "cli.assets": "a program of its own",
    **dict.fromkeys(
        (
            "cli.plot", "cli.picture", "cli.check", "outputs.live.saved",
            *(f"gate.{room}" for room in ("baseline", "limits", "rows", "shown", "terms", "verdict")),
        ),
        "a program of its own",
    ),
    "integrations.pytest_plugin": "a test of the user's, which it is to fail",
    "outputs.outputs": "as `exporter`",
    **dict.fromkeys(
        (f"integrations.{room}" for room in (
            "broke_off", "caller", "engines", "hook_list", "requirement", "round_losses", "session",
        )),
        "the start of an integration, which raises, or behind its guard, tests/integrations/test_session.py",
    ),
    **dict.fromkeys(
        (f"integrations.{framework}" for framework in FRAMEWORKS),
        "called by the trainer, in an environment of its own; what fails in an event is guarded, tests/trainers",
    ),
    "model.replicas": "behind `layers.LayerIndex.find_replicas`",
    **dict.fromkeys(
        (
            "distributed.store", "distributed.discovery", "files", "outputs.prometheus.textfile", "distributed.whole_run",
            "collectors.whole_run", "outputs.otlp.push", "outputs.live.recorder", "outputs.live.view",
        ),
        "a thread of its own, in which nothing of the training runs",
    ),
    "outputs.otlp.push_settings": "wrong settings raise before the training",
    **dict.fromkeys(
        (
            *(f"actions.notify.{room}" for room in (
                "job", "notification", "notify", "post", "sending", "sink",
            )),
        ),
        "threads of its own, in which nothing of the training runs, tests/actions/notify/test_notify.py",
    ),
    **dict.fromkeys(
        (f"actions.notify.{room}" for room in ("address", "body", "notifiers")),
        "wrong arguments raise before the training; the rest runs in those threads",
    ),
    **dict.fromkeys(
        (
            *(f"actions.act.{room}" for room in (
                "act", "agreement", "event", "measurements", "queue", "trigger",
            )),
            "collectors.outcomes", "collectors.happened",
        ),
        "threads of its own, tests/actions/act/test_act.py, and wrong arguments, which raise",
    ),
    **dict.fromkeys(
        (f"actions.act.{room}" for room in ("between_steps", "schedulers", "steps")),
        "behind the guard of each action, which only `on` makes, tests/actions/act/test_training.py",
    ),
    **dict.fromkeys(
        (*(f"actions.freeze.{room}" for room in ("freeze", "layers", "norms", "refusals")), "collectors.frozen_layers"),
        "behind the guard of each action, which only `on` makes, tests/actions/freeze/test_freeze.py",
    ),
    **dict.fromkeys(
        (
            *(f"inspection.{room}" for room in ("activations", "modules", "rounds", "tallies", "tensors", "watch")),
            *(f"inspection.{room}" for room in ("layer_timer", "own_nodes", "round_hooks")),
            "aggregation.activations", "aggregation.watched", "collectors.activations", "collectors.watched",
            "aggregation.layer_times", "collectors.layer_times",
        ),
        "only with activations=, layer_times= or watch, tests/inspection/test_failures.py",
    ),
    "aggregation.exponential": "behind the worker's guard, where a variable asks for it, tests/aggregation/test_exponential.py",
    **dict.fromkeys(
        (f"outputs.otlp.{room}" for room in ("delivery", "delivery_grpc", "delivery_http", "delta", "otlp", "protobuf")),
        "the threads of the push, in which nothing of the training runs",
    ),
    **dict.fromkeys(
        (
            "outputs.live.history", "outputs.live.judged", "outputs.live.resources", "outputs.live.rows", "outputs.live.track",
            "rules", "rules.actions", "rules.exporter", "rules.gradients", "rules.context", "rules.declaration", "rules.episodes",
            "rules.record",
            "rules.memory", "rules.origin", "rules.resources", "rules.training", "rules.values", "rules.watch",
            "outputs.live.latest", "outputs.live.live", "outputs.live.pages",
        ),
        "behind the recorder's guard, and the server's; tests/outputs/live/test_live.py",
    ),
    "outputs.otlp.instruments": "in a collection of the user's, tests/outputs/otlp/test_instruments.py",
    "outputs.prometheus.registry": "in a scrape of the user's registry, tests/outputs/prometheus/test_registry.py",
    **dict.fromkeys(
        (
            *(f"inspection.explain.{room}" for room in (
                "drawing", "explain", "explanation", "gradients", "graph", "page", "places", "rows", "snapshot", "values", "watch",
            )),
            "inspection.record", "inspection.recorded",
        ),
        "called by the user alone; what of it runs within a forward or backward is guarded, tests/inspection",
    ),
    **dict.fromkeys(
        ("capture.device_events", "capture.timeline"),
        "devices, whose failures have a guard of their own, tests/capture/test_phases.py",
    ),
    "model.given": "wrong arguments raise before the training",
    **dict.fromkeys(
        (f"statistics.kernels.{room}" for room in ("choice", "launch", "probe", "programs", "tables", "trial")),
        "on CUDA devices, behind the guard of `kernels`, tests/statistics/test_kernels_choice.py",
    ),
    "statistics.declared": "looked through at the start only, tests/statistics/test_toy_statistic.py",
    **dict.fromkeys(
        ("resources.cgroups", "resources.nvml", "resources.readings", "resources.cuda_visible_devices"),
        "behind the guard of a collector; which of it is called depends on the machine, and tests of its own have fakes of all",
    ),
    **dict.fromkeys(
        (f"outputs.http.{room}" for room in (
            "admission", "basic_auth", "connection", "endpoints", "listener", "loop", "server", "tls",
            "web_config", "web_yaml",
        )),
        "the server's own threads, in which nothing of the training runs; clients try them in tests of their own",
    ),
}  # fmt: skip
"""Rooms without seams, and why."""

UNREACHED = {
    **dict.fromkeys(
        (f"actions.clip.{name}" for name in (
            "at_steps.ClipAtSteps.start", "at_steps._Hook.connect", "at_steps.Wanted.policies", "clipping.check_fits",
        )),
        "the start with `clip=`, which raises",
    ),
    **dict.fromkeys(
        (f"actions.clip.{name}" for name in (
            "at_steps.ClipAtSteps.state", "at_steps.ClipAtSteps.load", "clipping.Clipping.load", "clipping.Clipping.check",
            "clipping.check_observed",
        )),
        "calls of the user's, which raise, tests/actions/test_clip_at_steps.py",
    ),
    "actions.clip.clipping.Clipping.remembers": "CUDA graphs",
    **dict.fromkeys(
        ("actions.clip.clipping.Clipping.observe", "actions.clip.known.KnownOptimizers.clippings"),
        "a policy that follows the loss, tests/actions/test_clip_at_steps.py",
    ),
    "actions.clip.known.KnownOptimizer.untell": "a step that raises, tests/actions/test_clip_unusual.py",
    **dict.fromkeys(
        ("actions.clip.at_steps.ClipAtSteps.after_fork_in_child", "collectors.clip_reports.ClipReports.after_fork_in_child"),
        "a forked child, tests/actions/test_clip_at_steps.py",
    ),
    "collectors.process.standard_registry": "the start",
    "collectors.training.device_kinds": "the start",
    "capture.build.Capture.watch": "the start",
    "capture.progress.StepClock.resume": "a call of the user's, which raises, tests/test_exporter.py",
    "outputs.flat.flat": "a call of the user's, behind the guard of `request`, tests/test_exporter.py",
    **dict.fromkeys(
        (f"capture.{name}" for name in (
            "build.Capture.backward_comes", "forwards.ForwardWatch.backward_comes", "count_only.counting.CountOnly.counting",
        )),
        "a call of the user's, behind the guard of `observe`, tests/capture/test_backward_comes.py",
    ),
    **dict.fromkeys(
        (f"capture.{name}" for name in (
            "build.Capture.step_skipped", "build.Capture.gradients_elsewhere", "rounds.RoundTracker.step_skipped",
            "rounds.RoundTracker.gradients_elsewhere", "schedule.SamplingSchedule.never",
        )),
        "calls of the user's, behind the guard of `step`, tests/capture/test_gradients_elsewhere.py",
    ),
    **dict.fromkeys(
        ("capture.build.Capture.inspect", "capture.build.Capture.is_sampled", "capture.cost.SampleCost.now"),
        "what is inspected, tests/capture/test_inspections.py and tests/inspection",
    ),
    **dict.fromkeys(
        (f"torch_compat.{name}" for name in (
            "compiler.is_compiled", "compiler.called_from_compiled", "compiler.something_is_compiled",
            "compiler.compiles_backwards", "autograd.on_node_of",
        )),
        "behind the guard of each inspection, tests/inspection/test_failures.py",
    ),
    "capture.inspections.Inspections.add": "what is inspected, tests/capture/test_inspections.py",
    "capture.backward.BackwardWatch.watch": "the start",
    **dict.fromkeys(
        ("aggregation.pending.PendingSample.withdrawn", "capture.reader.GradientReader.withdraw"),
        "parameters that are thawed between the backwards of a round, tests/capture/test_late_backwards.py",
    ),
    "capture.ladder._Detector.is_trained": "other parameters that are trained, tests/matrix/test_random_loops.py",
    **dict.fromkeys(
        (f"capture.{name}" for name in (
            "watched_data_loader._Given.keep", "watched_data_loader._Given.of", "watched_loader.Waits.counts_for",
        )),
        "the call of `watch_loader`, and copies, tests/capture/test_watched_data_loader.py",
    ),
    **dict.fromkeys(
        (f"model.folding._Module.{name}" for name in ("shown", "rows", "row_of")),
        "within model.folding.fold, whose failures are tried; tests/model/test_folding.py",
    ),
    "model.names.layers_of": "the start",
    **dict.fromkeys(
        ("model.parameters.TrackedParameter.own", "model.parameters.TrackedParameter.gathered"),
        "FullyShardedDataParallel, tests/matrix/test_distributed.py",
    ),
    "torch_compat.autograd.node_of": "explain, tests/inspection/explain/test_explain.py",
    "torch_compat.autograd._OfMany.backward": "no backward runs through it",
    "model.watched.WatchedModels.any_of": "the start of another exporter",
    "model.watched.WatchedModels.all_gone": "the start of another exporter",
    "collectors.gradients.dead_from": "the start",
    **dict.fromkeys((f"capture.cost.Pair.{name}" for name in ("passed", "seconds", "release")), "CUDA"),
    "outputs.prometheus.series.present_rows": "a registry of the user's, tests/outputs/prometheus/test_registry.py",
    "capture.local.LocalGradients.missed": "several ranks, tests/capture/test_local_norm.py",
    **dict.fromkeys(
        (f"capture.{name}" for name in (
            *(f"regular_rounds.RegularRounds.{one}" for one in (
                "begin", "forward_began", "backward_began", "backward_ended", "step_began", "step_ended", "norm_observed",
            )),
            *(f"progress.StepClock.{one}" for one in ("begin_alike", "forward_alike", "round_alike", "end_alike")),
            "gradient_versions.GradientProbes.backwards_alike", "schedule.SamplingSchedule.followed",
            "round_loss.RoundLoss.left_out", "inspections.Inspections.any",
        )),
        "rounds that are followed together, after hundreds of others, tests/capture/test_regular_rounds.py",
    ),
    "capture.rounds.RoundTracker.backwards_counted": "a pause within an accumulation, tests/capture/test_count_only.py",
    "capture.steps.StepWatch.tool_steps": "an optimizer within the step of another, tests/matrix/optimizers.py",
    "capture.torch_hooks.GuardedHook.failed": "the guard itself",
    "capture.torch_hooks._ModuleHooks.set_on": "the start",
    "capture.torch_hooks._ModuleHooks.come_first": "FSDP2, tests/matrix/test_distributed.py",
    "capture.torch_hooks.Hooks.come_first": "FSDP2, tests/matrix/test_distributed.py",
    "capture.torch_hooks.Hooks.guarded": "the start",
    "capture.torch_hooks.Hooks.on_module": "the start",
    "capture.torch_hooks.Hooks.on_optimizers": "the start",
    "aggregation.worker.HostSide.start": "the start",
    "transfer.events.Mailbox.on_backlog": "the start",
    "transfer.events.Mailbox.press": "accelerators, tests/test_full_stages.py",
    **dict.fromkeys(
        (f"aggregation.{one}" for one in (
            "gradients.GradientAggregation.follow", "gradients.GradientAggregation.use", "layer_totals.LayerTotals.follow",
            "optimizer_totals.OptimizerTotals.follow", "totals.TrainingTotals.follow", "worker.HostSide.cursor",
            "worker.HostSide.each_sample",
        )), "the start",
    ),
    **dict.fromkeys(
        (f"aggregation.{one}" for one in (
            "cursor.Singles.take", "worker.HostSide.read", "worker.HostSide.read_as",
        )), "the thread of the history, tests/aggregation/test_cursor.py",
    ),
    "aggregation.cursor.Losses.with_one": "more losses than have a place of their own, tests/outputs/live/test_each_sample.py",
    "aggregation.gradients.GradientAggregation.give_up": "a vector that never arrives, tests/test_full_stages.py",
    "aggregation.worker.HostSide.after_fork_in_child": "a forked child, tests/test_exits.py",
    "model.layers.LayerIndex.all_layers": "a start with `clip=`, which raises what it raises",
    **dict.fromkeys(
        (
            *(f"aggregation.cursor.NormSums.{name}" for name in ("enter", "moved", "take")),
            "model.layers.LayerIndex.shared",
        ),
        "an action that freezes layers, tests/actions/freeze/test_freeze.py",
    ),
    "model.layers.LayerIndex.find_replicas": "several ranks, tests/distributed/test_ranks.py",
    "capture.progress.StepClock.step_undone": "a scaler's answer that comes a step late, as on CUDA, tests/capture/test_fused.py",
    "outputs.announcement.Announcement.start": "the start",
    "outputs.announcement.Announcement.body": "what asks for the ranks, tests/outputs/test_outputs.py",
    "outputs.announcement.Announcement.after_fork_in_child": "a forked child, tests/test_exits.py",
    "collectors.scrape.Scrape.for_rules": "the thread of the history, tests/outputs/live/test_quiet.py",
    "collectors.scrape.Scrape.start": "the start",
    "collectors.scrape.Scrape.after_fork_in_child": "a forked child, tests/test_exits.py",
    "collectors.scrape._Walk.give_up": "a collector that hangs, tests/collectors/test_scrape.py",
    "statistics.device.norms": "accelerators",
    "statistics.device.apart": "a statistic of one's own on accelerators, tests/statistics/test_kernels_choice.py",
    "statistics.reading.ByTorch.norms": "accelerators",
    "transfer.transfer.HostTransfer.post": "accelerators",
    "statistics.eager.EagerStatistics.measure": "tests call it",
    "statistics.extremes._Ends.some_of_one_sign": "several gradients of one shape, tests/statistics/test_extremes.py",
    "statistics.layout.Layout.of": "the start",
    "statistics.layout.Layout.scaled": "accelerators, tests/statistics/test_device_chunks.py",
    "statistics.layout.homogeneous": "a statistic from outside, tests/statistics/test_toy_statistic.py",
    "transfer.transfer._Buffer.free": "accelerators, tests/transfer/test_transfer.py",
    "transfer.transfer._Buffer.lend": "accelerators, tests/transfer/test_transfer.py",
    "transfer.transfer._Buffer.clear": "accelerators, tests/transfer/test_transfer.py",
    "transfer.transfer._UnderWay.ready": "accelerators, tests/transfer/test_transfer.py",
    "torch_compat.lost.tell": "the start",
    "torch_compat.lost.find": "the import",
    "torch_compat.lost.gone": "names that are missing, tests/test_torch_compat.py",
    "torch_compat.lost.has": "the import, and several ranks, tests/model/test_replicas.py",
    **dict.fromkeys(
        (f"torch_compat.{name}" for name in (
            "modules.ForwardUnderWay.begins_anew", "modules.forward_under_way", "optimizers.StepUnderWay.begins_anew",
            "optimizers.optimizers_made", "optimizers.step_under_way",
        )),
        "behind the guard of `integrations.attach`, tests/integrations/test_attach.py",
    ),
    **dict.fromkeys(
        ("torch_compat.compiler.runs_compiled", "torch_compat.compiler.uncompiled"),
        "explain, tests/inspection/explain/test_explain.py",
    ),
    "torch_compat.fsdp.follows_freezing": "Freeze, tests/actions/freeze/test_ranks.py",
    "torch_compat.compiler.never_compile": "the import",
    "torch_compat.optimizers.has_scale": "a start with a gradient scaler, tests/config/test_bad_input.py",
    "torch_compat.replicas.root_mesh": "a slice of a mesh of ranks, tests/model/test_sharding.py",
    "torch_compat.replicas.composed_wrapper": "several ranks, tests/model/test_replicas.py",
    "torch_compat.replicas.default_store": "several ranks, tests/distributed/test_ranks.py",
    "torch_compat.replicas.own_connection": "several ranks, tests/distributed/test_store.py",
    "torch_compat.replicas.without_prefix": "several ranks, tests/distributed/test_store.py",
    **dict.fromkeys(
        (
            "torch_compat.fsdp.flat_of", "torch_compat.fsdp.flat_wrapper", "torch_compat.fsdp.awaits_reduction",
            "model.flat_parts.FlatPart.parameter", "model.flat_parts.FlatPart.is_reduced", "model.flat_parts.FlatPart.of",
            "model.flat_parts.FlatParts.of",
        ),
        "FSDP, tests/matrix/test_distributed.py",
    ),
    "model.optimizers.Optimizers.manual_number": "several ranks, tests/distributed/test_by_hand.py",
    "model.reduction.within": "several ranks, tests/model/test_replicas.py",
    "model.reduction.anywhere": "several ranks, tests/model/test_replicas.py",
}  # fmt: skip
"""Seams that no training here reaches, and what does."""


class InjectedError(Exception):
    """What a double raises."""


@dataclass
class Fault:
    """Raises at the calls that `raises` chooses, from 1, while it is armed."""

    raises: Callable[[int], bool] = lambda _call: False
    armed: bool = False
    calls: int = 0
    raised: int = 0

    def meet(self) -> None:
        """A call of the seam."""
        if self.armed:
            self.calls += 1
            if self.raises(self.calls):
                self.raised += 1
                raise InjectedError


MODES: dict[str, Callable[[int], bool]] = {
    "first and seventh": lambda call: call in (1, 7),
    "always": lambda _call: True,
}


@dataclass(frozen=True)
class Seam:
    """A function of a module, or an attribute of a class."""

    room: str
    name: str
    owner: Any
    attribute: str

    def __str__(self) -> str:
        return f"{self.room}.{self.name}"

    def replace(self, patch: pytest.MonkeyPatch, fault: Fault) -> None:
        """Puts a double in its place, everywhere."""
        original = inspect.getattr_static(self.owner, self.attribute)
        double = doubled(original, fault)
        owners = [self.owner] if inspect.isclass(self.owner) else modules()
        for owner in owners:
            for attribute, value in list(vars(owner).items()):
                if value is original:
                    patch.setattr(owner, attribute, double)


def doubled(original: Any, fault: Fault) -> Any:  # noqa: ANN401 - a function, or what a class makes of one
    """The same, but that `fault` is asked first."""
    if isinstance(original, property):
        return property(doubled(original.fget, fault), original.fset)
    if isinstance(original, classmethod | staticmethod):
        return type(original)(doubled(original.__func__, fault))

    @functools.wraps(original)
    def double(*arguments: object, **options: object) -> object:
        fault.meet()
        return original(*arguments, **options)

    return double


def rooms() -> list[str]:
    """The names of all modules of the package, without the package's own."""
    found = pkgutil.walk_packages(torch_grad_exporter.__path__, f"{torch_grad_exporter.__name__}.")
    return [one.name.removeprefix(f"{torch_grad_exporter.__name__}.") for one in found]


@functools.cache
def modules() -> list[types.ModuleType]:
    """All modules of the package, but for those of frameworks and of Triton, which are not installed here."""
    absent = {"statistics.kernels.programs", *(f"integrations.{framework}" for framework in FRAMEWORKS)}
    wanted = [room for room in rooms() if room not in absent]
    return [importlib.import_module(f"{torch_grad_exporter.__name__}.{room}") for room in wanted]


def seams() -> Iterator[Seam]:
    """Every public function of every module, and every public method and property of every class, but for `LEFT_OUT`."""
    for module in modules():
        room = module.__name__.removeprefix(f"{torch_grad_exporter.__name__}.")
        if room in LEFT_OUT:
            continue
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(value) and not name.startswith("_"):
                yield Seam(room, name, module, name)
            elif inspect.isclass(value) and not getattr(value, "_is_protocol", False):
                for attribute, member in vars(value).items():
                    callable_ = inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)
                    if callable_ and not attribute.startswith("_"):
                        yield Seam(room, f"{name}.{attribute}", value, attribute)


# Trainings


class Watch:
    """A training's own side of an exporter; this one has none."""

    def start(self, model: torch.nn.Module | dict[str, torch.nn.Module], **options: object) -> None:
        """Begins to watch."""

    def loader(self, batches: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
        """The batches."""
        return batches

    def observe(self, **values: float | torch.Tensor) -> None:
        """Shows values."""

    def step(self, number: int | None = None) -> None:
        """Says that a step is done."""

    def scrape(self) -> None:
        """A viewer of the page."""

    def worker(self) -> None:
        """The worker has its turn, and finds that no step has come for long."""

    @property
    def port(self) -> int | None:
        """Where it is served."""
        return None


@dataclass
class Watched(Watch):
    """Starts an exporter, and arms the faults then."""

    faults: list[Fault]
    exporter: Exporter = field(init=False)

    def start(self, model: torch.nn.Module | dict[str, torch.nn.Module], **options: object) -> None:
        others = dict.fromkeys(("cuda_memory", "gpu", "process", "host", "container"), False)
        chosen: dict[str, Any] = {"port": None, "addr": "127.0.0.1", "every": 1, "collectors": others, **options}
        self.exporter = start_exporter(model, **chosen)
        self.arm(to=True)

    def arm(self, *, to: bool) -> None:
        """Switches the faults on or off."""
        for fault in self.faults:
            fault.armed = to

    def end(self) -> None:
        """Takes back what a failing `close` has left."""
        exporter = self.exporter
        closes = [exporter.close, exporter._host.close, exporter._training.hooks.close, exporter._training.capture.settle]
        closes += [] if exporter._clip is None else [exporter._clip.close]
        for close in [*closes, functools.partial(exporter._outputs.close, failed=False, hurried=True)]:
            close()

    def loader(self, batches: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
        return self.exporter.watch_loader(batches)

    def observe(self, **values: float | torch.Tensor) -> None:
        self.exporter.observe(**values)

    def step(self, number: int | None = None) -> None:
        self.exporter.step(number)

    def scrape(self) -> None:
        self.exporter.collect()

    def worker(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(counting, "STILL_SECONDS", 0.0)
            self.exporter._host._guard(self.exporter._training.capture._count_only.look)

    @property
    def port(self) -> int | None:
        return self.exporter.port


@functools.cache
def batches(steps: int = STEPS) -> list[torch.Tensor]:
    """The same inputs each time."""
    return list(torch.randn(steps, 5, 6, generator=torch.Generator().manual_seed(1)))


def seeded(kind: type[torch.nn.Module] = Perceptron) -> Any:  # noqa: ANN401 - a model of this kind
    """The same model each time."""
    torch.manual_seed(0)
    return kind()


def clipped(model: torch.nn.Module) -> torch.Tensor:
    """Clips the gradients; returns their norm."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def halves(model: Perceptron) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """SGD for one half of the model, Adam for the other."""
    return torch.optim.SGD(model.first.parameters(), lr=0.05), torch.optim.Adam(model.second.parameters(), lr=0.01)


def plain(watch: Watch) -> torch.nn.Module:
    """A loop that clips; a step is skipped."""
    model = seeded()
    optimizers = halves(model)
    watch.start(model, every=5)
    for number, x in enumerate(batches()):
        model.zero_grad()
        model(x).square().mean().backward()
        clipped(model)
        if number != 17:
            for optimizer in optimizers:
                optimizer.step()
    return model


def observed(watch: Watch) -> torch.nn.Module:
    """A loop that uses all that the exporter has: it observes, numbers its steps, evaluates, and is scraped."""
    model = seeded()
    optimizers = halves(model)
    watch.start(model, every=4, moments=True, weights=True, collectors={})
    for number, x in enumerate(watch.loader(batches())):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        watch.observe(loss=loss, grad_norm=clipped(model), samples=5, tokens=torch.tensor(7), epoch=number // 20, grad_divisor=1)
        for optimizer in optimizers:
            optimizer.step()
        if number % 5 == 4:
            watch.step(number)
            watch.scrape()
        if number == 29:
            with torch.no_grad():
                model.eval()(x)
            model.train()
    return model


def counted(watch: Watch) -> torch.nn.Module:
    """A loop of short steps, which are only counted, with all that ends the counting."""
    model = seeded()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    foreign = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    watch.start(model, every=128, overhead_budget=0.0001)
    for number, x in enumerate(batches(3 * STEPS)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if number % 3 == 2:
            watch.observe(grad_norm=clipped(model))
        if number % 50 == 49:
            continue
        optimizer.step()
        if number % 30 == 29:
            foreign.step()
        if number % 8 == 5:
            watch.worker()
        if number % 40 == 39:
            watch.scrape()
    return model


def adapting(watch: Watch) -> torch.nn.Module:
    """A loop whose samples adapt to a budget that allows for many of them."""
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch.start(model, every="auto", overhead_budget=0.9)
    for x in batches(3 * STEPS):
        time.sleep(0.002)  # else a sample on a busy machine costs so many steps that there are too few of them
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


class Renewed(torch.nn.Module):
    """A layer, and one behind it that gives way to another."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(6, 4)
        self.heads = torch.nn.ModuleDict({"0": torch.nn.Linear(4, 3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for head in self.heads.values():
            x = head(self.base(x).relu())
        return x


def renewed(watch: Watch) -> torch.nn.Module:
    """A loop that replaces a layer by one of another name in every fifth step."""
    model = seeded(Renewed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch.start(model)
    for step, x in enumerate(batches(), 1):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step % 5 == 0:
            model.heads.clear()
            model.heads[str(step)] = torch.nn.Linear(4, 3)
            optimizer.param_groups[0]["params"] = list(model.parameters())
            watch.scrape()
    return model


def by_parts(watch: Watch) -> torch.nn.Module:
    """A loop that calls the model's parts, so that the parameters' own nodes tell of backwards."""
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch.start(model)
    for x in batches():
        optimizer.zero_grad()
        model.second(model.first(x).relu()).square().mean().backward()
        optimizer.step()
    return model


def by_hand(watch: Watch) -> torch.nn.Module:
    """A loop that writes the gradients itself, so that only the optimizer sees them."""
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch.start(model)
    parameters = list(model.parameters())
    for x in batches():
        for parameter, gradient in zip(parameters, torch.autograd.grad(model(x).square().mean(), parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return model


def by_closure(watch: Watch) -> torch.nn.Module:
    """A loop whose backwards run within the step."""
    model = seeded()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    watch.start(model)
    for x in batches()[:8]:

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


def within_backward(watch: Watch) -> torch.nn.Module:
    """An optimizer per parameter, which steps in the backward."""
    model = seeded()
    of = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}

    def step(parameter: torch.nn.Parameter) -> None:
        of[parameter].step()
        of[parameter].zero_grad()

    for parameter in of:
        parameter.register_post_accumulate_grad_hook(step)
    watch.start(model, weights=True)
    for x in batches():
        model(x).square().mean().backward()
    return model


class Returning(Perceptron):
    """A model that returns its loss."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x).square().mean()}


def returning(watch: Watch) -> torch.nn.Module:
    """A model that returns its loss, in rounds of two micro-batches, and in closures."""
    model = seeded(Returning)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch.start(model, every=3)
    for number, x in enumerate(batches()):

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            model(x)["loss"].backward()
            return torch.zeros(())

        if number % 2 == 0:
            closure()
        elif number % 4 == 1:
            optimizer.step(closure)
            optimizer.zero_grad()
        else:
            closure()
            optimizer.step()
            optimizer.zero_grad()
    return model


class Assorted(torch.nn.Module):
    """Layers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(7, 4, sparse=True)
        self.up = torch.nn.ConvTranspose1d(4, 6, 3)
        self.down = torch.nn.Conv1d(6, 3, 3)
        self.narrow = torch.nn.Linear(3, 2).bfloat16()
        self.large = torch.nn.Linear(2, 40_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x.abs().mul(10).long() % 7).mT
        return self.large(self.narrow(self.down(self.up(x)).relu().mean(2).bfloat16()).float())


def assorted(watch: Watch) -> torch.nn.Module:
    """Layers of many kinds, with a huge gradient, a NaN and an infinity, accumulation, and layers that are frozen and added."""
    model = seeded(Assorted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch.start(model, moments=True)
    for number, x in enumerate(batches()[:12]):
        factor = {5: 1e38, 6: float("nan"), 7: float("inf")}.get(number, 1e-3)
        (model(x).square().mean() * factor).backward()
        if number % 2 and not 5 <= number <= 7:
            optimizer.step()
        if number % 2:
            optimizer.zero_grad()
        model.up.requires_grad_(number != 3)
        if number == 8:
            model.large = torch.nn.Linear(2, 4)
            optimizer.add_param_group({"params": list(model.large.parameters())})
    return model


def scaled(watch: Watch) -> torch.nn.Module:
    """A fused optimizer under a gradient scaler, with an overflow."""
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watch.start(model)
    for number, x in enumerate(batches()[:20]):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * (1e38 if number in (0, 7) else 1.0)).backward()
        if number == 0:
            continue  # it is not known yet whether the first backward was scaled
        scaler.step(optimizer)
        scaler.update()
    return model


class Descent:
    """An optimizer by hand, of which no hook tells."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = list(model.parameters())

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.sub_(0.05 * parameter.grad)


def unseen(watch: Watch) -> torch.nn.Module:
    """An optimizer of which no hook tells: the changed parameters do, and then the user."""
    model = seeded()
    optimizer = Descent(model)
    watch.start(model)
    for number, x in enumerate(batches()):
        model.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if number >= 20:
            watch.step()
    return model


def sharp(watch: Watch) -> torch.nn.Module:
    """SAM: two passes to a step, and the gradients are cleared in between; now and then a step raises."""
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch.start(model)
    for number, x in enumerate(batches()[:24]):
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()

        def closure(number: int = number) -> float:
            if number in (9, 10):
                raise OSError
            return 0.0

        try:
            optimizer.step(closure if number >= 9 else None)
        except OSError:
            continue
    return model


class Twice(torch.optim.SGD):
    """An optimizer whose step takes two of its parent's."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        super().step(closure)
        return super().step(closure)


def nested(watch: Watch) -> torch.nn.Module:
    """Steps within steps."""
    model = seeded()
    optimizer = Twice(model.parameters(), lr=0.05)
    watch.start(model)
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def on_meta(watch: Watch) -> torch.nn.Module:
    """A model without data, whose gradients are measured as those on an accelerator are."""
    with torch.device("meta"):
        model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch.start(model)
    for x in batches()[:8]:
        optimizer.zero_grad()
        model(x.to("meta")).square().mean().backward()
        optimizer.step()
    return seeded()


def adversarial(watch: Watch) -> torch.nn.Module:
    """A generator and a discriminator, whose gradients the generator's backward fills, too."""
    generator, discriminator = seeded(), torch.nn.Linear(3, 1)
    optimizers = torch.optim.SGD(generator.parameters(), lr=0.05), torch.optim.Adam(discriminator.parameters(), lr=0.01)
    watch.start({"generator": generator, "discriminator": discriminator})
    for number, x in enumerate(batches()):
        generator.zero_grad()
        discriminator.zero_grad()
        made = generator(x)
        discriminator(made if number % 2 else made.detach()).square().mean().backward()
        optimizers[1 - number % 2].step()
    return torch.nn.ModuleList((generator, discriminator))


REQUESTS = (
    "GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text\r\nAccept-Encoding: gzip\r\n\r\n",
    "GET /metrics HTTP/1.1\r\n\r\n",
    "HEAD / HTTP/1.1\r\n\r\n",
    "GET /healthz HTTP/1.1\r\n\r\n",
    "GET /nowhere HTTP/1.1\r\n\r\n",
    "nonsense\r\n\r\n",
)


def ask(port: int | None) -> None:
    """A client of all sorts of requests, which does not mind what comes back."""
    for request in REQUESTS if port else ():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port or 0), timeout=0.2) as client:
            client.sendall(request.encode())
            while client.recv(1 << 16):
                pass


def replicated(watch: Watch) -> torch.nn.Module:
    """A loop under `DistributedDataParallel`, in a job of one rank, whose own gradients are looked at, too."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            model = torch.nn.parallel.DistributedDataParallel(seeded())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            watch.start(model, local_norm=True)
            for number, x in enumerate(batches()):
                if number % 2 == 0:
                    optimizer.zero_grad()
                with model.no_sync() if number % 2 == 0 else contextlib.nullcontext():
                    model(x).square().mean().backward()
                if number % 2:
                    optimizer.step()
                    watch.observe(samples=10)
            return model.module
        finally:
            dist.destroy_process_group()


def clipping(watch: Watch) -> torch.nn.Module:
    """Gradients are clipped before each step, to a limit that leaves every bit as it is."""
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch.start(model, every=1, clip=MaxNorm(1e9), dry_run=[AutoClip(), AGC()])
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        watch.observe(loss=1.0, epoch=1)
        watch.scrape()
    return model


def served(watch: Watch) -> torch.nn.Module:
    """A loop that is scraped over HTTP."""
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch.start(model, port=0, every=5)
    client = threading.Thread(target=ask, args=(watch.port,))
    client.start()
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    client.join()
    return model


def looked_inside(watch: Watch) -> torch.nn.Module:
    """A loop whose rounds are all looked at for where a NaN began; there are some, whose steps are skipped."""
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch.start(model, every=1, nan_origin="always")
    for number, x in enumerate(batches()):
        scale = (1.0, math.nan, math.inf)[number % 3]
        loss = (model(x * (scale if number % 2 else 1.0)) * (1.0 if number % 2 else scale)).square().mean()
        watch.observe(loss=loss)
        if number % 5 != 4:
            loss.backward()
        if torch.isfinite(loss) and number % 5 != 4:
            optimizer.step()
        optimizer.zero_grad()
        if number % 8 == 5:
            watch.worker()
            watch.scrape()
    return model


SCENES: dict[str, Callable[[Watch], torch.nn.Module]] = {
    scene.__name__: scene
    for scene in (
        plain, observed, counted, adapting, renewed, by_parts, by_hand, by_closure, within_backward, returning, assorted, scaled,
        unseen, sharp, adversarial, nested, on_meta, replicated, clipping,
        served, looked_inside,
    )
}  # fmt: skip


def parameters_after(scene: Callable[[Watch], torch.nn.Module], watch: Watch) -> list[torch.Tensor]:
    """What the training has made of the model."""
    return [parameter.detach().clone() for parameter in scene(watch).parameters()]


def threads_of_ours() -> set[threading.Thread]:
    """The exporters' threads that run now."""
    return {thread for thread in threading.enumerate() if "torch-grad-exporter" in thread.name}


@pytest.fixture(autouse=True)
def _clean(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """One thread for torch, since the models are small; and the log is taken down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"):
        yield
    torch.set_num_threads(threads)


@functools.cache
def expected(scene: str) -> list[torch.Tensor]:
    """The parameters after a training without an exporter."""
    return parameters_after(SCENES[scene], Watch())


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Makes the worker check often, and no counting end with time, however busy the machine; has nothing remembered of other tests.

    No history is recorded: whether its thread asks in time for a snapshot is chance.
    """
    patch.setattr(view.View, "start", lambda _view: None)
    series.columns.cache_clear()
    patch.setattr(host, "IDLE_SECONDS", 0.03)
    patch.setattr(counting, "STILL_SECONDS", 3600.0)
    for module in (budget, counting):
        patch.setattr(module, "COUNTING_SECONDS", 3600.0)


@pytest.fixture(scope="module")
def reached() -> dict[str, dict[str, int]]:
    """For each seam how often it is called, by scene, if nothing fails."""
    found: dict[str, dict[str, int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        faults = {str(seam): Fault() for seam in seams()}
        for seam in seams():
            seam.replace(patch, faults[str(seam)])
        for name, scene in SCENES.items():
            watched = Watched(list(faults.values()))
            assert identical(parameters_after(scene, watched), expected(name))
            watched.exporter.close()
            assert not any(watched.exporter._errors.counts().values())
            for seam, fault in faults.items():
                if fault.calls:
                    found.setdefault(seam, {})[name] = fault.calls
                fault.calls, fault.armed = 0, False
    return found


def identical(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether all bits are the same."""
    pairs = zip(ones, others, strict=True)
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


def run(watched: Watched, fault: Fault, scene: str, caplog: pytest.LogCaptureFixture) -> str:
    """Trains; what is wrong then, or nothing."""
    caplog.clear()
    try:
        after = parameters_after(SCENES[scene], watched)
        watched.exporter.close()
    finally:
        watched.arm(to=False)
        watched.end()
    counts = {source: count for source, count in watched.exporter._errors.counts().items() if count}
    shown = errors(watched.exporter)
    logged = Counter(
        record.getMessage().removeprefix("torch_grad_exporter: ").partition(" failed")[0]
        for record in caplog.records
        if "training goes on" in record.message
    )
    wrong = []
    if not identical(after, expected(scene)):
        wrong.append("other parameters")
    if bool(counts) != bool(fault.raised):
        wrong.append(f"raised {fault.raised}, counted {counts}")
    if shown != counts:
        wrong.append(f"shown {shown}, counted {counts}")
    if logged != dict.fromkeys(counts, 1):
        wrong.append(f"logged {logged}, counted {counts}")
    return "; ".join(wrong)


def test_the_list_of_seams_is_complete(reached: dict[str, dict[str, int]]) -> None:
    """Every module has seams or is left out; every seam is reached by a training, or it is said what reaches it."""
    names = {str(seam) for seam in seams()}
    assert set(LEFT_OUT) <= set(rooms())
    assert set(UNREACHED) <= names
    assert names - set(reached) <= set(UNREACHED), "reach them in a scene, or say in UNREACHED what does"
    if not torch.accelerator.is_available():
        assert set(UNREACHED) <= names - set(reached), "they are reached now"


@pytest.mark.parametrize("mode", ["first and seventh", pytest.param("always", marks=pytest.mark.full)])
@pytest.mark.parametrize("seam", [seam for seam in seams() if str(seam) not in UNREACHED], ids=str)
def test_a_failure_at_a_seam(seam: Seam, mode: str, reached: dict[str, dict[str, int]], caplog: pytest.LogCaptureFixture) -> None:
    """Whichever seam fails, once or always, the training ends with the same parameters, and failures are counted and logged."""
    calls = reached[str(seam)]
    scene = next((name for name, number in calls.items() if number >= 7), max(calls, key=lambda name: calls[name]))
    fault = Fault(MODES[mode])
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        seam.replace(patch, fault)
        wrong = run(Watched([fault]), fault, scene, caplog)
    assert not wrong, f"{scene}: {wrong}"


@dataclass
class WithFaultyClock(Watched):
    """Has a clock that fails, or the time of the day."""

    attribute: str = "clock"

    def start(self, model: torch.nn.Module | dict[str, torch.nn.Module], **options: object) -> None:
        super().start(model, **options)
        clock = self.exporter._training.clock
        setattr(clock, self.attribute, doubled(getattr(clock, self.attribute), self.faults[0]))


@pytest.mark.parametrize("scene", ["observed", "counted"])
@pytest.mark.parametrize("attribute", ["clock", "now"])
@pytest.mark.parametrize("mode", MODES)
def test_a_clock_that_fails(mode: str, attribute: str, scene: str, caplog: pytest.LogCaptureFixture) -> None:
    """The clocks, which are handed in, are seams as well."""
    fault = Fault(MODES[mode])
    assert not run(WithFaultyClock([fault], attribute), fault, scene, caplog)
    assert fault.raised


STARTS = [seam for seam in seams() if UNREACHED.get(str(seam)) == "the start"]


@pytest.mark.parametrize("seam", STARTS, ids=str)
def test_a_failure_at_the_start(seam: Seam) -> None:
    """A start that fails raises, or goes on without what failed; in no case are hooks, threads or a socket left."""
    threads = threads_of_ours()
    hooks = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    model = seeded()
    fault = Fault(lambda _call: True, armed=True)
    with pytest.MonkeyPatch.context() as patch:
        seam.replace(patch, fault)
        with contextlib.suppress(InjectedError), start_exporter(model, 0, addr="127.0.0.1"):
            pass
    assert fault.raised
    assert threads_of_ours() == threads
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == hooks
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    gc.collect()  # a socket that was not closed would warn now
