"""Every regime of training on two ranks, with the checks of `test_matrix.py` on both, and without a collective of ours.

Two processes run all the selected regimes in all ways and write their findings to files, which the tests read. Each run has its own
process group, so that a rank that fails ends the other rank's run and nothing else.
"""

from __future__ import annotations

import datetime as dt
import gc
import os
import pickle
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.matrix.distributed import REGIMES
from tests.matrix.harness import Run, Way
from tests.matrix.test_matrix import same
from tests.support.ranks import PATIENCE, joined, start_ranks
from tests.support.scrape import Key, key, values
from tests.support.torch_versions import let_torch_warn

pytestmark = [pytest.mark.process, pytest.mark.timeout(2000)]  # the first test waits for the runs of all

TOGETHER = 1800.0
"""Seconds after which the ranks hang, with all regimes that were asked for."""

EQUAL_ON_ALL_RANKS = (
    "torch_grad_norm", "torch_grad_max_magnitude", "torch_grad_global_norm",
    "torch_grad_clip_coefficient", "torch_grad_nonfinite_steps_total",
)  # fmt: skip

REPRESENTATIVES = {
    "ddp[kind=plain]", "ddp_unused_parameters[set_to_none=True]", "ddp_no_sync[as_views=False]", "ddp_clip_grad_norm",
    "ddp_overflow_on_one_rank", "ddp_uneven_inputs", "zero_redundancy_optimizer", "fsdp[kind=resharded]",
    "fsdp_accumulation[kind=not synchronised]", "fsdp_clip_grad_norm", "fsdp_offloaded", "fsdp_uneven[layerwise=True]",
    "fsdp1[kind=flat]", "pipeline[kind=gpipe, divided, clipped]", "tensor_parallel",
    "ddp_each_backward_reduced", "ddp_averaged_by_the_user", "ddp_thrown_away", "ddp_an_old_gradient", "ddp_sparse",
    "ddp_no_sync_of_a_large_layer", "ddp_checkpointed",
}  # fmt: skip
"""The regimes that `make test` runs."""

UNKNOWN = (
    "ddp_where_started", "ddp_each_backward_reduced", "ddp_averaged_by_the_user", "ddp_compiled[around=wrapper]",
)  # fmt: skip
"""Regimes in which the norm of a rank's own gradients is absent, or is not that of the one optimizer."""

FIRST = {name.partition("[")[0]: name for name in reversed(REGIMES)}
"""One variant of each regime."""


def thinned(names: Iterable[str]) -> list[object]:
    """Return the names, the others than the representatives only for `make test-full`."""
    return [name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.full) for name in names]


@dataclass
class Finding:
    """The findings of one rank in one run.

    `collectives`: their number on this rank; `shown`: the last scrape; `local_norms`: how often its own norm was compared.
    """

    wrong: list[str] = field(default_factory=list)
    failed: str = ""
    skipped: str = ""
    collectives: int = 0
    local_norms: int = 0
    shown: dict[Key, float] = field(default_factory=dict)


Pair = tuple[str, Way]


class Findings(dict[Pair, list[Finding]]):
    """The findings of each rank, by regime and way."""

    def of(self, name: str, way: Way) -> list[Finding]:
        """Return the findings of each rank in a run; skip the test if the regime could not run."""
        if self[name, way][0].skipped:
            pytest.skip(self[name, way][0].skipped)
        return self[name, way]

    def __repr__(self) -> str:
        return f"<{len(self)} findings>"


def rank_main(rank: int, folder: str, pairs: list[Pair]) -> None:
    """Runs these regimes in these ways on one of two ranks, and writes each run and its findings to a file."""
    os.environ["TORCH_GRAD_EXPORTER_RANKS"] = "all"
    # A collection in a thread of gloo would end the process if it freed that thread's own process group, as wrappers do that
    # are held by cycles. One in this thread, after each run, also tells the other rank at once that this one has failed; it
    # looks only at what is new.
    gc.disable()
    kept = []
    plain = Run(Way.PLAIN)
    with Path(folder, str(rank)).open("wb", buffering=0) as report:
        for position, (name, way) in enumerate(pairs):
            report.write(pickle.dumps((name, way, None)))
            store = f"file://{folder}/store-{position}"
            dist.init_process_group("gloo", init_method=store, timeout=dt.timedelta(seconds=PATIENCE), rank=rank, world_size=2)
            finding = Finding()
            try:
                plain = observed(name, way, plain, finding)
            except pytest.skip.Exception as skipped:
                finding.skipped = str(skipped)
                dist.barrier()  # the other rank may still be joining the group
            except Exception:  # noqa: BLE001 - a run that fails is a finding like others
                finding.failed = traceback.format_exc()
            gc.collect()
            gc.freeze()
            if "powersgd" in name or "sparse" in name:  # a thread of gloo may still hold the group, or need the interpreter
                kept.append(dist.group.WORLD)
            dist.destroy_process_group()
            report.write(pickle.dumps((name, way, finding)))


