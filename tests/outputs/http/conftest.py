from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.outputs.http.support import Site, Training, serving
from torch_grad_exporter.outputs.http.server import MetricsServer


@pytest.fixture
def training() -> Iterator[Training]:
    """A training whose scrape can fail or hang."""
    made = Training()
    yield made
    made.may_go_on.set()


@pytest.fixture
def server(training: Training) -> Iterator[MetricsServer]:
    """A running server of the training, in which no client times out."""
    with serving(training) as made:
        yield made


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A directory of the test's own."""
    return Site(tmp_path)
