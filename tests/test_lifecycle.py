"""An exporter's life beside a training: it ends cleanly, holds nothing, leaves the model ordinary and never hurts."""

from __future__ import annotations

import gc
import gzip
import logging
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator

import prometheus_client
import pytest
import torch
import torch.distributed as dist
from torch.optim import optimizer as torch_optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.models import Perceptron, batch
from tests.support.scrape import errors, key, value, values
from tests.support.tools import PATIENCE, eventually, lasting_threads
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.aggregation import worker
from torch_grad_exporter.collectors.scrape import Scrape

STEPS = "torch_train_steps_total"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def threads_of_ours() -> set[threading.Thread]:
    """The exporters' threads that run now."""
    return {t for t in threading.enumerate() if "torch-grad-exporter" in t.name}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Every test ends without a thread or a global hook of ours."""
    threads, hooks = threads_of_ours(), set(torch_optimizer._global_optimizer_pre_hooks)
    yield
    gc.collect()
    assert threads_of_ours() - threads == set()
    assert set(torch_optimizer._global_optimizer_pre_hooks) - hooks == set()


def start(model: torch.nn.Module, port: int | None = None, **options: object) -> Exporter:
    """An exporter that samples every round and by itself serves nothing."""
    return start_exporter(model, port, **{"every": 1, "addr": "127.0.0.1", **options})


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    """The plainest optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def by_root(model: Perceptron, x: torch.Tensor) -> None:
    """A backward that rung `output` sees."""
    model(x).square().mean().backward()


def by_parts(model: Perceptron, x: torch.Tensor) -> None:
    """A backward that rung `parameter` sees."""
    model.second(model.first(x).relu()).square().mean().backward()


def by_hand(model: Perceptron, x: torch.Tensor) -> None:
    """Gradients that only rung `optimizer` sees."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(x).square().mean(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


RUNGS: dict[str, Callable[[Perceptron, torch.Tensor], None]] = {"output": by_root, "parameter": by_parts, "optimizer": by_hand}


def train(
    model: Perceptron, steps: int = 1, backward: Callable[[Perceptron, torch.Tensor], None] = by_root
) -> torch.optim.Optimizer:
    """Plain steps; returns their optimizer."""
    optimizer = sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model, batch())
        optimizer.step()
    return optimizer


def hooks_of(model: torch.nn.Module) -> list[object]:
    """Every hook on the modules, and on the parameters and their AccumulateGrad nodes."""
    found: list[object] = []
    for module in model.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found += getattr(module, name).values()
        found += [*module._forward_hooks_with_kwargs, *module._forward_pre_hooks_with_kwargs, *module._forward_hooks_always_called]
    for parameter in model.parameters():
        found += (parameter._post_accumulate_grad_hooks or {}).values()
        found += (parameter._backward_hooks or {}).values()
    return found


def scrape(url: str) -> str:
    """The body of a scrape."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=PATIENCE) as response:
        return response.read().decode()


def can_bind(port: int) -> bool:
    """Whether the port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


# The end


def test_close_is_idempotent() -> None:
    """`close()` may be called as often as one likes, also after the `with` that did it, and nothing raises after it."""
    model = Perceptron()
    with start(model, 0) as exporter:
        train(model)
        exporter.close()
        exporter.close()
    exporter.close()
    exporter.observe(loss=1.0)
    exporter.step()
    exporter.step(5)
    assert list(exporter.watch_loader([1, 2])) == [1, 2]
    assert value(exporter, "torch_train_loss") is None
    assert value(exporter, STEPS, optimizer="SGD") == 1


def test_close_from_another_thread_while_training() -> None:
    """Another thread may close in the middle of training, again and again, and the training sees nothing of it."""
    model = Perceptron()
    optimizer = sgd(model)
    failures: list[BaseException] = []
    for _ in range(15):
        exporter = start(model, moments=True, weights=True)
        begun, ended = threading.Event(), threading.Event()

        def close(exporter: Exporter = exporter, begun: threading.Event = begun, ended: threading.Event = ended) -> None:
            begun.wait(PATIENCE)
            try:
                exporter.close()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test reports it
                failures.append(error)
            ended.set()

        thread = threading.Thread(target=close)
        thread.start()
        steps = 0
        while not ended.is_set() or steps < 3:
            optimizer.zero_grad()
            by_root(model, batch())
            optimizer.step()
            begun.set()
            steps += 1
        thread.join()
        assert errors(exporter) == {}
        assert hooks_of(model) == []
    assert failures == []


@pytest.mark.parametrize("rung", ["output", "parameter"])
def test_close_within_a_backward(rung: str) -> None:
    """A tensor hook of the user's may close the exporter in the middle of the backward that it is capturing."""
    model = Perceptron()
    exporter = start(model)
    train(model, 6, RUNGS[rung])
    optimizer = sgd(model)
    handle = model.first.weight.register_hook(lambda _gradient: exporter.close())
    optimizer.zero_grad()
    RUNGS[rung](model, batch())
    optimizer.step()
    handle.remove()
    assert model.first.weight.grad is not None
    assert hooks_of(model) == []
    assert errors(exporter) == {}


