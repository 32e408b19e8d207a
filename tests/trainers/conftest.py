"""What the packages warn of themselves fails no test."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """This folder's tests run by themselves, in an environment of their own."""
    config.addinivalue_line("filterwarnings", "ignore")
    config.addinivalue_line("filterwarnings", "error:::torch_grad_exporter")
