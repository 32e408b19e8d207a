"""What the shipped rules say of trainings that have ended, in a real Prometheus with the configuration of the README.

Durations are a sixtieth of the shipped ones.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.support.hastened import hastened
from tests.support.programs import Starter
from tests.support.real_prometheus import running
from tests.support.tools import REPOSITORY, eventually

PROGRAM = """
import os, sys, time, torch
from torch_grad_exporter import start_exporter

folder, endings = sys.argv[1], sys.argv[2:]
for name in endings:
    if os.fork() == 0:
        break
else:
    for _ in endings:
        os.wait()
    os._exit(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
exporter = start_exporter(model, 0, addr="127.0.0.1", run=name, every=1)
os.write(1, f"{name} {exporter.port}\\n".encode())
while not os.path.exists(f"{folder}/{name}"):
    optimizer.zero_grad()
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
    time.sleep(0.05)
if name == "raises":
    raise ValueError
if name == "dies":
    os._exit(9)
"""

ENDS = {
    "ends": ("finished", set()),
    "raises": ("failed", {("TrainingFailed", "critical")}),
    "dies": ("", {("TrainingTargetDown", "warning")}),
}
"""By run, the last state that Prometheus knows, empty for none of an end, and the alerts on the end."""


@pytest.mark.server
def test_an_end_is_seen_and_pages_nobody(starter: Starter, tmp_path: Path) -> None:
    """With fixed targets a clean end fires nothing, an exception TrainingFailed, and a sudden death a warning."""
    program = starter.start(PROGRAM, str(tmp_path), *ENDS)
    ports = [program.line(number).split()[1] for number in range(len(ENDS))]
    (block,) = re.findall(r"^```yaml\n(scrape_configs:.*?)^```", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    configuration = yaml.safe_load(block)
    (job,) = configuration["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
    configuration["global"] = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), "1s")
    for kind in ("rules", "alerts"):
        rules = REPOSITORY / "dashboards" / "prometheus" / f"training.{kind}.yml"
        (tmp_path / rules.name).write_text(hastened(rules.read_text()))
    configuration["rule_files"] = [str(tmp_path / "training.*.yml")]

    with running(tmp_path, yaml.safe_dump(configuration)) as prometheus:
        known = 'count(count_over_time(torch_train_state{state="training"}[1h]) >= 3)'
        assert eventually(lambda: prometheus.value(known) == len(ENDS))
        for name in ("ends", "raises", "dies"):  # the one whose alert is waited for is the last
            (tmp_path / name).touch()
            gone = f'last_over_time(torch_train_state{{run="{name}",state="training"}}[1h]) unless torch_train_state'
            assert eventually(lambda gone=gone: prometheus.query(gone) != [])  # type: ignore[misc]
        assert program.wait() == 0
        firing = 'max by (run, alertname, severity) (max_over_time(ALERTS{alertstate="firing"}[1h]))'
        assert eventually(lambda: any(labels["run"] == "dies" for labels, _ in prometheus.query(firing)))
        fired = {(labels["run"], labels["alertname"], labels["severity"]) for labels, _ in prometheus.query(firing)}
        assert fired == {(run, *alert) for run, (_, alerts) in ENDS.items() for alert in alerts}
        last = prometheus.query('last_over_time(torch_train_state{state=~"finished|failed"}[1h]) == 1')
        assert {(labels["run"], labels["state"]) for labels, _ in last} == {
            (run, state) for run, (state, _) in ENDS.items() if state
        }
    said = program.err.read_text()
    assert len(re.findall(r"^torch_grad_exporter: the run has ended; waiting up to \d s for a scrape", said, re.MULTILINE)) == 2