def test_close_within_the_loop() -> None:
    """Between backward and step is as good a place to close as any: what was captured is handed over."""
    model = Perceptron()
    optimizer = sgd(model)
    exporter = start(model)
    by_root(model, batch())
    exporter.close()
    optimizer.step()
    by_root(model, batch())
    assert value(exporter, "torch_grad_captures_total", layer="first") == 1
    assert errors(exporter) == {}


def test_starting_again_replaces() -> None:
    """A second start on the same model, as in a notebook, closes the first, and its port can be taken over."""
    model = Perceptron()
    first = start(model, 0)
    train(model, 2)
    port = first.port
    second = start(model, port)
    try:
        assert second.port == port
        assert (first.port, first.url) == (None, None)
        train(model, 3)
        assert value(second, STEPS, optimizer="SGD") == 3
        assert value(first, STEPS, optimizer="SGD") == 2
        assert len(hooks_of(model)) == 4  # two hooks, and two marks that they take keyword arguments
    finally:
        second.close()
    assert hooks_of(model) == []


def test_starting_again_without_keeping_the_first() -> None:
    """A first exporter whose result was not kept is replaced all the same."""
    model = Perceptron()
    start(model)
    gc.collect()
    second = start(model)
    hooks = len([h for h in hooks_of(model) if callable(h)])
    second.close()
    assert hooks == 2
    assert hooks_of(model) == []


def test_two_exporters_on_two_models() -> None:
    """Two exporters on two models that share nothing each see their own optimizer and backwards only."""
    one, two = Perceptron(), Perceptron()
    with start(one, 0) as of_one, start(two, 0) as of_two:
        assert of_one.port != of_two.port
        train(one, 2)
        train(two, 3)
        for exporter, steps in ((of_one, 2), (of_two, 3)):
            shown = values(exporter)
            assert {k: v for k, v in shown.items() if k[0] == STEPS} == {key(STEPS, optimizer="SGD"): steps}
            assert shown[key("torch_train_backward_passes_total")] == steps
            assert shown[key("torch_grad_captures_total", layer="first")] == steps
            assert errors(exporter) == {}


# Nothing is held


# The model stays ordinary


# Forks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_the_port_is_free_after_the_parent_died() -> None:
    """A forked child that outlives the parent neither holds the port nor answers there, and can train on its own."""
    script = """
        import os, sys, torch
        from torch_grad_exporter import start_exporter
        torch.set_num_threads(1)
        model = torch.nn.Linear(2, 2)
        exporter = start_exporter(model, 0, addr="127.0.0.1", every=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward(); optimizer.step()
        ready, done = os.pipe()
        child = os.fork()
        if child == 0:
            model(torch.ones(1, 2)).sum().backward(); optimizer.step()
            exporter.observe(loss=1.0)
            list(exporter.collect())
            exporter.close()
            os.write(done, b"x")
            sys.stdin.read()
            os._exit(0)
        os.read(ready, 1)
        print(exporter.port, child, flush=True)
        os._exit(1)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    line = process.stdout.readline().split()
    try:
        assert process.wait(PATIENCE) == 1
        assert len(line) == 2, process.stderr.read() if process.stderr else ""
        port, child = map(int, line)
        os.kill(child, 0)  # it lives
        assert can_bind(port)
        with pytest.raises(OSError, match=r"refused|reset|timed out"):
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
    finally:
        process.stdin.close()
        process.stdout.close()
        if process.stderr is not None:
            process.stderr.close()


# What goes wrong in us


def from_our_capture() -> bool:
    """Whether the exporter's own code is asking."""
    return any("torch_grad_exporter/" in frame.filename for frame in traceback.extract_stack()[:-2])


