"""The stable answers against their schemas, for real runs in several states, and wrong answers that the schemas refuse."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import threading
import urllib.request
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from tests.support.models import Perceptron, batch
from tests.support.tools import PATIENCE, eventually
from torch_grad_exporter import Exporter, start_exporter
from torch_grad_exporter.cli import main as cli

SCHEMAS = {
    name: json.loads(files("torch_grad_exporter").joinpath(f"schemas/v1/{name}.json").read_text())
    for name in ("problems", "values", "check")
}


def valid(name: str, answer: object) -> bool:
    """Return whether an answer fits its schema."""
    return jsonschema.Draft202012Validator(SCHEMAS[name]).is_valid(answer)


def asked(url: str | None, path: str) -> Any:  # noqa: ANN401 - JSON
    """Return the answer of a server."""
    with urllib.request.urlopen(f"{url}{path}", timeout=PATIENCE) as response:
        return json.loads(response.read())


def trained(exporter: Exporter, *models: torch.nn.Module) -> None:
    """Take three steps with all models, and log two values in each."""
    optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], 0.01)
    for number in range(3):
        optimizer.zero_grad()
        loss = sum(model(batch()).square().mean() for model in models)
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        exporter.log({"reward": math.nan if number == 1 else number, "kl": 0.5})


def healthy() -> Iterator[tuple[Exporter, str | None]]:
    """A run without a problem."""
    model = Perceptron()
    with start_exporter(model, port=0, every=1) as exporter:
        trained(exporter, model)
        yield exporter, exporter.page_url


def untrained() -> Iterator[tuple[Exporter, str | None]]:
    """A run before its first step."""
    with start_exporter(Perceptron(), port=0) as exporter:
        yield exporter, exporter.page_url


def nan() -> Iterator[tuple[Exporter, str | None]]:
    """A run with a NaN in gradients."""
    model = Perceptron()
    with start_exporter(model, port=0, every=1) as exporter:
        trained(exporter, model)
        handle = next(model.parameters()).register_hook(lambda gradient: gradient * math.nan)
        trained(exporter, model)
        handle.remove()
        yield exporter, exporter.page_url


def several() -> Iterator[tuple[Exporter, str | None]]:
    """A run of two models, one with Inf in its gradients."""
    models = {"generator": Perceptron(), "critic": Perceptron()}
    with start_exporter(models, port=0, every=1) as exporter:
        handle = next(models["critic"].parameters()).register_hook(lambda gradient: gradient * math.inf)
        trained(exporter, *models.values())
        handle.remove()
        yield exporter, exporter.page_url


def without_state() -> Iterator[tuple[Exporter, str | None]]:
    """A run without the collector of its state."""
    model = Perceptron()
    with start_exporter(model, port=0, every=1, collectors={"training": False}) as exporter:
        trained(exporter, model)
        yield exporter, exporter.page_url


def over(error: BaseException | None) -> Iterator[tuple[Exporter, str | None]]:
    """An exporter that lingers after its end."""
    model = Perceptron()
    exporter = start_exporter(model, port=0, every=1, linger=600)
    trained(exporter, model)
    url = exporter.page_url
    assert url is not None
    ending = threading.Thread(target=exporter.end, args=(error,))
    ending.start()
    # The state is over a moment before the server waits.
    assert eventually(lambda: asked(url, "api/v1/problems")["state"] in ("finished", "failed"))
    yield exporter, url

    def released() -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}metrics", timeout=PATIENCE).read()  # the scrape that the end waits for
        return not ending.is_alive()

    assert eventually(released)


RUNS: dict[str, tuple[Callable[[], Iterator[tuple[Exporter, str | None]]], str | None, str]] = {
    "untrained": (untrained, "initialising", ""),
    "healthy": (healthy, "training", ""),
    "nan": (nan, "training", "TrainingNonFiniteGradients"),
    "several": (several, "training", "TrainingNonFiniteGradients"),
    "finished": (lambda: over(None), "finished", ""),
    "failed": (lambda: over(ValueError("a reason")), "failed", "TrainingFailed"),
    "without state": (without_state, None, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_real_answers_fit(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The answers of a run in this state fit their schemas, and so does the verdict on its file."""
    run, state, alert = RUNS[name]
    answers = run()
    exporter, url = next(answers)
    try:
        problems = asked(url, "api/v1/problems")
        jsonschema.validate(problems, SCHEMAS["problems"])
        assert problems["state"] == state
        assert ({alert} if alert else set()) <= {item["alert"] for item in problems["problems"]}
        assert bool(alert) or not problems["problems"]
        for view in ("recent", "whole"):
            values = asked(url, f"api/v1/values?view={view}")
            jsonschema.validate(values, SCHEMAS["values"])
        exporter.save(tmp_path / "run.json")
    finally:
        next(answers, None)
    code = cli.main(["check", str(tmp_path / "run.json"), "--json"])
    verdict = json.loads(capsys.readouterr().out)
    jsonschema.validate(verdict, SCHEMAS["check"])
    assert (verdict["code"], len(verdict["runs"])) == (code, 1)
    assert verdict["runs"][0]["healthy"] is (code == 0)


