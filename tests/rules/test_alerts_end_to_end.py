"""A fault in real training reaches the pager through the shipped rules, a real Prometheus and a real Alertmanager.

Two dozen runs train normally, and nothing may fire; then the faults begin. Durations are a sixtieth of the shipped ones; thresholds
are the shipped ones.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import prometheus_client
import pytest
import torch
import torch.nn.functional as F

from tests.support.faulty import PACE, Fault, Run, Training
from tests.support.hastened import PUSH_SECONDS, SHORTEST_FOR, hastened
from tests.support.nine_runs import slowly
from tests.support.real_alertmanager import Alertmanager, Webhook, alertmanager, shortened, webhook
from tests.support.real_prometheus import Prometheus, running
from tests.support.real_victoria import flushing, victoria
from tests.support.tools import PATIENCE, REPOSITORY, eventually, machine_of_its_own
from torch_grad_exporter.config.option import UNSET

pytestmark = [pytest.mark.timeout(1200), pytest.mark.full, pytest.mark.server]

RULES = sorted((REPOSITORY / "dashboards" / "prometheus").glob("*.yml"))
SCRAPE = EVALUATION = 1.0
"""Seconds between two scrapes, and between two evaluations of the rules."""

CONFIGURATION = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{rules}/*.rules.yml, {rules}/*.alerts.yml]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ["{alertmanager}"]}}]}}]}}
scrape_configs:
  - job_name: training
    honor_labels: true
    file_sd_configs: [{{files: ["{folder}/*.json"], refresh_interval: 1s}}]
  - job_name: store
    honor_labels: true
    metrics_path: /federate
    params: {{"match[]": ['{{__name__!=""}}']}}
    static_configs: [{{targets: ["{store}"]}}]
    metric_relabel_configs:
      - {{source_labels: [service_name], target_label: job}}
      - {{source_labels: [service_instance_id], target_label: instance}}
      - {{regex: (service|host|process)_.*, action: labeldrop}}
"""
"""Debian's Prometheus does not accept OTLP: VictoriaMetrics forwards it, with `job` and `instance` like in Prometheus."""


# Faults: each replaces a step.


def plain(training: Training) -> None:
    """Train without a fault."""
    training.step()


def evaluating(training: Training) -> None:
    """Evaluate without steps, which is not a fault."""
    training.model.eval()
    with torch.no_grad():
        training.wrapped(torch.randn(8, 16))
    time.sleep(PACE)


def finishing(training: Training) -> None:
    """Finish, which is not a fault."""
    raise SystemExit


def failing(training: Training) -> None:
    """Fail with an exception."""
    raise RuntimeError


def sleeping(training: Training) -> None:
    """Hang."""
    time.sleep(600)


def nan_gradient(training: Training) -> None:
    """Step on a NaN gradient of a layer."""
    training.layer("first").weight.register_hook(lambda gradient: gradient * torch.nan)
    while True:
        training.step()


def nan_loss(training: Training) -> None:
    """Observe a NaN loss."""
    training.step(loss=float("nan"))


def loss_spikes(training: Training) -> None:
    """Observe a loss that spikes in every eighth step."""
    training.step(loss=1e3 if training.steps % 8 == 0 else None)


def exploding(training: Training) -> None:
    """Scale the gradients by 10,000 in every eighth step, and undo it before the step."""
    scale = 1e4 if training.steps % 8 == 0 else 1.0

    def cut() -> None:
        for parameter in training.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale

    training.step(scale=scale, spoil=cut)


def vanishing(training: Training) -> None:
    """Scale the gradient of the first layer by 1e-12."""
    for parameter in training.layer("first").parameters():
        parameter.register_hook(lambda gradient: gradient * 1e-12)
    while True:
        training.step()


def dead(training: Training) -> None:
    """Kill all units of the first layer."""
    with torch.no_grad():
        training.layer("first").bias.fill_(-1e4)
    while True:
        training.step()


def without_gradient(training: Training) -> None:
    """Detach a bias from the loss."""
    third = training.layer("third")
    third.forward = lambda x: F.linear(x, third.weight, third.bias.detach())  # type: ignore[method-assign]
    while True:
        training.step()


