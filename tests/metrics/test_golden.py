"""The catalogue, its page and a real scrape agree."""

from __future__ import annotations

import math
import os
import pathlib
import re
import runpy
import subprocess
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.catalogue import CATALOGUE
from tests.support.tools import find
from torch_grad_exporter import start_exporter
from torch_grad_exporter.actions import Freeze, Log, MaxNorm, Rollback, Stop
from torch_grad_exporter.metrics.families import Family, Kind, LabelRows
from torch_grad_exporter.outputs.prometheus.text import Format, Renderer

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "metrics" / "golden" / "scrape.txt"
REWRITE = os.environ.get("REWRITE_GOLDEN") == "1"

EXACT = re.compile(
    r"torch_grad_(captures|norm_distribution_count|nonfinite|missing|zero|dead|norm_spikes|clipped|layer_clipped|sample_step|exporter_(layers|captures|errors|"
    r"capture_mode|sampling|collector_success|overhead_budget))|torch_train_(steps|backward|skipped|samples|tokens|state|world_size|epoch|learning_rate|"
    r"loss_nonfinite|step_duration_seconds_count)"
)
"""Samples whose values do not depend on the machine; of the others only the name and the labels are compared."""

NEVER_HERE = {
    "torch_grad_exporter_overhead_budget_ratio": "a fixed interval has no budget",
    "torch_grad_exporter_startup_overhead_ratio": "a fixed interval lends nothing: see tests/capture/test_durations.py",
    "torch_grad_shard_norm": "needs a sharded model",
    **dict.fromkeys(
        ("torch_attention_max_logit", "torch_attention_logit_bound", "torch_attention_entropy"),
        "needs attention: see tests/inspection/test_attention.py",
    ),
    "torch_moe_router_entropy": "needs a router with logits: see tests/inspection/test_routers.py",
    **dict.fromkeys(
        ("torch_train_earlier_time_seconds", "torch_train_restarts"), "needs a state: see tests/inspection/test_run_state.py"
    ),
    "torch_train_loss_scale": "needs a gradient scaler",
    **dict.fromkeys(
        ("torch_train_rollback_step", "torch_train_rollback_good_step"), "needs judgements: see tests/actions/rollback/"
    ),
    "torch_train_earlier_steps": "needs a training that goes on: see tests/test_exporter.py",
    "torch_grad_exporter_last_action_timestamp_seconds": "needs an action that is done: see tests/actions/act/test_marks.py",
    **dict.fromkeys(
        ("torch_optimizer_rms_ratio", "torch_optimizer_signal_ratio"), "needs Adam: see tests/inspection/test_optimizer_state.py"
    ),
    **dict.fromkeys(
        ("torch_replicas_compared_total", "torch_replicas_differ_total", "torch_replica_odd_total"),
        "needs several ranks: see tests/inspection/test_replicas.py",
    ),
    "torch_grad_local_norm": "needs several ranks: see matrix/distributed.py",
    "torch_grad_noise_scale": "needs several ranks or micro-batches: see tests/store/test_noise_scale.py",
    **dict.fromkeys(
        ("torch_nonfinite_origin_info", "torch_nonfinite_origin_step"), "needs a NaN: tests/inspection/nan_origin/test_planted.py"
    ),
    **dict.fromkeys(
        ("torch_train_gradient_wait_seconds_total", "torch_train_gradient_waits_total"), "needs ranks: see test_gradient_waits.py"
    ),
}
RESOURCES = {"cuda_memory", "gpu", "process", "host", "container"}
MACHINE = ("process_", "python_", *(f"torch_{part}_" for part in ("cuda", "gpu", "process", "host", "container")))
"""Collectors whose metrics depend on the machine, and how these begin; each has tests of its own."""


