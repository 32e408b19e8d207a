"""The stages of an exporter: built in the order of the data, and started from its end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from torch_grad_exporter.actions.clip.at_steps import ClipAtSteps
from torch_grad_exporter.build.acting import ActionStage
from torch_grad_exporter.build.capturing import build_capture
from torch_grad_exporter.build.inspecting import RouterStage, WatchStage, add_inspections, build_worker
from torch_grad_exporter.build.scraping import build_scrape
from torch_grad_exporter.capture.observations import ValueLog
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.process import STANDARD
from torch_grad_exporter.collectors.training import TRAIN_INFO
from torch_grad_exporter.config.checked import Checked
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.lifecycle import Ending
from torch_grad_exporter.model.watched import WatchedModels
from torch_grad_exporter.outputs.otlp.instruments import Instruments
from torch_grad_exporter.outputs.outputs import OutputOptions, Outputs
from torch_grad_exporter.outputs.prometheus.registry import RegistryCollector
from torch_grad_exporter.torch_compat import lost
from torch_grad_exporter.version import __version__

# Every boundary at which a failure of ours can be counted, but for the collectors.
SOURCES = (
    "forward_hook", "backward_hook", "optimizer_hook", "capture", "reduction", "weights", "optimizer_state", "observe",
    "worker", "request", "close", "devices", "discovery", "textfile", "web_config", "otlp", "log",
    "history", "notify", "action", "clip", "clip_dry_run", "clip_report", "activations", "watch", "nan_origin",
    "integration", "timing", "state", "layer_times", "kernels", "attention", "replicas", "routers", "black_box",
)  # fmt: skip

# The end waits at most this long for the job's store.
STORE_SECONDS = 0.4


class _Forked(Protocol):
    def after_fork_in_child(self) -> None:
        """Gives up what belongs to the parent process."""


class Stages:
    """Everything between the hooks in PyTorch and what leaves the process, for one exporter.

    The constructor registers, opens and starts nothing; `start` does, and `close` takes all of it
    back, also after a `start` that raised. Neither keeps `checked`, which holds optimizers and with
    them the parameters of a model that may be dropped.

    Args:
        models: The models to watch, by name.
        checked: The user's choices, valid.
        ending: How and when the run ends.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module], checked: Checked, ending: Ending) -> None:
        self._ending, self._store = ending, checked.store
        self._run, self._rank = checked.run, checked.rank
        self.errors = ErrorLog((*SOURCES, *REGISTRY.sources))
        self._closing, self._guard = contextlib.ExitStack(), self.errors.boundary("close", limit=None)

        # On the thread that trains.
        self._capturing = capturing = build_capture(checked, self.errors)
        self.capture, self.clock, self.optimizers = capturing.capture, capturing.clock, capturing.optimizers
        self.log = ValueLog(self.clock, capturing.mailbox)
        totals = add_inspections(capturing, models, checked, ending)
        self._replicas, self._state = totals.replicas, totals.state
        self._watching = WatchStage(capturing, totals.watched)
        self.routers = RouterStage(capturing, models, checked)
        self.clip = None
        if checked.clip is not None:
            # Right before each step, after the gradients were read.
            named = checked.arguments.optimizers
            self.clip = ClipAtSteps(checked.clip, models, self.errors, named=named, capture=self.capture)

        # In the background.
        self._worker = build_worker(capturing, totals, checked)
        shown = build_scrape(capturing, totals, self._worker, self.clip, models=models, checked=checked, ending=ending)
        self.scrape, self.view, self._announcement, self._journal = shown.scrape, shown.view, shown.announcement, shown.journal
        self._black_box = None
        if checked.settings.black_box:
            # Here, since most runs do without.
            from torch_grad_exporter.build.black_box import build_black_box  # noqa: PLC0415

            self._black_box = build_black_box(capturing, models, totals.origins, shown, checked)
        self._acting = ActionStage(capturing, totals, shown, checked)
        self.act, self.stop_requested = self._acting.act, self._acting.stop_requested

        # These are made by `start`: others can see them from their first moment on.
        self._instruments: Instruments | None = None
        self.outputs: Outputs | None = None

    def start(self, models: Mapping[str, torch.nn.Module], checked: Checked) -> None:
        """Start to show values, and last to watch the training.

        A stage is there before the one that feeds it. `close` goes the other way: first no more
        values come in, then each stage hands on what it still has.

        Raises:
            ValueError: The registry has a metric with one of our names already.
        """
        # An armed round references parameters; a model that is dropped meanwhile must be freed.
        self.models = WatchedModels(models.values(), gone=self._release_parameters)
        self.at_end(self.models.close)
        self.at_end(functools.partial(self._store.close, STORE_SECONDS))
        self._start_outputs(checked)
        self._start_background()
        self._start_capture(models, checked)
        lost.warn()

    def _start_outputs(self, checked: Checked) -> None:
        """Start what shows the metrics."""
        settings, errors, scrape = checked.settings, self.errors, self.scrape
        if (registry := checked.arguments.registry) is not None:
            registered = RegistryCollector(
                scrape, checked.labels, REGISTRY.catalogue.values(), common=STANDARD.specs,
                only_on=TRAIN_INFO if settings.labels_on == "target" else None, errors=errors,
            )  # fmt: skip
            self.at_end(registered.close)
            registered.register(registry)
        self.at_end(scrape.close)
        scrape.start()
        if (provider := checked.arguments.meter_provider) is not None:
            self._instruments = Instruments(provider, scrape, checked.labels, errors)
            self.at_end(self._instruments.close)
        self.outputs = outputs = Outputs(
            scrape,
            self._announcement.rank,
            OutputOptions(
                port=settings.port,
                addr=settings.addr,
                textfile_dir=settings.textfile_dir,
                web_config_file=settings.web_config_file,
                linger=settings.linger,
                labels_on=settings.labels_on,
            ),
            errors,
            health=self._health,
            announcement=self._announcement,
            web_config=checked.web_config,
            push=checked.push,
            journal=self._journal,
            view=self.view,
        )
        self.at_end(functools.partial(self._close_outputs, outputs, automatic=settings.linger == "auto"))

    def _close_outputs(self, outputs: Outputs, *, automatic: bool) -> None:
        ending = self._ending
        outputs.close(failed=ending.error is not None, hurried=ending.hurried or (automatic and ending.no_time))

    def _start_background(self) -> None:
        """Start the threads of actions, of the history and of the worker."""
        ending, errors = self._ending, self.errors
        self.at_end(lambda: self._acting.close(hurried=ending.hurried))
        self._acting.start()
        if (black_box := self._black_box) is not None:
            # It ends after the history, which judges for the last time.
            self.at_end(lambda: black_box.close(hurried=ending.hurried))
            errors.boundary("black_box", limit=None)(black_box.start)
        self.at_end(lambda: self.view.close(ending.error))
        errors.boundary("history", limit=None)(self.view.start)
        if (replicas := self._replicas) is not None:
            self.at_end(lambda: replicas.close(STORE_SECONDS))
            errors.boundary("replicas", limit=None)(replicas.start)
        if self._state is not None:
            self.at_end(self._state.close)
            errors.boundary("state", limit=None)(self._state.start)
        self.at_end(self._worker.close)
        # Without its thread, scrapes drain the mailbox.
        errors.boundary("worker", limit=None)(self._worker.start)

    def _start_capture(self, models: Mapping[str, torch.nn.Module], checked: Checked) -> None:
        """Watch the training: set the hooks."""
        ending = self._ending
        if REGISTRY.reads_devices(checked.settings.enabled_collectors):
            # So their counters are there before the first step.
            self.errors.boundary("devices", limit=None)(self._capturing.memory.refresh_now)
        self.at_end(lambda: self.capture.close(failed=ending.error is not None))
        self.at_end(lambda: self.capture.steps.close(failed=ending.error is not None))
        self.at_end(self._capturing.hooks.close)
        self.at_end(self._capturing.compile_events.close)
        self.errors.boundary("timing", limit=None)(self._capturing.compile_events.attach)
        self.capture.watch(models.values())
        self.at_end(self._watching.close)
        if self.clip is not None:
            self.at_end(self.clip.close)
            # After the capture, which reads gradients before they are clipped.
            self.clip.start()

    def resume(self, step: int) -> None:
        """Take this step as the last one of the training so far; see `Exporter.resume`."""
        self.clock.resume(step)
        if self._state is not None:
            self._state.resumed(step)

    def at_end(self, action: Callable[[], object]) -> None:
        """Let `close` call this before all that was added until now; a failure is counted."""
        self._closing.callback(self._guard, action)

    def close(self) -> None:
        """Give back what `start` took, in the order of the data.

        What is raised in the middle, as by Ctrl-C, is raised at the end.
        """
        self._closing.close()

    def abort(self) -> None:
        """End a start that failed: its run has no last values."""
        if self._instruments is not None:
            self._instruments.drop()
        if self._ending.close():
            self.close()

    def after_fork_in_child(self) -> None:
        """Free the port, and serve and watch nothing: the forked child is another process."""
        if self._instruments is not None:
            self._instruments.drop()
        stages: tuple[_Forked | None, ...] = (
            self.outputs, self._store, self._worker, self._acting, self.clip, self.scrape,
        )  # fmt: skip
        for stage in stages:
            if stage is not None:
                stage.after_fork_in_child()
        self._watching.close()
        self._capturing.hooks.disconnect()
        self._capturing.compile_events.close()
        self.capture.counted.release()

    def watch(self, name: str, tensor: torch.Tensor, max_norm: float | None) -> torch.Tensor:
        """Measure the gradient of a tensor; see `Exporter.watch`."""
        return self._watching.watch(name, tensor, max_norm)

    def _release_parameters(self) -> None:
        # The garbage collector calls this, so nothing may be raised.
        self._guard(self.capture.release)
        self._guard(self.capture.counted.release)

    def _health(self) -> dict[str, object]:
        return {
            "status": "ok",
            "run": self._run,
            "rank": self._rank,
            "version": __version__,
            "capture_mode": self.capture.detection.mode.value,
            "sampling_interval_steps": self._capturing.schedule.shown_interval,
            "sampling_interval_at_cap": self._capturing.schedule.capped,
            "errors": sum(self.errors.counts().values()),
        }