class Treacherous(torch.nn.Parameter):
    """A parameter whose `.grad` raises when the exporter looks at it, as often as `failures` says."""

    failures = 0

    @property  # type: ignore[override]
    def grad(self) -> torch.Tensor | None:
        if type(self).failures > 0 and from_our_capture():
            type(self).failures -= 1
            raise OSError("injected")
        return torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]

    @grad.setter
    def grad(self, given: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, given)  # type: ignore[attr-defined]

    @grad.deleter
    def grad(self) -> None:
        torch.Tensor.grad.__delete__(self)  # type: ignore[attr-defined]


def treacherous() -> Perceptron:
    """A model with such a parameter."""
    model = Perceptron()
    model.first.weight = Treacherous(model.first.weight.data)
    return model


def test_a_failure_of_ours_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A hook of ours that raises costs a sample, one line in the log and nothing else."""
    model = treacherous()
    before = model.first.weight.detach().clone()
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"), start(model) as exporter:
        Treacherous.failures = 3
        train(model, 8)
        assert Treacherous.failures == 0
        counted = errors(exporter)
        assert sum(counted.values()) == 3
        assert value(exporter, STEPS, optimizer="SGD") == 8
        assert (value(exporter, "torch_grad_captures_total", layer="first") or 0) >= 4
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == len(counted)
    assert not torch.equal(before, model.first.weight)


def test_a_hook_that_keeps_failing_switches_off(caplog: pytest.LogCaptureFixture) -> None:
    """A hook that fails every time stops being called after ten times, and says so; the training goes on."""
    model = treacherous()
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"), start(model) as exporter:
        Treacherous.failures = 10**9
        try:
            train(model, 40)
            count = sum(errors(exporter).values())
            train(model, 20)
            assert sum(errors(exporter).values()) == count
            assert 10 <= count <= 30  # ten for each of the hooks that met it
        finally:
            Treacherous.failures = 0
    assert any("switched off" in r.message for r in caplog.records)


def test_an_output_that_raises_is_our_failure_alone() -> None:
    """An output whose attribute `loss` raises does not raise into the model's forward."""

    class Output(dict[str, torch.Tensor]):
        @property
        def loss(self) -> torch.Tensor:
            raise OSError("injected")

        def get(self, *_arguments: object) -> object:
            raise OSError("injected")

    class Model(Perceptron):
        def forward(self, x: torch.Tensor) -> object:
            return Output(out=super().forward(x))

    model = Model()
    optimizer = sgd(model)
    with start(model) as exporter:
        for _ in range(3):
            optimizer.zero_grad()
            model(batch())["out"].square().mean().backward()
            optimizer.step()
        assert set(errors(exporter)) == {"forward_hook"}
        assert value(exporter, "torch_grad_captures_total", layer="first") == 3


def test_a_wrong_observation_is_our_failure_alone() -> None:
    """What `observe` cannot take is counted and does not raise; the values beside it arrive."""
    with start(Perceptron()) as exporter:
        exporter.observe(loss="abc", epoch=3)  # type: ignore[arg-type]
        exporter.observe(loss=None, tokens=5)
        exporter.observe(loss=0.5)
        shown = values(exporter)
        assert shown[key("torch_train_loss")] == 0.5
        assert shown[key("torch_train_epoch")] == 3
        assert shown[key("torch_train_tokens_total")] == 5


def test_an_empty_observation() -> None:
    """An empty tensor is no loss: it costs itself, and neither the scrapes nor the observations after it."""
    model = Perceptron()
    with start(model, 0) as exporter:
        exporter.observe(loss=torch.ones(0))
        train(model, 3)
        exporter.observe(loss=0.5)
        assert eventually(lambda: "torch_train_loss{" in scrape(exporter.url or ""))
        assert value(exporter, "torch_train_loss") == 0.5
        assert value(exporter, "torch_grad_captures_total", layer="first") == 3