def scrape() -> str:
    """Return a seeded run of 24 steps with every option on, as Prometheus would get it."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias[:2] = -100.0  # two dead neurons
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"run": "golden", "labels": {"team": "tests"}, "collectors": dict.fromkeys(RESOURCES, False)}
    options |= {"alerts": [Log()], "clip": MaxNorm(0.05), "dry_run": [MaxNorm(0.1)], "layer_times": True}
    options |= {"flops_per_step": 1e6, "peak_flops": 1e12}
    with start_exporter(model, port=None, every=1, moments=True, weights=True, activations=True, **options) as exporter:
        exporter.on(lambda m: False, Stop())
        exporter.on(lambda m: False, Freeze(layers="0"))
        exporter.on(Rollback(every=200))
        for step in range(24):
            optimizer.zero_grad()
            loss = exporter.watch("output", model(torch.randn(4, 6)), max_norm=1e30).square().mean()
            loss.backward()
            optimizer.step()
            exporter.observe(loss=loss, tokens=4, epoch=step // 12)
            exporter.router("moe", torch.tensor([[0, 1], [1, 3]]), experts=4)
            exporter.log({"reward/mean": step, "kl": math.nan})
            exporter.log({name.replace("torch_rl_", "rl/"): step for name in CATALOGUE if name.startswith("torch_rl_")})
        for _ in exporter.watch_loader([]):
            pass
        list(exporter.collect())
        return Renderer({"run": "golden", "rank": "0", "team": "tests"}).render(exporter.collect(), Format.TEXT).decode()


def comparable(text: str) -> str:
    """Return the scrape without what differs from run to run and machine to machine."""
    lines = []
    for line in text.splitlines():
        if line.startswith("#"):
            lines.append(line)
            continue
        name, value = line.rsplit(" ", 1)
        masked = re.sub(r'(torch_version|exporter_version|python_version|host)="[^"]*"', r'\1="~"', name)
        exact = EXACT.match(name) and "_bucket" not in name
        lines.append(f"{masked} {value if exact else '~'}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def text() -> str:
    """Return the scrape of the known run."""
    return scrape()


@pytest.mark.slow
def test_scrape_is_the_golden_one(text: str) -> None:
    """Names, labels, order, help texts and all countable values of a known run are those in the golden file."""
    if REWRITE:
        GOLDEN.write_text(comparable(text), encoding="utf-8")
    assert comparable(text) == GOLDEN.read_text(encoding="utf-8")


def test_every_declared_metric_is_in_the_scrape(text: str) -> None:
    """A run with every option on shows all declared metrics, but for those listed with a reason."""
    shown = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    machine = {name for name in CATALOGUE if name.startswith(MACHINE)}
    assert shown == set(CATALOGUE) - set(NEVER_HERE) - machine


def made_up() -> str:
    """Return every declared metric with one row, in the text format."""
    families = []
    for spec in CATALOGUE.values():
        rows = LabelRows((tuple(f"a {label}" for label in spec.labels),))
        if spec.kind is Kind.HISTOGRAM:
            families.append(Family(spec, np.ones((1, len(spec.buckets) + 1)), rows, sums=np.ones(1)))
        else:
            families.append(Family(spec, np.ones(1), rows))
    return Renderer({"run": "golden", "rank": "0"}).render(families, Format.TEXT).decode()


@pytest.mark.parametrize("made", [scrape, made_up])
@pytest.mark.server
def test_promtool_finds_nothing_to_complain_about(made: Callable[[], str]) -> None:
    """`promtool check metrics` accepts the scrape, and all declared metrics, without a remark."""
    command, text = [find("promtool"), "check", "metrics"], made()
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
    # A table of what each metric costs, and remarks of the linter before it.
    extended = subprocess.run([*command, "--extended"], input=text, capture_output=True, text=True, check=False)
    lines = extended.stdout.splitlines()
    assert (extended.returncode, extended.stderr, lines[0].split()) == (0, "", ["Metric", "Cardinality", "Percentage"])
    counted = {line.split()[0] for line in lines[1:-1]}
    assert counted == set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))


def test_metrics_page_follows_the_catalogue() -> None:
    """docs/metrics.md is what its generator makes of the catalogue."""
    script = runpy.run_path(str(ROOT / "scripts" / "metrics_doc.py"))
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == script["page"]()
