"""A real Alertmanager for tests, and a receiver of its notifications."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.notified import Receiver
from tests.support.servers import serving
from tests.support.tools import PATIENCE, REPOSITORY, find, get

SHIPPED = REPOSITORY / "dashboards" / "alertmanager" / "alertmanager.yaml"
SECRETS = "/etc/alertmanager/secrets/training-alerts"


@dataclass(frozen=True, slots=True)
class Notification:
    """What one request said: the last part of its path, that is, to whom, and the JSON in it."""

    receiver: str
    body: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name that all its alerts have."""
        return str(self.body["groupLabels"]["alertname"])

    @property
    def run(self) -> str:
        """The run that all its alerts are about; empty without one."""
        return str(self.body["groupLabels"].get("run", ""))

    @property
    def alerts(self) -> Sequence[Mapping[str, Any]]:
        """Its alerts, with `status`, `labels` and `annotations`."""
        alerts: Sequence[Mapping[str, Any]] = self.body["alerts"]
        return alerts


class Webhook(Receiver):
    """Takes whatever is posted to it."""

    def __init__(self) -> None:
        super().__init__()
        self.url = self.root

    @property
    def received(self) -> list[Notification]:
        """What came, in the order of arrival."""
        return [Notification(asked.path.rpartition("/")[2], asked.json) for asked in list(self.asked)]

    def told(self, status: str) -> list[tuple[str, str, str]]:
        """Receiver, alert and run of each notification of this status."""
        return [(each.receiver, each.name, each.run) for each in self.received if each.body["status"] == status]

    def firing(self) -> list[tuple[str, str, str]]:
        """Those that said that something is wrong."""
        return self.told("firing")

    def resolved(self) -> list[tuple[str, str, str]]:
        """Those that said that it is over."""
        return self.told("resolved")


class Alertmanager:
    """A running Alertmanager: `url` is for Prometheus' configuration, without a path; `post` does what Prometheus would."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://{self.address}"

    def post(self, *alerts: Mapping[str, str], ends: str | None = None) -> None:
        """Posts alerts with these labels, all in one request; they begin now."""
        content: list[Mapping[str, object]] = [{"labels": labels, "annotations": {"summary": "It is so."}} for labels in alerts]
        if ends is not None:
            content = [{**alert, "endsAt": ends} for alert in content]
        request = urllib.request.Request(
            f"{self.url}/api/v2/alerts", json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            assert response.status == 200

    def alerts(self) -> list[Mapping[str, Any]]:
        """All alerts that it has, with `labels`, `receivers` and `status`, of which `inhibitedBy` is a part."""
        alerts: list[Mapping[str, Any]] = json.loads(get(f"{self.url}/api/v2/alerts"))
        return alerts

    def metric(self, series: str) -> float:
        """One of its own metrics, as it is written in /metrics; 0 where it is not there."""
        found = re.search(rf"^{re.escape(series)} (\S+)$", get(f"{self.url}/metrics"), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            get(f"{self.url}/-/ready")
            return True
        return False


def shortened(directory: Path, webhook: Webhook, text: str | None = None) -> str:
    """The shipped configuration with short waits, whose receivers post to the webhook: `/pager` and `/team`.

    Nothing is told twice within the half hour that a test may take, but for groups that change.
    """
    text = SHIPPED.read_text(encoding="utf-8") if text is None else text
    secrets = directory / "secrets"
    secrets.mkdir(exist_ok=True)
    for name in ("pager", "team"):
        (secrets / f"{name}-url").write_text(f"{webhook.url}/{name}\n")
    for shipped, short in (("group_wait: 30s", "group_wait: 1s"), ("group_interval: 5m", "group_interval: 1s")):
        assert text.count(shipped) == 1
        text = text.replace(shipped, short)
    assert SECRETS in text
    templates = f"templates: [{SHIPPED.parent}/templates/*.tmpl]"
    return text.replace(SECRETS, str(secrets)).replace("templates: [templates/*.tmpl]", templates)


@contextlib.contextmanager
def webhook() -> Iterator[Webhook]:
    """A webhook that runs as long as it is needed."""
    with contextlib.closing(Webhook()) as running:
        yield running


@contextlib.contextmanager
def alertmanager(directory: Path, configuration: str | Path) -> Iterator[Alertmanager]:
    """Runs an Alertmanager without neighbours, with the configuration's text or file, and its state in the directory."""
    if isinstance(configuration, str):
        (directory / "alertmanager.yaml").write_text(configuration)
        configuration = directory / "alertmanager.yaml"
    program = find("prometheus-alertmanager")

    def command(port: int) -> list[str | Path]:
        options = [f"--config.file={configuration}", f"--storage.path={directory / 'alertmanager'}", "--cluster.listen-address="]
        return [program, *options, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]

    # The program that `make tools` fetches finds its own templates from this folder only.
    home = program.parents[2]
    with serving("alertmanager", command, lambda port: Alertmanager(port).is_ready(), directory, cwd=home) as port:
        yield Alertmanager(port)