def test_the_verdict_on_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--json` a run that cannot be read has the reason, the others their rows, and the exit code is that of the table."""
    answers = healthy()
    next(answers)[0].save(tmp_path / "run.json")
    next(answers, None)
    assert cli.main(["check", str(tmp_path / "run.json"), str(tmp_path / "none.json"), "--json"]) == 2
    verdict = json.loads(capsys.readouterr().out)
    jsonschema.validate(verdict, SCHEMAS["check"])
    good, bad = verdict["runs"]
    assert (verdict["code"], good["healthy"], good["unusable"], bad["healthy"], bad["rows"]) == (2, True, None, False, [])
    assert good["rows"]
    assert "none.json" in bad["unusable"]


def test_the_server_gives_the_schemas() -> None:
    """`/api/v1/schema` has the files of the package, which are schemas themselves."""
    with start_exporter(Perceptron(), port=0) as exporter:
        assert asked(exporter.page_url, "api/v1/schema") == SCHEMAS
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


EXAMPLES: dict[str, Any] = {
    "problems": {
        "run": "a", "rank": 0, "now": 1.5, "state": "training", "step": 3.0, "ended": None, "ended_by": None,
        "problems": [{"alert": "A", "severity": "info", "text": "", "layer": "l", "others": ["m"], "first_steps": ""}],
        "earlier": [{"alert": "A", "severity": "critical", "text": "", "layer": None, "first": 1, "last": 2}],
    },
    "values": {
        "view": "recent", "first": 0, "stride": 1, "times": [1.5], "steps": [3],
        "values": {"a": [1.0, None, "NaN"]}, "nonfinite": {"a": [2]},
    },
    "check": {
        "version": 1, "code": 1,
        "runs": [
            {
                "about": "a", "healthy": False, "unusable": None, "remark": "",
                "rows": [{"group": "rules", "name": "A", "result": "failed", "text": ""}],
            }
        ],
    },
}  # fmt: skip


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each value inside of JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(answer: object, path: tuple[str | int, ...], *values: object) -> object:
    """Return an answer without what is at a path, or with a value in its place."""
    made: Any = copy.deepcopy(answer)
    target = made
    for key in path[:-1]:
        target = target[key]
    del target[path[-1]]
    if values:
        target.insert(path[-1], values[0]) if isinstance(target, list) else target.update({path[-1]: values[0]})
    return made


@pytest.mark.parametrize("name", EXAMPLES)
def test_wrong_answers_are_refused(name: str) -> None:
    """A schema refuses an answer without any one of its fields, or with a wrong type of any value; further fields are allowed."""
    answer = EXAMPLES[name]
    jsonschema.validate({**answer, "new": 1}, SCHEMAS[name])
    free = {("values", "a"), ("nonfinite", "a")}  # names that the user has chosen
    for path in places(answer):
        assert not valid(name, changed(answer, path, {"of": "a wrong type"} if path not in {("values",), ("nonfinite",)} else []))
        if isinstance(path[-1], str) and path not in free:
            assert not valid(name, changed(answer, path)), path
