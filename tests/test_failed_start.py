"""A start that raises leaves nothing open, whichever part of it raised."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import torch
import torch.distributed as dist
from opentelemetry.metrics import NoOpMeterProvider

from tests.support.models import Perceptron
from tests.support.programs import Starter
from tests.support.tools import eventually, lasting_threads
from tests.support.torch_hooks import all_hooks
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import MaxNorm


class FailingProvider(NoOpMeterProvider):
    def get_meter(self, *_arguments: Any, **_named: Any) -> Any:  # noqa: ANN401 - never returns
        """Fail as a provider that is shut down may."""
        raise OSError("no meter")


def sockets() -> set[str]:
    """Return the sockets that this process has open."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(descriptor.readlink()))
        except FileNotFoundError:  # of the listing itself
            continue
    return {name for name in found if name.startswith("socket:")}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process the first of two ranks, with a store in which they agree on a name."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, text in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    yield
    del store


@pytest.fixture
def model() -> Iterator[torch.nn.Module]:
    """Return a model, and check that at the end nothing is left of the starts on it."""
    gc.collect()
    model, threads, before = Perceptron(), lasting_threads(), sockets()
    hooks = len(all_hooks(model))
    yield model
    assert len(all_hooks(model)) == hooks
    assert eventually(lambda: lasting_threads() == threads)
    # The store's host ends its side of a connection a little later.
    assert eventually(lambda: len(sockets()) <= len(before))


@pytest.mark.usefixtures("job")
def test_a_wrong_option_closes_the_job_store(model: torch.nn.Module) -> None:
    """An option that does not fit raises in a job, too, before the store is connected or with it closed."""
    with pytest.raises(ValueError, match="duplicate policy"):
        start_exporter(model, None, dry_run=[MaxNorm(1.0), MaxNorm(1.0)])


@pytest.mark.usefixtures("job")
def test_a_refusing_registry_closes_the_job_store(model: torch.nn.Module) -> None:
    """A registry that has the metrics already raises late in the start; the store that is connected then is closed."""
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("torch_grad_norm", "somebody else's", registry=registry)
    with pytest.raises(ValueError, match="torch_grad_norm"):
        start_exporter(model, 0, addr="127.0.0.1", registry=registry)


def test_a_failing_provider_frees_the_registry(model: torch.nn.Module, tmp_path: Path) -> None:
    """After a start that a MeterProvider failed, the registry takes the metrics of the next one."""
    registry = prometheus_client.CollectorRegistry()
    options: dict[str, Any] = {"addr": "127.0.0.1", "registry": registry, "textfile_dir": tmp_path}
    with pytest.raises(OSError, match="no meter"):
        start_exporter(model, 0, meter_provider=FailingProvider(), **options)
    assert list(tmp_path.iterdir()) == []
    with start_exporter(model, 0, **options) as exporter:
        assert exporter.port is not None
        assert "torch_train_info" in {family.name for family in registry.collect()}


def test_a_failed_start_of_a_model_that_is_freed() -> None:
    """A failed start holds neither the model nor its parameters."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(OSError, match="no meter"):
        start_exporter(model, None, optimizers=optimizer, meter_provider=FailingProvider())
    parameter = weakref.ref(model.first.weight)
    del model, optimizer
    gc.collect()
    assert parameter() is None


INTERRUPTED = """
import logging, os, threading
import torch
from torch_grad_exporter import start_exporter

class Interrupting(logging.Handler):
    def emit(self, record):
        raise KeyboardInterrupt

logging.getLogger("torch_grad_exporter").addHandler(Interrupting())
try:
    start_exporter(torch.nn.Linear(2, 2), 0)
except KeyboardInterrupt:
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    links = [os.readlink(path) for path in paths if os.path.exists(path)]
    print([one.name for one in threading.enumerate()], [link for link in links if link.startswith("socket:")])
"""


@pytest.mark.process
def test_an_interrupted_start_closes_the_server(starter: Starter) -> None:
    """Ctrl-C right after the port was opened leaves neither the port nor a thread."""
    ended = starter.start(INTERRUPTED)
    assert (ended.wait(), ended.out.read_text()) == (0, "['MainThread'] []\n")
