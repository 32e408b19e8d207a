"""A few values as observable instruments of a `MeterProvider` of the user's: global ones, progress and resources.

No metric by layer is among them: OpenTelemetry's SDKs fold more than 2000 sets of attributes. A provider keeps an instrument
permanently, so there is one of each name per provider, for all exporters. The last values of an exporter that has ended are shown
once more: a provider whose readers collect every minute, or only at its end, has no other values of a short run.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

from torch_grad_exporter.collectors import clipping, cuda_memory, exporter, gpu, gradients, host, process, training
from torch_grad_exporter.collectors.scrape import Scrape
from torch_grad_exporter.errors import ErrorLog
from torch_grad_exporter.metrics.families import Family, Kind, Spec, by_spec
from torch_grad_exporter.outputs.otlp.points import SCOPE, UNITS
from torch_grad_exporter.outputs.prometheus import series

# The metrics of the instruments, under the names that they have everywhere.
SPECS = (
    gradients.GRAD_GLOBAL_NORM, clipping.GRAD_GLOBAL_NORM_AFTER_CLIP, clipping.GRAD_CLIP_COEFFICIENT,
    gradients.GRAD_NONFINITE_STEPS, clipping.GRAD_CLIPPED_STEPS,
    training.TRAIN_STATE, training.TRAIN_STEPS, training.TRAIN_SKIPPED_STEPS, training.TRAIN_SAMPLES, training.TRAIN_TOKENS,
    training.TRAIN_LOSS, training.TRAIN_EPOCH, training.TRAIN_LEARNING_RATE, training.TRAIN_SLOWEST_STEP,
    training.TRAIN_LAST_STEP_TIMESTAMP,
    cuda_memory.CUDA_MEMORY_ALLOCATED, cuda_memory.CUDA_MEMORY_RESERVED, gpu.GPU_UTILIZATION,
    process.PROCESS_RESIDENT_MEMORY, process.PROCESS_CPU_SECONDS, host.HOST_CPU, host.HOST_MEMORY_AVAILABLE,
    exporter.EXPORTER_OVERHEAD_RATIO,
)  # fmt: skip

# Seconds for which all instruments show the values of one scrape, since one collection is to show one moment.
MAX_AGE = 1.0


_of_provider: WeakKeyDictionary[MeterProvider, list[Instruments]] = WeakKeyDictionary()

# Reentrant: a signal's handler may close while its own thread is in here.
_lock = threading.RLock()


class Instruments:
    """The values of one exporter in the instruments of `provider`, from now on until `close`. `labels`: of every value.

    After that each instrument shows the last values once for each reader, and then they are gone.
    """

    def __init__(self, provider: MeterProvider, scrape: Scrape, labels: Mapping[str, str], errors: ErrorLog) -> None:
        self._scrape, self._labels, self._who = scrape, dict(labels), (labels["run"], labels["rank"])
        self._left: dict[Spec, list[list[Observation]]] | None = None
        self._process = os.getpid()
        self._guard = errors.boundary("request", limit=None)
        self._scraping = threading.Lock()
        self._families: dict[Spec, list[Family]] = {}
        self._scraped = -float("inf")
        self._provider = weakref.ref(provider)
        self._sources = _sources(provider)
        with _lock:
            # The next exporter of the same rank of the same run has newer values.
            self._sources[:] = [other for other in self._sources if other._left is None or other._who != self._who]
            self._sources.append(self)

    def observations(self, spec: Spec) -> list[Observation]:
        """Return the present values of one metric; never raises. A forked child reports no last values of its parent."""
        if self._left is None:
            return self._guard.result(lambda: self._of(self._latest(), spec)) or []
        if os.getpid() != self._process:
            return []
        with _lock:
            left = self._left.get(spec, [])
            shown = left.pop() if left else []
            if not any(self._left.values()):
                self.drop()
            return shown

    def close(self) -> None:
        """Leave the present values in the instruments, for each reader's next collection and no further one; idempotent."""
        if self not in self._sources or self._left is not None:
            return
        # For each reader for which the end of a provider collects, 1 if unknown: the interface does not show it.
        provider = self._provider()
        older = getattr(getattr(provider, "_sdk_config", None), "metric_readers", ())
        times = max(1, len(getattr(provider, "_metric_readers", older)))
        # Without our own lock: a signal's handler may have interrupted the code that holds it.
        families = by_spec(self._guard.result(self._scrape) or [])
        values = {spec: self._guard.result(self._of, families, spec) or [] for spec in SPECS}
        with _lock:
            self._left = {spec: [shown] * times for spec, shown in values.items() if shown}
            self._families = {}

    def drop(self) -> None:
        """Remove the values from the instruments at once, without a lock, since a forked child calls it; idempotent."""
        if self in self._sources:
            self._sources.remove(self)

    def _latest(self) -> dict[Spec, list[Family]]:
        with self._scraping:
            if time.monotonic() - self._scraped >= MAX_AGE:
                self._families = by_spec(self._scrape())
                self._scraped = time.monotonic()
            return self._families

    def _of(self, families: Mapping[Spec, Iterable[Family]], spec: Spec) -> list[Observation]:
        return [
            Observation(value, labels)
            for family in families.get(spec, ())
            for labels, (value,) in zip(series.labels(family, self._labels), series.table(family).tolist(), strict=True)
        ]


def _sources(provider: MeterProvider) -> list[Instruments]:
    """Return the exporters that this provider's instruments show; the instruments are made with the first."""
    with _lock:
        if provider not in _of_provider:
            sources = _of_provider[provider] = []
            meter = provider.get_meter(SCOPE.name, SCOPE.version)
            for spec in SPECS:
                make = meter.create_observable_counter if spec.kind is Kind.COUNTER else meter.create_observable_gauge
                callback = functools.partial(_observe, spec, sources)
                make(spec.name, callbacks=[callback], unit=UNITS.get(spec.unit, ""), description=spec.help)
        return _of_provider[provider]


def _observe(spec: Spec, sources: list[Instruments], _options: CallbackOptions) -> list[Observation]:
    """Return the values of an instrument at a collection."""
    return [observation for source in list(sources) for observation in source.observations(spec)]
