"""The compose file, what Grafana and Prometheus are provisioned with, and the manifests for Kubernetes."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from tests.support.real_prometheus import Prometheus, running
from tests.support.tools import PATIENCE, REPOSITORY, eventually, find
from torch_grad_exporter.cli import assets
from torch_grad_exporter.cli import main as cli

DASHBOARDS = REPOSITORY / "dashboards"
PROVISIONING = DASHBOARDS / "provisioning"
SERVICES = ("alertmanager", "grafana", "prometheus")
Tree = Mapping[str, Any]


def composed(directory: Path, **environment: str) -> Tree:
    """Return the compose file as Docker Compose resolves it, without a daemon."""
    command = [find("docker-compose"), "-f", directory / "compose.yaml", "config", "--format", "json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    tree: Tree = json.loads(done.stdout)
    return tree


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the command `assets` writes."""
    directory = tmp_path_factory.mktemp("assets")
    assert cli.main(["assets", "--out", str(directory)]) == 0
    return directory


@pytest.fixture(scope="module")
def services(written: Path) -> Tree:
    """Return the services of the compose file that `assets` writes."""
    found: Tree = composed(written)["services"]
    assert tuple(sorted(found)) == SERVICES
    return found


def on_host(service: Tree, path: str) -> Path:
    """Return the path on the host of a path in a container."""
    for volume in service["volumes"]:
        if volume["type"] == "bind" and PurePosixPath(path).is_relative_to(volume["target"]):
            return Path(volume["source"]) / PurePosixPath(path).relative_to(volume["target"])
    pytest.fail(f"nothing is mounted at {path}")


@pytest.mark.server
def test_images_have_exact_versions(services: Tree) -> None:
    """Each image is the project's own, with an exact version."""
    for name, image in (("prometheus", "prom/prometheus"), ("alertmanager", "prom/alertmanager"), ("grafana", "grafana/grafana")):
        assert re.fullmatch(rf"{image}:v?\d+\.\d+\.\d+", services[name]["image"])


@pytest.mark.server
def test_services_are_for_this_host_alone(services: Tree) -> None:
    """Every port is bound to the loopback address, with the same number as in the container."""
    ports = {name: [(each["host_ip"], each["published"], each["target"]) for each in services[name]["ports"]] for name in SERVICES}
    assert ports == {
        "alertmanager": [("127.0.0.1", "9093", 9093)],
        "grafana": [("127.0.0.1", "3000", 3000)],
        "prometheus": [("127.0.0.1", "9090", 9090)],
    }


@pytest.mark.server
def test_services_are_watched_and_keep_their_data(services: Tree) -> None:
    """Each service has a health check on its port, a named volume for its data, and read-only mounts of our files."""
    for name in SERVICES:
        (port,) = services[name]["ports"]
        assert f"http://127.0.0.1:{port['target']}/" in services[name]["healthcheck"]["test"][-1]
        kinds = {each["source"]: each["type"] for each in services[name]["volumes"] if each["type"] != "bind"}
        assert kinds == {name: "volume"}
        assert all(each.get("read_only") for each in services[name]["volumes"] if each["type"] == "bind")