def test_a_collector_that_fails_costs_only_itself() -> None:
    """A value that breaks one collector leaves the others in the scrape, and says so."""
    model = Perceptron()
    with start(model, 0) as exporter:
        train(model)
        broken = exporter._scrape._collectors["training"]
        broken._context = None  # type: ignore[attr-defined]  # whatever it may be that breaks one
        shown = values(exporter)
        assert shown[key("torch_grad_exporter_collector_success", collector="training")] == 0
        assert shown[key("torch_grad_exporter_collector_success", collector="gradients")] == 1
        assert shown[key("torch_grad_exporter_collector_success", collector="exporter")] == 1
        assert errors(exporter) == {} or set(errors(exporter)) == {"collector_training"}
        assert "torch_grad_norm{" in scrape(exporter.url or "")


def test_a_broken_registry_at_the_end() -> None:
    """A registry from which our collector was taken already does not keep `close()` from its work."""
    registry = prometheus_client.CollectorRegistry()
    model = Perceptron()
    exporter = start(model, 0, registry=registry)
    port = exporter.port
    for collector in list(registry._collector_to_names):
        registry.unregister(collector)
    exporter.close()
    assert hooks_of(model) == []
    assert can_bind(port or 0)
    assert errors(exporter) == {"close": 1}


def test_a_process_group_that_comes_late_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The exporter took this process for the only one; the first scrape after the group is there says so, and no other does."""
    with caplog.at_level(logging.WARNING, "torch_grad_exporter"), start(Perceptron(), None) as exporter:
        exporter.collect()
        told = [len(caplog.records)]
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        try:
            for _ in range(2):
                exporter.collect()
                told.append(sum("the process group came after the exporter" in record.getMessage() for record in caplog.records))
        finally:
            dist.destroy_process_group()
    assert told == [0, 1, 1]


def test_a_registry_that_refuses() -> None:
    """The start fails, with nothing left behind: neither a thread nor a hook, nor a port."""
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("torch_grad_norm", "somebody else's", registry=registry)
    before = lasting_threads()
    model = Perceptron()
    with pytest.raises(ValueError, match="torch_grad_norm"):
        start(model, 0, registry=registry, collectors={"whole_run": True})
    assert lasting_threads() == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_registry_shows_the_same_and_forgets() -> None:
    """The user's own registry shows our metrics until `close()`."""
    registry = prometheus_client.CollectorRegistry()
    model = Perceptron()
    with start(model, registry=registry, run="a", labels={"team": "b"}) as exporter:
        train(model, 3)
        labels = {"optimizer": "SGD", "run": "a", "rank": "0", "team": "b"}
        assert registry.get_sample_value(STEPS, labels) == value(exporter, STEPS, optimizer="SGD") == 3
    assert list(registry.collect()) == []


def test_registry_that_has_our_names_already_leaves_nothing() -> None:
    """A start that raises, here for a registry that has such metrics already, leaves no hook, thread or socket."""
    registry = prometheus_client.CollectorRegistry()
    one, two = Perceptron(), Perceptron()
    with start(one, registry=registry):
        threads = threads_of_ours()
        with pytest.raises(ValueError, match="torch_grad"):
            start(two, registry=registry)
        assert hooks_of(two) == []
        assert threads_of_ours() == threads


# Serving


