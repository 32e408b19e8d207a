"""The command `assets`: dashboards, rules, Alertmanager and deployment files for a user who has only the wheel.

All of them lie in `dashboards/` of a checkout, and below this package in a wheel. What Kubernetes needs of the dashboards
and rules is made from those here, so that there is one of each.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import re
from collections.abc import Callable, Iterator
from importlib.resources.abc import Traversable
from pathlib import Path
from textwrap import indent
from typing import Any

import torch_grad_exporter
from torch_grad_exporter.cli.terminal import matching, show
from torch_grad_exporter.errors import UserError
from torch_grad_exporter.files import replace

# The name of the scrape job in the files as they are shipped.
JOB = "training"

# The dashboard that lists the alerts that fire, in both schemas of Grafana.
OVERVIEW = ("grafana/training.json", "grafana-v2/training.json")

_FOLDERS = ("alertmanager", "grafana", "grafana-v2", "kubernetes", "prometheus", "provisioning")

# Files with secrets that may lie in a checkout in use; they are not written.
_SECRETS = "alertmanager/secrets/training-alerts"

_JOB_LINES = re.compile(rf"^(.*\b(?:job_name|targetLabel: job, replacement): ){JOB}\b", re.MULTILINE)

_SELECTED = """\
# A Prometheus of the operator takes the PrometheusRules that its ruleSelector names; with the Helm chart kube-prometheus-stack
# that is the label `release: NAME OF THE RELEASE`. Without it they are ignored, silently.
"""

_LABELS = "labels: {app.kubernetes.io/name: torch-grad-exporter"


_JOB_NAME = matching(r"[A-Za-z_][A-Za-z0-9_./-]*", "not a name of letters, digits and any of _ . / -, with a letter first")
_ADDRESS = matching(r"https?://[^\s\"'#{}$\\]+", "not the address of a page")  # an anchor is put behind it


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "assets",
        help="write the dashboards, the rules and what runs them",
        description="Writes the Grafana dashboards, the rules of Prometheus, the configuration of Alertmanager, a compose file "
        "with all three, manifests for Kubernetes, and the runbook.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write to; made if it is not there")
    add("--prometheus-job", type=_JOB_NAME, default=JOB, metavar="NAME",
        help=f"name of the scrape job, which the dashboards then begin with (default {JOB})")  # fmt: skip
    add("--runbook-url", type=_ADDRESS, metavar="URL",
        help="where you keep runbook.md, for links in alerts and dashboards (default: no links)")  # fmt: skip
    add("--force", action="store_true", help="overwrite files that have another content")
    parser.set_defaults(run=run)


def run(values: argparse.Namespace) -> int:
    """Write all files and print what to do with them. Raises `UserError` if none was written, or not all.

    An existing file with another content is only replaced by force.
    """
    files, out = collect(values.prometheus_job, values.runbook_url), values.out
    try:
        _write(files, out, force=values.force)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error}") from error
    show(
        f"See it:     docker compose -f {out / 'compose.yaml'} up -d, then open http://localhost:3000\n"
        f"Alerts:     put the addresses for alerts into files, see {out / 'alertmanager' / 'secrets' / 'README.md'}\n"
        f"Elsewhere:  load {out / 'prometheus'} and {out / 'grafana'}, or kubectl apply --server-side -f {out / 'kubernetes'}"
    )
    return 0


def collect(job: str = JOB, runbook_url: str | None = None) -> dict[str, str]:
    """Return the text of each file by its path, with the name of the scrape job, and the address of the runbook if given."""
    package = importlib.resources.files(torch_grad_exporter)
    shipped = package / "shipped"  # in a wheel; else `dashboards` and `docs` lie beside the package
    root = shipped if shipped.is_dir() else package / ".."
    read = [("compose.yaml", root / "dashboards" / "compose.yaml"), ("runbook.md", root / "docs" / "runbook.md")]
    for folder in _FOLDERS:
        read += _walk(root / "dashboards" / folder, folder)
    files = {path: file.read_bytes().decode() for path, file in read}  # with their own line ends
    if job != JOB:
        files = {path: _with_job(path, text, job) for path, text in files.items()}
    if runbook_url is not None:
        files = {path: _with_runbook(path, text, runbook_url) for path, text in files.items()}
    files["kubernetes/rules.yaml"] = _rules(files)
    files["kubernetes/dashboards.yaml"] = _dashboards(files)
    return files


def _walk(folder: Traversable, path: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        place = f"{path}/{entry.name}"
        if not entry.is_dir():
            yield place, entry
        elif place != _SECRETS:
            yield from _walk(entry, place)


def _with_job(path: str, text: str, job: str) -> str:
    """Return a file with this job's name; the variable `job` of a dashboard begins with it instead of with all jobs."""
    if not path.startswith("grafana"):
        return _JOB_LINES.sub(rf"\g<1>{job}", text) if path.endswith((".yml", ".yaml")) else text

    def chosen(part: dict[str, Any]) -> dict[str, Any]:
        if part.get("name") == "job" and "current" in part:
            value = [job] if part.get("multi") else job
            part["current"] = {"selected": True, "text": value, "value": value}
        return part

    return _edited(text, chosen)


