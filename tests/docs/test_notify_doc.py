"""The examples of docs/notify.md run and send what the page shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.support.notified import notification, receiver
from tests.support.pages import blocks
from tests.support.tools import REPOSITORY, eventually
from torch_grad_exporter import Exporter
from torch_grad_exporter.actions import Webhook
from torch_grad_exporter.actions.notify.notification import FIELDS

PAGE = REPOSITORY / "docs" / "notify.md"


def example(number: int, **names: object) -> dict[str, object]:
    """Run a block of Python of the page, with its addresses replaced by one of the test."""
    text, url = blocks(PAGE, "python")[number], str(names.get("url", ""))
    text = re.sub(r'"https?://[^"]+"', repr(url), text)
    text = re.sub(r'"/run/secrets/[^"]+"', repr(str(names.get("file", ""))), text)
    exec(text, names)  # noqa: S102 - what a user copies
    return names


def sent(number: int, name: str, tmp_path: Path) -> tuple[bytes, str]:
    """Return the body and content type of an example's webhook."""
    with receiver() as there:
        file = tmp_path / "url"
        file.write_text(there.url)
        webhook = example(number, url=there.url, file=file)[name]
        assert isinstance(webhook, Webhook)
        webhook.send([notification(severity="critical", run="run 7", value=2.0)], 60.0)
        (asked,) = there.asked
    return asked.body, asked.headers["Content-Type"]


@pytest.mark.slow
def test_the_first_example_notifies(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN loss is in the log and at both receivers of the first example."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    with receiver() as there:
        names = example(0, url=there.url)
        exporter, model = names["exporter"], names["model"]
        assert isinstance(model, torch.nn.Linear)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert isinstance(exporter, Exporter)
        with exporter:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                exporter.observe(loss=float("nan"))
            assert there.got(2)
            assert eventually(lambda: "TrainingNonFiniteLoss (critical)" in caplog.text)
        names = {json.dumps(asked.json)[:1] for asked in there.asked}
    assert names == {"{", "["}  # the webhook's, and the Alertmanager's


@pytest.mark.parametrize(
    ("number", "name", "body", "kind"),
    [
        (
            1,
            "slack",
            {"text": "*LossSpike* (critical, firing): The loss jumped 3 times.\nRun run 7, rank 0, step 7. Look."},
            "application/json",
        ),
        (2, "discord", {"content": "🔥 **LossSpike** in run 7 at step 7: The loss jumped 3 times."}, "application/json"),
        (3, "ntfy", "critical: The loss jumped 3 times. (run run 7, step 7)", "text/plain; charset=utf-8"),
    ],
)
def test_the_body_of_a_message(number: int, name: str, body: object, kind: str, tmp_path: Path) -> None:
    """Slack gets JSON with `text`, Discord JSON with `content`, and ntfy plain text."""
    content, content_type = sent(number, name, tmp_path)
    assert (json.loads(content) if "json" in kind else content.decode(), content_type) == (body, kind)


def test_the_page_has_the_fields_of_a_payload() -> None:
    """The JSON of the page has the fields of a payload in order."""
    (shown,) = blocks(PAGE, "json")
    assert tuple(json.loads(shown)) == tuple(notification().payload()) == FIELDS
