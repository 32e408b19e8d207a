"""Each page runs from nothing, as a whole, and prints what it shows; some examples are looked at closer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.pages import DOCS, cells, run_page
from tests.support.programs import Starter

EXAMPLES = {page: found for path in DOCS.rglob("*.md") if (found := cells(page := path.relative_to(DOCS).as_posix()))}
"""The examples in Python, by page."""

TRAINERS = {"frameworks.md", "lightning.md", "transformers.md"}
"""The pages that tests/trainers/test_pages.py runs."""

PAGES = sorted(page for page, examples in EXAMPLES.items() if page not in TRAINERS and not all(cell.reason for cell in examples))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample each step, without a port, from the same weights each time."""
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_PORT", "off")
    monkeypatch.setenv("TORCH_GRAD_EXPORTER_EVERY", "1")
    torch.manual_seed(0)


def test_marked_examples_are_few() -> None:
    """Examples that no test runs as a part of their page say why, and these are all of them."""
    reasons = Counter(cell.reason for examples in EXAMPLES.values() for cell in examples if cell.reason)
    assert reasons == {
        "needs several ranks": 2,
        "needs a driver of verl": 1,
        "reads a secret from a file": 2,  # tests/docs/test_notify_doc.py runs them
        "needs an account of W&B": 2,  # tests/trainers/test_loggers.py runs these two of docs/frameworks.md
        "needs a server of MLflow": 1,
        "needs Ray's workers": 1,
        "needs an engine of DeepSpeed's launcher": 1,  # tests/trainers/test_deepspeed.py runs it
    }


@pytest.mark.process
@pytest.mark.parametrize(("page", "section"), [*((page, "") for page in PAGES), ("frameworks.md", "A loop of your own")])
def test_a_page_runs_from_nothing(page: str, section: str, starter: Starter, tmp_path: Path) -> None:
    """The examples of a page run one after the other in a process that knows nothing else, and print what the page shows."""
    run_page(starter, page, section, folder=tmp_path)


@pytest.mark.process
def test_the_example_for_pytest_passes(starter: Starter, tmp_path: Path) -> None:
    """The test of docs/in-ci.md passes in pytest."""
    (tmp_path / "test_training.py").write_text(cells("in-ci.md")[0].code)
    done = starter.pytest(tmp_path)
    assert (done.wait(), "1 passed" in done.out.read_text()) == (0, True), done.out.read_text()