def observed(name: str, way: Way, plain: Run, finding: Finding) -> Run:
    """Runs a regime, enters its differences from the record and from the plain run, and returns the plain run."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        let_torch_warn()
        run = REGIMES[name].run(way, tolerant=True)
    groups = dist.distributed_c10d._world.pg_map  # private: torch lists its process groups nowhere else
    finding.collectives = sum(group._get_sequence_number_for_group() for group in groups)  # private: nor counts collectives
    finding.wrong, finding.local_norms = run.wrong, run.local_norms
    finding.shown = {} if run.exporter is None else values(run.exporter)
    if way is Way.PLAIN:
        return run
    for what in ("losses", "state"):
        pairs = zip(getattr(run, what), getattr(plain, what), strict=True)
        finding.wrong += [f"{what}: {i} differs" for i, (a, b) in enumerate(pairs) if not same(local(a), local(b))]
    return plain


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank has."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def read(path: Path) -> Iterator[tuple[Pair, Finding | None]]:
    """Yield the findings that a rank wrote."""
    if not path.exists():
        return
    with path.open("rb") as report:
        while True:
            try:
                name, way, finding = pickle.load(report)  # noqa: S301 - written by the process that was started above
            except (EOFError, pickle.UnpicklingError):
                return
            yield (name, way), finding


@pytest.fixture(scope="module")
def findings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """The findings of both ranks in all regimes of the selected tests."""
    callspecs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    asked = [(spec.params["name"], spec.params.get("way", Way.EVERYTHING)) for spec in callspecs if spec is not None]
    pairs = [
        (name, way) for name in dict.fromkeys(name for name, _ in asked) for way in Way if way is Way.PLAIN or (name, way) in asked
    ]
    folder = tmp_path_factory.mktemp("ranks")
    ended = ""
    try:
        if not joined(start_ranks(rank_main, str(folder), pairs), TOGETHER):
            ended = f"did not end within {TOGETHER:.0f} s, all regimes together"
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        ended = f"the process ended: {error}"
    found = [dict(read(folder / str(rank))) for rank in range(2)]
    lost = Finding(failed=f"not run: an earlier regime {ended}")
    began = Finding(failed=f"in this regime: {ended}")
    return Findings({pair: [mine.get(pair, lost) or began for mine in found] for pair in pairs})


def complaints(name: str, way: Way, findings: Findings) -> list[str]:
    """Return what is wrong with a run on either rank."""
    found = []
    for rank, (mine, plain) in enumerate(zip(findings.of(name, way), findings[name, Way.PLAIN], strict=True)):
        said = [f"without an exporter: {plain.failed}"] if plain.failed else [mine.failed] if mine.failed else mine.wrong
        if not said and not mine.collectives == plain.collectives > 0:
            said = [f"{mine.collectives} collectives, {plain.collectives} without an exporter"]
        if not said and mine.shown[key("torch_grad_exporter_capture_mode", mode="backward")] != 1:
            said = ["the backward was not seen through the root's output"]
        found += [f"rank {rank}: {one}" for one in said]
    return found


@pytest.mark.parametrize("name", thinned(REGIMES))
def test_regime(name: str, findings: Findings) -> None:
    """On each rank the scrape agrees with the record, and losses, parameters and collectives are those of a run without."""
    assert complaints(name, Way.EVERYTHING, findings) == []


@pytest.mark.parametrize("name", thinned(name for name in REGIMES if name.startswith("ddp") and not name.startswith(UNKNOWN)))
def test_own_norms_are_shown(name: str, findings: Findings) -> None:
    """Each rank shows the norm of its own gradients, which is compared with float64, unless it cannot be known."""
    least = 1 if name == "ddp_an_old_gradient" else 4
    assert min(mine.local_norms for mine in findings.of(name, Way.EVERYTHING)) >= least


@pytest.mark.full
@pytest.mark.parametrize("way", [Way.DEFAULTS, Way.INSIDE], ids=lambda way: way.name.lower())
@pytest.mark.parametrize("name", FIRST.values())
def test_unchanged(name: str, way: Way, findings: Findings) -> None:
    """At the defaults, and with inspections, losses, parameters and collectives are those of a run without an exporter."""
    assert complaints(name, way, findings) == []


@pytest.mark.parametrize("name", thinned(name for name in REGIMES if name.startswith(("ddp", "zero")) and "uneven" not in name))
def test_ranks_agree(name: str, findings: Findings) -> None:
    """Ranks whose gradients are reduced show the same norms and counts, to the last bit."""
    first, second = (
        {one: value for one, value in mine.shown.items() if one[0] in EQUAL_ON_ALL_RANKS}
        for mine in findings.of(name, Way.EVERYTHING)
    )
    assert first
    assert first == second