def not_updating(training: Training) -> None:
    """Give the last layer a parameter group with learning rate 0."""
    still = list(training.layer("third").parameters())
    (group,) = training.optimizer.param_groups
    group["params"] = [parameter for parameter in group["params"] if all(parameter is not one for one in still)]
    training.optimizer.add_param_group({"params": still, "lr": 0.0})
    while True:
        training.step()


def starving(training: Training) -> None:
    """Delay the batches."""
    training.late = 0.3
    training.step()


def slow(training: Training) -> None:
    """Make steps four times as long."""
    time.sleep(3 * PACE)
    training.step()


def one_is_slow(training: Training) -> None:
    """Delay the batches of one rank, for which the other waits."""
    training.late = 0.5 * training.rank
    training.step()


def one_stops(training: Training) -> None:
    """Hang on one rank while the other continues."""
    (sleeping if training.rank else plain)(training)


def failing_collector(training: Training) -> None:
    """Break the collector of the process."""

    def broken(*_: object) -> None:
        raise OSError("no server there")

    prometheus_client.ProcessCollector.collect = broken  # type: ignore[method-assign, assignment]
    while True:
        training.step()


def losing_samples(training: Training, every: int = 3) -> None:
    """Break torch functions that only the exporter uses, in every third step."""

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **options: Any) -> Any:  # noqa: ANN401 - as torch has them
            if training.steps % every == 0:
                raise RuntimeError("out of memory")
            return function(*given, **options)

        return called

    for name in ("stack", "split", "from_numpy"):
        setattr(torch, name, failing(getattr(torch, name)))
    while True:
        training.step()


def blind(training: Training) -> None:
    """Lose every sample."""
    losing_samples(training, every=1)


def worsening(training: Training) -> None:
    """Make the hardware short of memory, hot, idle and faulty."""
    assert training.hardware is not None
    training.hardware.worsen()
    training.step()


def collapsing(training: Training) -> None:
    """Log a policy that collapses while its reward rises; the first evaluations are good ones."""
    logged = {"entropy": 0.01, "kl": 3.0, "frac_reward_zero_std": 1.0, "clip_ratio/region_mean": 0.5, "mismatch_kl/all/mean": 0.4}
    for step in itertools.count(1):
        training.step()
        training.exporter.log({**logged, "reward": float(step), "eval_reward": 0.5 if step < 20 else 0.3})


TWO = {"RANK": "0", "WORLD_SIZE": "2"}
PAGER, TEAM, NOBODY = "pager", "team", ""
"""The receivers. Alerts for dashboards only, and inhibited ones, notify nobody."""
BUDGET = {"every": "auto", "overhead_budget": 1e-6}


@dataclass(frozen=True, slots=True)
class Case:
    """A fault and its alerts with their receivers. `also`: further alerts that may follow."""

    fault: Fault
    told: dict[str, str]
    also: frozenset[str] = frozenset()
    killed: bool = False
    """Kill the process instead of the fault."""
    delay: float = 0.0
    """Seconds after the other faults."""


GPU = {
    "CudaMemoryNearLimit": NOBODY, "CudaAllocRetries": NOBODY, "CudaOutOfMemory": PAGER, "CudaMemoryFragmented": NOBODY,
    "GpuThrottled": TEAM, "GpuEccErrors": PAGER, "GpuUnderused": NOBODY, "HostMemoryPressure": TEAM,
}  # fmt: skip
RL = ("EntropyCollapse", "KlOutOfRange", "ZeroAdvantage", "RewardWithoutEval", "PolicyClipped", "TrainInferenceMismatch")
SLOWER = frozenset({"ThroughputRegression"})
PUSHED = {"sd_dir": UNSET, "otlp_interval": 1.0}
"""Options of a run that is not discovered, so not scraped."""

