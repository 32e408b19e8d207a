"""The fixture `grad_health` for pytest: a training in a test fails it if the run is not healthy.

pytest loads this file wherever the package is installed. It imports PyTorch, and all else of the package, when a test first uses
the fixture.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch_grad_exporter.exporter import Exporter
    from torch_grad_exporter.start import Models


class GradHealth:
    """The value of `grad_health`: `with grad_health(model) as exporter:` watches the training in the block and judges it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = 0

    @contextlib.contextmanager
    def __call__(
        self,
        model: Models,
        *,
        fail_on: Collection[str] | None = None,
        max: Mapping[str, float] | None = None,  # noqa: A002 - as the command's option
        min: Mapping[str, float] | None = None,  # noqa: A002 - as `max`
        peak: Mapping[str, float] | None = None,
        baseline: str | os.PathLike[str] | None = None,
        tolerance: Mapping[str, float] | None = None,
        save: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Iterator[Exporter]:
        """Start an exporter on the model for the block, at whose end the test fails unless the run is healthy.

        A run without a sample is not. The message has the table of `torch-grad-exporter check`. An exception in the block passes.

        Args:
            model: As for `start_exporter`.
            fail_on: Alerts and severities that fail (default: critical and warning).
            max: Upper limits at the end by metric, such as `{'torch_grad_norm{layer="head"}': 10}`.
            min: Lower limits.
            peak: Upper limits over the run.
            baseline: A saved run to compare with.
            tolerance: By what is compared, the share by which the run may be worse.
            save: Where to keep the run, as `exporter.save(path)` does, such as for a baseline.
            options: Those of `start_exporter`; by default nothing is served (`port=None`) and each step is sampled (`every=1`).

        Raises:
            UserError: A term cannot be judged; before the training if that is known then.
        """
        from torch_grad_exporter import start_exporter  # noqa: PLC0415 - imports PyTorch, like all that follow
        from torch_grad_exporter.gate.limits import limit  # noqa: PLC0415
        from torch_grad_exporter.gate.rows import table  # noqa: PLC0415
        from torch_grad_exporter.gate.verdict import FAIL_ON, Terms, check_names, check_tolerance, verdict  # noqa: PLC0415
        from torch_grad_exporter.outputs.live.fetch import loaded  # noqa: PLC0415

        chosen = FAIL_ON if fail_on is None else (fail_on,) if isinstance(fail_on, str) else tuple(fail_on)
        check_names(chosen)
        for name, share in (tolerance or {}).items():
            check_tolerance(name, share)
        given = [(kind, limits) for kind, limits in (("max", max), ("min", min), ("peak", peak)) if limits]
        checked = [limit(kind, f"{metric}={value!r}") for kind, limits in given for metric, value in limits.items()]
        terms = Terms(chosen, checked, None if baseline is None else loaded(baseline), tolerance or {})
        self._runs += 1
        path = self._folder / f"run-{self._runs}.json" if save is None else Path(save)
        with start_exporter(model, **{"port": None, "every": 1, **options}) as exporter:
            yield exporter
        path.resolve().unlink(missing_ok=True)
        exporter.save(path)
        judged = verdict(loaded(path), terms)
        if not judged.healthy:
            pytest.fail(table(judged), pytrace=False)


@pytest.fixture
def grad_health(tmp_path_factory: pytest.TempPathFactory) -> GradHealth:
    """Fail the test unless what it trains in a `with` block of this fixture is healthy; see `GradHealth`."""
    return GradHealth(tmp_path_factory.mktemp("grad_health"))