def _edited(text: str, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """Return a dashboard each of whose objects was edited."""
    return json.dumps(json.loads(text, object_hook=edit), indent=2, ensure_ascii=False) + "\n"


def _with_runbook(path: str, text: str, url: str) -> str:
    """Return a file of alerts, each with its section of the runbook, or the overview, whose table of alerts leads there."""
    if path.endswith(".alerts.yml"):
        rule = re.compile(r"- alert: (\w+)\n(?:.*\n)*?( +)annotations:\n")
        return rule.sub(lambda found: f"{found[0]}{found[2]}  runbook_url: {url}#{found[1]}\n", text)
    if path not in OVERVIEW:
        return text

    def linked(part: dict[str, Any]) -> dict[str, Any]:
        if "properties" in part and part["matcher"]["options"] == "Alert":
            link = {"title": "What to do", "url": f"{url}#${{__data.fields.alertname}}"}
            part["properties"].append({"id": "links", "value": [link]})
        return part

    return _edited(text, linked)


def _rules(files: dict[str, str]) -> str:
    """Return a PrometheusRule for each file of rules: its `spec` is such a file."""
    return _SELECTED + "---\n".join(
        f"apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: {_name(path)}\n  {_LABELS}}}\n"
        f"spec:\n{indent(text, '  ')}"
        for path, text in files.items()
        if re.fullmatch(r"prometheus/[^/]+\.(rules|alerts)\.yml", path)
    )


def _dashboards(files: dict[str, str]) -> str:
    """Return a ConfigMap for each dashboard, labelled for the sidecar of Grafana's Helm chart."""
    return "---\n".join(
        f'apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {_name(path)}\n  {_LABELS}, grafana_dashboard: "1"}}\n'
        f"data:\n  {path.rpartition('/')[2]}: |\n{indent(text, '    ')}"
        for path, text in files.items()
        if re.fullmatch(r"grafana/[^/]+\.json", path)
    )


def _name(path: str) -> str:
    """Return the name of the object in Kubernetes: `torch-grad-exporter-ranks-rules` for `prometheus/ranks.rules.yml`."""
    file = path.rpartition("/")[2].rpartition(".")[0]
    return f"torch-grad-exporter-{file.replace('.', '-').replace('_', '-')}"


def _write(files: dict[str, str], out: Path, *, force: bool) -> None:
    """Write all files, or none if that would lose something of the user's."""
    contents = {out / path: text.encode() for path, text in files.items()}
    different = [path for path, content in contents.items() if path.exists() and path.read_bytes() != content]
    if different and not force:
        names = ", ".join(str(path.relative_to(out)) for path in different)
        raise UserError(f"{out} has files that differ: {names}; take another folder, or overwrite them with --force")
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, content)