CASES = {
    "healthy": Case(Fault(plain), {}),
    "pair": Case(Fault(plain, ranks=2, together=True), {}),
    "evaluates": Case(Fault(evaluating), {}),
    "finishes": Case(Fault(finishing), {}),
    "finishes-slowly": Case(Fault(finishing, {"linger": PATIENCE}), {}),
    "nan-gradient": Case(Fault(nan_gradient), {"TrainingNonFiniteGradients": PAGER}, frozenset({"TrainingNonFiniteLoss"})),
    "nan-loss": Case(Fault(nan_loss), {"TrainingNonFiniteLoss": PAGER}),
    "loss-spikes": Case(Fault(loss_spikes), {"LossSpike": TEAM}),
    "collapsing": Case(Fault(collapsing), dict.fromkeys(RL, TEAM)),
    "exploding": Case(Fault(exploding), {"GradientExploding": TEAM}),
    "vanishing": Case(Fault(vanishing), {"GradientVanishing": TEAM}),
    "dead": Case(Fault(dead), {"LayerDead": TEAM}, frozenset({"GradientVanishing"})),
    "cut-off": Case(Fault(without_gradient), {"LayerWithoutGradient": TEAM}),
    "still": Case(Fault(not_updating, {"weights": True}), {"LayerNotUpdating": TEAM}),
    "stalled": Case(Fault(sleeping), {"TrainingStalled": PAGER}, SLOWER),
    "never-started": Case(Fault(sleeping, late=True), {"TrainingNeverStarted": TEAM}),
    "fails": Case(Fault(failing, {"linger": PATIENCE}), {"TrainingFailed": PAGER}, frozenset({"TrainingTargetDown"})),
    "killed": Case(Fault(plain), {"TrainingTargetDown": PAGER}, killed=True),
    "pushed": Case(Fault(plain, PUSHED), {"TrainingPushStopped": PAGER}, SLOWER | {"TrainingStalled"}, killed=True),
    "one-missing": Case(Fault(plain, environment=TWO, late=True), {"TrainingRankMissing": TEAM}),
    "starving": Case(Fault(starving), {"DataLoaderStarvation": PAGER}, SLOWER),
    "slower": Case(Fault(slow), {"ThroughputRegression": TEAM}, delay=65.0),
    "straggler": Case(Fault(one_is_slow, ranks=2, together=True), {"StragglerRank": TEAM}, SLOWER | {"DataLoaderStarvation"}),
    "one-stops": Case(Fault(one_stops, ranks=2), {"RankDesync": TEAM}, SLOWER),
    "hardware": Case(Fault(worsening, hardware=True), GPU),
    "collector": Case(Fault(failing_collector), {"ExporterCollectorFailing": TEAM}),
    "budget": Case(Fault(plain, BUDGET, late=True), {"ExporterOverBudget": TEAM}, frozenset({"ExporterBlind"})),
    "blind": Case(Fault(blind), {"ExporterBlind": TEAM}, frozenset({"ExporterSkippingSamples"})),
    "loses-samples": Case(Fault(losing_samples), {"ExporterSkippingSamples": TEAM}),
    "folded": Case(Fault(plain, {"max_layers": 1}, late=True), {"ExporterFoldedLayers": NOBODY}),
}

ENDING = {"fails", "killed", "pushed", "finishes", "finishes-slowly"}
"""Runs that end with their fault."""

NOT_HERE = {
    "LossNotImproving": "takes two windows of 6 hours, 12 minutes here; its unit tests have to do",
    "GoodputLow": "takes an hour of a training that loses half of its time; its unit tests have to do",
    "RecomputingAfterRestarts": "takes two lives of a run with a state; its unit tests have to do",
    "ModelsOutOfBalance": "takes a baseline of two hours, 2 minutes here, of two models; its unit tests have to do",
    "SpikeAhead": "needs a thousand steps of Adam, which test_spike_ahead.py has",
    "AttentionLogitsGrowing": "needs attention and some hundred steps, which test_attention_logits_growing.py has",
    "UpdatesLost": "needs a training in bf16, which test_updates_lost.py has",
    "ReplicasDiffer": "needs copies that differ, which tests/inspection/test_replicas.py has",
    **dict.fromkeys(("ExpertCollapse", "RouterImbalance"), "needs a mixture of experts, which test_expert_collapse.py has"),
    "TrainingRestarting": "takes four lives of a run; its unit tests have to do",
    **dict.fromkeys(
        ("ActionFailing", "GradientClippingFailing", "NotificationsFailing", "TrainingStoppedItself"),
        "needs what the user asks for; its unit tests, and the panels of test_nine_runs.py, have to do",
    ),
}


