"""Each test here begins as in a fresh process: what earlier ones compiled would leave gradients and first rounds out."""

from __future__ import annotations

import pytest

from tests.support.compiled import forget_what_was_compiled


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> None:
    forget_what_was_compiled()