@pytest.mark.server
def test_there_is_no_secret_and_no_known_password(services: Tree) -> None:
    """No variable holds a secret, and Grafana creates no account with the default password."""
    variables = {key: value for service in services.values() for key, value in (service.get("environment") or {}).items()}
    assert not [key for key in variables if re.search("PASSWORD|SECRET|TOKEN|KEY", key) and not key.endswith("__FILE")]
    assert variables["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert (variables["GF_AUTH_DISABLE_LOGIN_FORM"], variables["GF_AUTH_BASIC_ENABLED"]) == ("true", "false")
    assert variables["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


@pytest.mark.server
def test_everything_that_is_mounted_or_named_is_there(services: Tree) -> None:
    """Each mounted folder exists, and each file that a command, a variable or a provider names."""
    for service in services.values():
        assert [each["source"] for each in service["volumes"] if each["type"] == "bind" and not Path(each["source"]).is_dir()] == []
    for name in ("prometheus", "alertmanager"):
        (option,) = (each for each in services[name]["command"] if each.startswith("--config.file="))
        assert on_host(services[name], option.partition("=")[2]).is_file()
    grafana = services["grafana"]
    assert on_host(grafana, grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).is_file()
    folder = on_host(grafana, "/etc/grafana/provisioning/dashboards")
    (provider,) = (each for file in folder.iterdir() for each in yaml.safe_load(file.read_text())["providers"])
    found = sorted(path.name for path in on_host(grafana, provider["options"]["path"]).glob("*.json"))
    assert found == sorted(path.name for path in (DASHBOARDS / "grafana").glob("*.json"))
    assert "training.json" in found


@pytest.mark.server
def test_sd_dir_is_mounted_into_prometheus(written: Path, tmp_path: Path) -> None:
    """TORCH_GRAD_EXPORTER_SD_DIR replaces the folder of the fixed target."""
    for environment, folder in (
        ({}, written / "provisioning" / "targets"),
        ({"TORCH_GRAD_EXPORTER_SD_DIR": str(tmp_path)}, tmp_path),
    ):
        service = composed(written, **environment)["services"]["prometheus"]
        assert on_host(service, "/etc/training/provisioning/targets") == folder
        assert service["extra_hosts"] == ["host.docker.internal=host-gateway"]


def test_the_data_source_is_fixed_in_one_place() -> None:
    """The uids of the data sources occur in one file, and Grafana has the scrape interval of Prometheus."""
    sources = yaml.safe_load((PROVISIONING / "grafana" / "datasources" / "prometheus.yaml").read_text())["datasources"]
    by_type = {each["type"]: each for each in sources}
    uids = {each["uid"] for each in sources}
    assert uids == {"torch-grad-prometheus", "torch-grad-alertmanager"}
    assert by_type["prometheus"]["jsonData"]["alertmanagerUid"] == by_type["alertmanager"]["uid"]
    naming = [path for path in DASHBOARDS.rglob("*") if path.is_file() and any(uid.encode() in path.read_bytes() for uid in uids)]
    assert [path.name for path in naming] == ["prometheus.yaml"]
    prometheus = yaml.safe_load((PROVISIONING / "prometheus" / "prometheus.yml").read_text())
    assert by_type["prometheus"]["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]


@pytest.mark.server
def test_services_find_each_other(services: Tree) -> None:
    """The addresses in the configurations are the names and ports of the services."""
    prometheus = yaml.safe_load((PROVISIONING / "prometheus" / "prometheus.yml").read_text())
    sources = yaml.safe_load((PROVISIONING / "grafana" / "datasources" / "prometheus.yaml").read_text())["datasources"]
    asked = [each["url"].removeprefix("http://") for each in sources]
    asked += prometheus["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    assert set(asked) == {f"{name}:{services[name]['ports'][0]['target']}" for name in ("prometheus", "alertmanager")}


@pytest.mark.server
def test_prometheus_loads_what_is_provisioned(tmp_path: Path) -> None:
    """Prometheus loads every group of every rule file and the targets."""
    assert cli.main(["assets", "--out", str(tmp_path)]) == 0
    place = tmp_path / "provisioning" / "prometheus"
    with running(place, (place / "prometheus.yml").read_text()) as real:
        assert eventually(lambda: "training" in targets(real))
        found, groups, managers = targets(real), real.get("/api/v1/rules"), real.get("/api/v1/alertmanagers")
    assert found == {"training": "http://host.docker.internal:9100/metrics", "prometheus": "http://localhost:9090/metrics"}
    names = [group["name"] for path in rule_files(tmp_path) for group in yaml.safe_load(path.read_text())["groups"]]
    assert isinstance(groups, dict)
    assert sorted(group["name"] for group in groups["groups"]) == sorted(names)
    assert isinstance(managers, dict)
    assert [each["url"] for each in managers["activeAlertmanagers"]] == ["http://alertmanager:9093/api/v2/alerts"]


def targets(real: Prometheus) -> dict[str, str]:
    """Return the targets of Prometheus by job; empty before it is ready."""
    with contextlib.suppress(OSError):
        data = real.get("/api/v1/targets")
        assert isinstance(data, dict)
        return {each["scrapePool"]: each["scrapeUrl"] for each in data["activeTargets"]}
    return {}


def rule_files(directory: Path) -> list[Path]:
    """Return the rule files that `assets` writes."""
    return [path for path in sorted((directory / "prometheus").glob("*.yml")) if re.search(r"\.(rules|alerts)\.yml$", path.name)]


def manifests(path: Path) -> list[Tree]:
    """Return the documents of a manifest."""
    found: list[Tree] = list(yaml.safe_load_all(path.read_text()))
    return found


@pytest.mark.slow
def test_names_in_kubernetes_are_allowed_and_differ(written: Path) -> None:
    """Each object has a valid name, unique within its kind."""
    objects = [each for path in sorted((written / "kubernetes").iterdir()) for each in manifests(path)]
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    assert {kind for kind, _ in names} == {"PodMonitor", "PrometheusRule", "ConfigMap"}
    for _, name in names:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)


@pytest.mark.full
def test_custom_resources_match_the_operator(written: Path) -> None:
    """Models of the operator's definitions accept each PodMonitor and PrometheusRule."""
    from cloudcoil.models.prometheus_operator import v1  # noqa: PLC0415 - takes seconds

    for name, count in (("podmonitor.yaml", 2), ("rules.yaml", len(rule_files(written)))):
        documents = manifests(written / "kubernetes" / name)
        assert len(documents) == count
        for document in documents:
            assert document["apiVersion"] == "monitoring.coreos.com/v1"
            model = getattr(v1, document["kind"]).model_validate(document)
            # A key that the model does not know is lost on the way.
            assert model.model_dump(mode="json", by_alias=True, exclude_unset=True) == document


@pytest.mark.server
def test_rules_in_kubernetes_are_those_of_prometheus(written: Path, tmp_path: Path) -> None:
    """Each PrometheusRule has the groups of one file, and promtool accepts them."""
    documents = manifests(written / "kubernetes" / "rules.yaml")
    assert [each["spec"] for each in documents] == [yaml.safe_load(path.read_text()) for path in rule_files(written)]
    for number, document in enumerate(documents):
        (tmp_path / f"{number}.yml").write_text(yaml.safe_dump(document["spec"]))
    command = [find("promtool"), "check", "rules", *sorted(tmp_path.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_dashboards_in_kubernetes_are_those_of_grafana(written: Path) -> None:
    """Each dashboard is an unchanged ConfigMap with the label of Grafana's sidecar, below the limit of 1 MiB."""
    documents = manifests(written / "kubernetes" / "dashboards.yaml")
    found = {name: text for document in documents for name, text in document["data"].items()}
    assert found == {path.name: path.read_text() for path in (written / "grafana").glob("*.json")}
    for document in documents:
        assert document.keys() == {"apiVersion", "kind", "metadata", "data"}
        assert (document["apiVersion"], document["kind"]) == ("v1", "ConfigMap")
        assert document["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(json.dumps(document).encode()) < 2**20


def test_pods_are_scraped_as_the_rules_need_it(written: Path) -> None:
    """Each monitor scrapes eight ports of a kind of job, keeps `run` and `rank`, and no pod is scraped by both."""
    monitors = manifests(written / "kubernetes" / "podmonitor.yaml")
    keys = {}
    for monitor in monitors:
        endpoints = monitor["spec"]["podMetricsEndpoints"]
        assert [each["port"] for each in endpoints] == [f"metrics-{rank}" for rank in range(8)]
        assert all(each["honorLabels"] is True for each in endpoints)
        wanted = {each["key"]: each["operator"] for each in monitor["spec"]["selector"]["matchExpressions"]}
        (key,) = (key for key, operator in wanted.items() if operator == "Exists")
        label = "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", key)
        for endpoint in endpoints:
            assert endpoint["relabelings"] == [
                {"sourceLabels": ["__meta_kubernetes_namespace", label], "separator": "/", "targetLabel": "run"},
                {"targetLabel": "job", "replacement": assets.JOB},
                {
                    "sourceLabels": ["__meta_kubernetes_pod_container_port_name"],
                    "regex": r"metrics-(\d+)",
                    "targetLabel": "local_rank",
                },
            ]
            # The same name on the series, whose own one the labels of the target do not replace.
            assert endpoint["metricRelabelings"] == [{"sourceLabels": ["namespace", "run"], "separator": "/", "targetLabel": "run"}]
        keys[key] = wanted
    first, second = keys
    assert keys[second][first] == "DoesNotExist"