EVALUATED = """
      - record: test_evaluated
        expr: vector(1)
        labels: {{file: {file}}}
"""
"""A rule that records when the rules of its file were evaluated."""


@dataclass(slots=True)
class Servers:
    """The servers, and the start of each fault."""

    prometheus: Prometheus
    alertmanager: Alertmanager
    webhook: Webhook
    began: dict[str, float]
    """By run, the Unix time at which its fault began; for runs of `SOON`, after its first step."""

    def active(self) -> set[tuple[str, str]]:
        """Return run and name of the alerts that fire in Prometheus."""
        found = self.prometheus.query('ALERTS{alertstate="firing"}')
        return {(labels.get("run", ""), labels["alertname"]) for labels, _ in found}

    def has_gaps(self, run: str) -> bool:
        """Return whether a scrape of the run failed, as on a busy machine; then no alert is expected to be silent."""
        until = self.began[run] if run in ENDING else math.inf
        return any(at < until and not up for at, up in self.prometheus.recorded(f'up{{run="{run}"}}', 0.0))

    def known(self) -> dict[tuple[str, str], float]:
        """Return run and name of the alerts in Alertmanager, each with the Unix time of its first onset."""
        found: dict[tuple[str, str], float] = {}
        for alert in self.alertmanager.alerts():
            key = alert["labels"].get("run", ""), alert["labels"]["alertname"]
            start = datetime.fromisoformat(alert["startsAt"]).timestamp()
            found[key] = min(start, found.get(key, start))
        return found


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Start the servers and all runs, and wait until the faults have begun."""
    directory = tmp_path_factory.mktemp("alerts")
    folder, rules = directory / "sd", directory / "rules"
    for each in (folder, rules):
        each.mkdir()
    for file in RULES:
        if file.name.endswith((".rules.yml", ".alerts.yml")):
            (rules / file.name).write_text(hastened(file.read_text()) + EVALUATED.format(file=file.name))
    with contextlib.ExitStack() as stack:
        stack.enter_context(machine_of_its_own())
        hook = stack.enter_context(webhook())
        manager = stack.enter_context(alertmanager(directory, shortened(directory, hook)))
        store = stack.enter_context(victoria(directory / "store", "-opentelemetry.usePrometheusNaming"))
        stack.enter_context(flushing(store, SCRAPE / 4))
        where = urlsplit(store.endpoint).netloc
        text = CONFIGURATION.format(rules=rules, alertmanager=manager.address, folder=folder, store=where)
        started = Servers(stack.enter_context(running(directory, text)), manager, hook, {})
        _go_wrong(started, folder, store.endpoint, stack)
        yield started


def _go_wrong(servers: Servers, folder: Path, endpoint: str, stack: contextlib.ExitStack) -> None:
    """Start all runs, check that no alert fires, and begin the faults."""
    pushing = {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": endpoint}

    def start(name: str) -> Run:
        fault = CASES[name].fault
        run = Run(name, replace(fault, environment=pushing) if fault.options == PUSHED else fault, folder)
        stack.callback(run.kill)
        return run

    runs = {name: start(name) for name, case in CASES.items() if not case.fault.late}
    for run in runs.values():
        run.warm()
    processes = sum(run.fault.ranks for run in runs.values())
    there = 'count(count by (run, rank) (torch_train_state{state="training"} == 1))'
    assert later(lambda: servers.prometheus.value(there) == processes)
    time.sleep(3 * SCRAPE)  # for alerts without `for`
    assert servers.active() == set()
    runs |= {name: start(name) for name, case in CASES.items() if case.fault.late}
    first = time.time()
    for name, run in sorted(runs.items(), key=lambda one: CASES[one[0]].delay):
        time.sleep(max(0.0, first + CASES[name].delay - time.time()))
        if CASES[name].killed:
            run.kill()
        servers.began[name] = time.time() if CASES[name].killed else run.begin()
    for name in {name for name, _ in SOON if not CASES[name].killed}:
        servers.began[name] = runs[name].stepped()


def later(condition: Callable[[], bool]) -> bool:
    """Wait for a condition that is expensive to read."""
    return eventually(slowly(condition), 3 * PATIENCE)


ALERTS = [(name, alert) for name, case in CASES.items() for alert in case.told]


@pytest.mark.parametrize(("run", "alert"), ALERTS, ids=str)
def test_a_fault_reaches_its_receiver(servers: Servers, run: str, alert: str) -> None:
    """Each alert of a fault reaches its receiver once per run, or is known without notifying anyone."""
    receiver = CASES[run].told[alert]
    if receiver == NOBODY:
        assert later(lambda: (run, alert) in servers.known())
        assert servers.has_gaps(run) or not any(told[1:] == (alert, run) for told in servers.webhook.firing())
    else:
        assert later(lambda: (receiver, alert, run) in servers.webhook.firing())


SOON = {
    ("nan-gradient", "TrainingNonFiniteGradients"): 0,
    ("nan-loss", "TrainingNonFiniteLoss"): 0,
    ("hardware", "CudaAllocRetries"): 0,
    ("hardware", "CudaOutOfMemory"): 0,
    ("hardware", "GpuEccErrors"): 0,
    ("collector", "ExporterCollectorFailing"): SHORTEST_FOR,
    ("killed", "TrainingTargetDown"): SHORTEST_FOR,
    ("pushed", "TrainingPushStopped"): PUSH_SECONDS + SHORTEST_FOR,
    ("cut-off", "LayerWithoutGradient"): 15,
}
"""Faults without a statistic or window to fill, and the seconds of their `for`."""


@pytest.mark.parametrize(("run", "alert"), SOON, ids=str)
def test_a_fault_is_reported_in_time(servers: Servers, run: str, alert: str) -> None:
    """An alert fires after two successful scrapes, its `for`, and one of the next three evaluations of its file."""
    began, store = servers.began[run], servers.prometheus
    firing = f'ALERTS{{run="{run}",alertname="{alert}",alertstate="firing"}}'
    assert later(lambda: store.recorded(firing, began) != [])
    (fired, _), *_ = store.recorded(firing, began)
    job = '{job="store"}' if CASES[run].fault.options == PUSHED else f'{{run="{run}"}}'
    scrapes = store.recorded(f"up{job}", began)
    gaps = [at for at, up in scrapes if at < fired and not up and not CASES[run].killed]
    seen = [at for at, _ in scrapes if at > max([began, *gaps])]
    (file,) = [file.name for file in RULES if f"- alert: {alert}\n" in file.read_text()]
    evaluated = [at for at, _ in store.recorded(f'test_evaluated{{file="{file}"}}', seen[1] + SOON[run, alert])]
    assert fired <= evaluated[2], (began, scrapes, evaluated, fired)


def test_nothing_else_is_reported(servers: Servers) -> None:
    """Healthy, evaluating and finished runs are silent, and no fault fires an alert of another one."""
    expected = {(run, alert) for run, alert in ALERTS} | {(run, alert) for run, case in CASES.items() for alert in case.also}
    told = {(run, alert) for _, alert, run in servers.webhook.firing()}
    gaps = {run for run in CASES if servers.has_gaps(run)}
    if gaps == set(CASES):
        pytest.skip("every run was missed by a scrape: this machine is too busy")
    known = {key: start - min(servers.began.values()) for key, start in servers.known().items()}
    wrong = {key: known.get(key) for key in known.keys() | told if key not in expected and key[0] not in gaps}
    assert not wrong


def test_every_alert_was_seen() -> None:
    """All shipped alerts were seen, except those with a reason."""
    shipped = {name for file in RULES for name in re.findall(r"^\s*- alert: (\w+)", file.read_text(), re.MULTILINE)}
    assert {alert for _, alert in ALERTS} == shipped - set(NOT_HERE)
