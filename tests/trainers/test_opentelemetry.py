"""`opentelemetry-instrument python train.py`: the real command, its own SDK beside it, and a receiver that reads what comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.otlp_receiver import GrpcReceiver, HttpReceiver, Receiver, attributes, points
from torch_grad_exporter.integrations.opentelemetry import exporter_options

SCRIPTS = Path(__file__).parent.parent / "cli" / "scripts"

QUIET = {"OTEL_TRACES_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}


def instrumented(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program with these variables under OpenTelemetry's command."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "TORCH_GRAD_"))}
    environment["PYTHONPATH"] = str(SCRIPTS.parent.parent.parent)
    program = Path(sys.executable).with_name("opentelemetry-instrument")
    return subprocess.run(
        [program, sys.executable, *command], env=environment | QUIET | variables, capture_output=True, text=True, check=False
    )


def resources(receiver: Receiver) -> list[dict[str, str]]:
    """Return the resource of each request."""
    return [attributes(one.resource.attributes) for request in receiver.taken for one in request.resource_metrics]


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_script_is_pushed_once(tmp_path: Path, protocol: str) -> None:
    """Each layer's norm arrives once, under the service and attributes of the variables."""
    record = tmp_path / "record"
    with (HttpReceiver if protocol == "http/protobuf" else GrpcReceiver)() as receiver:
        done = instrumented(
            str(SCRIPTS / "mlp.py"),
            RECORD=str(record),
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
            OTEL_SERVICE_NAME="trainer",
            OTEL_RESOURCE_ATTRIBUTES="deployment.environment=test",
            TORCH_GRAD_EXPORTER_EVERY="1",
        )
    assert done.returncode == 0, done.stderr
    assert not receiver.violations
    rounds = json.loads(record.read_text())
    for layer, norm in rounds[-1].items():
        assert receiver.latest("torch_grad_norm", layer=layer) == pytest.approx(norm, rel=1e-5)
    assert receiver.latest("torch_train_steps_total") == len(rounds)
    # The training takes less than a minute, so there is one export, at its end.
    series = Counter(key for request in receiver.taken for key, _ in points(request))
    assert series.most_common(1)[0][1] == 1
    found = resources(receiver)
    assert all(one == found[0] for one in found), "two exporters push"
    assert (found[0]["service.name"], found[0]["deployment.environment"]) == ("trainer", "test")
    assert "serving http" not in done.stderr


def test_other_exporters_get_the_global_values() -> None:
    """With a console exporter OpenTelemetry's provider has the global norm, and nothing is pushed."""
    done = instrumented(str(SCRIPTS / "mlp.py"), OTEL_METRICS_EXPORTER="console", TORCH_GRAD_EXPORTER_EVERY="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"name": "torch_grad_global_norm"') == 1
    assert '"name": "torch_grad_norm"' not in done.stdout


NOT_IMPORTED = "import sys; print([one for one in sys.modules if one in ('torch', 'numpy', 'torch_grad_exporter.exporter')])"

NOT_WATCHED = """
import sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("torch_grad_exporter.exporter" in sys.modules)
"""


def test_a_program_without_torch_pays_nothing() -> None:
    """The instrumentor imports neither torch nor the exporter."""
    assert instrumented("-c", NOT_IMPORTED, OTEL_METRICS_EXPORTER="console").stdout.splitlines()[0] == "[]"


FAILS = """
import sys
sys.modules["torch_grad_exporter.integrations.attach"] = None
import torch
print(torch.ones(1).item())
"""


def test_a_failure_harms_no_import() -> None:
    """If the exporter cannot attach, it is logged once and torch is imported."""
    done = instrumented("-c", FAILS, OTEL_METRICS_EXPORTER="console")
    assert done.stdout.splitlines()[0] == "1.0", done.stderr
    assert done.stderr.count("no training is watched: ModuleNotFoundError") == 1


OFF = [
    {"OTEL_METRICS_EXPORTER": "none"},
    {"OTEL_METRICS_EXPORTER": "console", "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "torch_grad_exporter"},
]


@pytest.mark.parametrize("variables", OFF, ids=str)
def test_disabled_instrumentation(variables: dict[str, str]) -> None:
    """A disabled instrumentor watches no training."""
    done = instrumented("-c", NOT_WATCHED, **variables)
    assert done.stdout.splitlines()[0] == "False", done.stderr


SERVED = NOT_WATCHED.replace(
    "print(", "from torch_grad_exporter.exporter import open_exporters\nprint([e.port for e in open_exporters()]) #"
)


def test_a_port_is_opened_if_set() -> None:
    """A port is opened only if the variable is set, also without OpenTelemetry's metrics."""
    assert instrumented("-c", SERVED, OTEL_METRICS_EXPORTER="console").stdout.splitlines()[0] == "[None]"
    served = instrumented(
        "-c", SERVED, OTEL_METRICS_EXPORTER="none", TORCH_GRAD_EXPORTER_PORT="0", TORCH_GRAD_EXPORTER_ADDR="127.0.0.1"
    )
    assert int(served.stdout.splitlines()[0].strip("[]")) > 0


UNDONE = """
import torch
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch_grad_exporter.exporter import open_exporters
from torch_grad_exporter.integrations.opentelemetry import TorchGradExporterInstrumentor

def train():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

instrumentor = TorchGradExporterInstrumentor()
print(len(_global_forward_pre_hooks), len(_global_optimizer_pre_hooks), len(open_exporters()))
instrumentor.uninstrument()
train()
print(len(_global_forward_pre_hooks), len(_global_optimizer_pre_hooks), len(open_exporters()))
instrumentor.instrument(skip_dep_check=True)
train()
print(len(_global_forward_pre_hooks), len(open_exporters()))
instrumentor.uninstrument()
print(len(_global_forward_pre_hooks), len(_global_optimizer_pre_hooks), len(open_exporters()))
"""


def test_uninstrument_undoes_it() -> None:
    """`uninstrument` leaves no hook and no exporter, and `instrument` begins again."""
    done = instrumented("-c", UNDONE, OTEL_METRICS_EXPORTER="console")
    assert done.stdout.splitlines()[:4] == ["1 1 0", "0 0 0", "0 1", "0 0 0"], done.stderr


OUTLETS = [
    ({"OTEL_METRICS_EXPORTER": "otlp"}, {"port": None, "otlp_endpoint": "http://localhost:4318"}),
    (
        {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        {"port": None, "otlp_endpoint": "http://localhost:4317"},
    ),
    ({"OTEL_METRICS_EXPORTER": "console,otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://there:1"}, {"port": None}),
    ({"OTEL_METRICS_EXPORTER": "none"}, None),
    ({"OTEL_METRICS_EXPORTER": "none", "TORCH_GRAD_EXPORTER_PORT": "9100"}, {}),
    ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "True", "TORCH_GRAD_EXPORTER_PORT": "9100"}, None),
]


@pytest.mark.parametrize(("environment", "expected"), OUTLETS, ids=str)
def test_each_value_goes_one_way(environment: dict[str, str], expected: dict[str, object] | None) -> None:
    """OpenTelemetry gets the values by OTLP push, by its own provider, or not at all."""
    assert exporter_options({}, environment) == expected