def test_occupied_port(caplog: pytest.LogCaptureFixture) -> None:
    """A taken port is no error: the next one is used, and a warning says which."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING, "torch_grad_exporter"), start(Perceptron(), port) as exporter:
            assert exporter.port is not None
            assert port < exporter.port < port + 64
            assert "torch_train_info" in scrape(exporter.url or "")
            assert str(exporter.port) in caplog.text
            assert str(port) in caplog.text


@pytest.mark.parametrize(
    ("addr", "rank", "expected"),
    [("", 0, 1), ("0.0.0.0", 0, 1), ("::", 0, 1), ("127.0.0.1", 0, 0), ("::1", 0, 0), ("", 1, 0)],  # noqa: S104
)
def test_an_open_port_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, addr: str, rank: int, expected: int
) -> None:
    """One line says that all can read the metrics, if so: with the port, once in a process, on one rank of a host."""
    monkeypatch.setattr("torch_grad_exporter.outputs.outputs._warned", False)
    for name, number in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(number))
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_RUN", "two ranks")
    ports = []
    for _ in range(2):
        with start(Perceptron(), 0, addr=addr) as exporter:
            ports.append(exporter.port)
    lines = [record.getMessage() for record in caplog.records if "all who can reach" in record.getMessage()]
    assert len(lines) == expected
    assert all(f"torch_grad_exporter: all who can reach port {ports[0]} of this host" in line for line in lines)


def test_scraping_while_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many threads that scrape in all formats during the training lose no step, no sample and no answer."""
    # Within which one of so many may not have its turn on a busy machine.
    monkeypatch.setattr(worker, "WAIT_SECONDS", PATIENCE)
    monkeypatch.setattr(Scrape.__init__, "__defaults__", (time.perf_counter, PATIENCE))
    model = Perceptron()
    optimizer = sgd(model)
    failures: list[str] = []
    seen: list[list[float]] = []
    stop = threading.Event()
    steps = 120

    def hammer(url: str, accept: str) -> None:
        mine: list[float] = []
        seen.append(mine)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            last = stop.is_set()
            try:
                request = urllib.request.Request(url, headers={"Accept": accept, "Accept-Encoding": "gzip"})
                with opener.open(request, timeout=PATIENCE) as response:
                    body = response.read()
                    text = (gzip.decompress(body) if response.headers["Content-Encoding"] == "gzip" else body).decode()
                found = re.search(rf"^{STEPS}{{.*}} (\S+)$", text, re.MULTILINE)
                mine.append(float(found.group(1)) if found else 0.0)
            except Exception as error:  # noqa: BLE001 - whatever it is, the test reports it
                failures.append(repr(error))
            if last:
                return
            stop.wait(0.002)  # leaves the cores to the training between two scrapes

    def collect(exporter: Exporter) -> None:
        while not stop.wait(0.002):
            values(exporter)

    with start(model, 0) as exporter:
        url = exporter.url or ""
        threads = [
            threading.Thread(target=hammer, args=(url, accept))
            for accept in ("text/plain", "application/openmetrics-text; version=1.0.0", "*/*")
        ]
        threads += [threading.Thread(target=collect, args=(exporter,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for step in range(steps):
            optimizer.zero_grad()
            by_root(model, batch())
            optimizer.step()
            exporter.observe(loss=float(step), tokens=1)
        stop.set()
        for thread in threads:
            thread.join()
        shown = values(exporter)
        assert failures == []
        assert all(a == sorted(a) for a in seen)
        assert shown[key(STEPS, optimizer="SGD")] == steps
        assert shown[key("torch_grad_captures_total", layer="first")] == steps
        assert shown[key("torch_grad_norm_distribution_count", layer="second")] == steps
        assert shown[key("torch_grad_exporter_captures_total")] == steps
        assert shown[key("torch_train_tokens_total")] == steps
        assert shown[key("torch_train_step_duration_seconds_count")] == steps - 1
        assert errors(exporter) == {}


def test_a_value_arrives_while_the_loop_stands_still() -> None:
    """The last step before a hang is on `/metrics` within seconds."""
    model = Perceptron()
    with start(model, 0) as exporter:
        train(model, 5)
        assert eventually(lambda: re.search(rf"^{STEPS}{{.*}} 5(\.0)?$", scrape(exporter.url or ""), re.MULTILINE) is not None)
        assert re.search(r"^torch_grad_captures_total{.*first.*} 5(\.0)?$", scrape(exporter.url or ""), re.MULTILINE)


def test_starting_again_after_the_model_is_gone() -> None:
    """A notebook cell that makes its model anew as well gets the same port again, and nothing of the first is left."""

    def cell(port: int) -> Exporter:
        return start(Perceptron(), port)

    first = cell(0)
    port = first.port
    assert port is not None
    gc.collect()
    before = lasting_threads()
    with cell(port) as second:
        assert second.port == port
        assert first.port is None
        assert eventually(lambda: lasting_threads() == before)
