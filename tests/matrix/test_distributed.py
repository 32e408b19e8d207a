"""Every regime of training on two ranks, with the checks of `test_matrix.py` on both, and without a collective of ours.

Two processes run all the selected regimes in all ways and write their findings to files, which the tests read. Each run has its own
process group, so that a rank that fails ends the other rank's run and nothing else.
"""

from __future__ import annotations

import datetime as dt
import gc
import itertools
import os
import pickle
import time
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
from tests.matrix.harness import Naive, Run, Way
from tests.matrix.test_matrix import same
from tests.support.ranks import PATIENCE, joined, start_ranks
from tests.support.scrape import Key, key, values
from tests.support.torch_versions import let_torch_warn, need

pytestmark = pytest.mark.timeout(2000)  # the first test waits for the runs of all

TOGETHER = 1800.0
"""Seconds after which the ranks hang, with all regimes that were asked for."""

WAYS = (*Way, *Naive)

EQUAL_ON_ALL_RANKS = (
    "torch_grad_norm", "torch_grad_max_magnitude", "torch_grad_global_norm",
    "torch_grad_clip_coefficient", "torch_grad_nonfinite_steps_total",
)  # fmt: skip


REPRESENTATIVES = {
    "ddp[kind=plain]", "ddp_unused_parameters[set_to_none=True]", "ddp_no_sync[as_views=False]", "ddp_clip_grad_norm",
    "ddp_overflow_on_one_rank", "ddp_uneven_inputs", "zero_redundancy_optimizer", "fsdp[kind=resharded]",
    "fsdp_accumulation[kind=not synchronised]", "fsdp_clip_grad_norm", "fsdp_offloaded", "fsdp_uneven[layerwise=True]",
    "fsdp1[kind=flat]", "pipeline[kind=gpipe, divided, clipped]", "tensor_parallel",
}  # fmt: skip
"""The regimes that `make test` runs."""


def thinned(names: Iterable[str]) -> list[object]:
    """Return the names, the others than the representatives only for `make test-full`."""
    return [name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.full) for name in names]


@dataclass
class Finding:
    """The findings of one rank in one run. `collectives`: their number on this rank; `shown`: the last scrape."""

    wrong: list[str] = field(default_factory=list)
    failed: str = ""
    skipped: str = ""
    collectives: int = 0
    shown: dict[Key, float] = field(default_factory=dict)
    seconds: float = 0.0


class Findings(dict[tuple[str, object], list[Finding]]):
    """The findings of each rank, by regime and way."""

    def of(self, name: str, way: Way | Naive) -> list[Finding]:
        """Return the findings of each rank in a run; skip the test if the regime could not run."""
        found = self[name, way]
        if found[0].skipped:
            pytest.skip(found[0].skipped)
        return found

    def __repr__(self) -> str:
        return f"<{len(self)} findings>"


def rank_main(rank: int, folder: str, names: list[str], ways: list[Way | Naive]) -> None:
    """Runs these regimes in these ways on one of two ranks, and writes each run and its findings to a file."""
    os.environ["TORCH_GRAD_EXPORTER_RANKS"] = "all"
    # A collection in a thread of gloo would end the process if it freed that thread's own process group, as wrappers do that
    # are held by cycles. One in this thread, after each run, also tells the other rank at once that this one has failed; it
    # looks only at what is new.
    gc.disable()
    kept = []
    with Path(folder, str(rank)).open("wb", buffering=0) as report:
        for name in names:
            plain = Run(Way.PLAIN)
            for way in ways:
                report.write(pickle.dumps((name, way, None)))
                store = f"file://{folder}/{names.index(name)}-{ways.index(way)}"
                dist.init_process_group("gloo", init_method=store, timeout=dt.timedelta(seconds=PATIENCE), rank=rank, world_size=2)
                start = time.monotonic()
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
                if "powersgd" in name:  # the last of its callbacks may still be running in a thread of gloo, and holds the group
                    kept.append(dist.group.WORLD)
                dist.destroy_process_group()
                finding.seconds = time.monotonic() - start
                report.write(pickle.dumps((name, way, finding)))


def observed(name: str, way: Way | Naive, plain: Run, finding: Finding) -> Run:
    """Runs a regime, enters its differences from the record and from the plain run, and returns the plain run."""
    regime = REGIMES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        let_torch_warn()
        run = regime.run(Way.PLAIN, naive=way) if isinstance(way, Naive) else regime.run(way, tolerant=True)
    groups = dist.distributed_c10d._world.pg_map  # private: torch lists its process groups nowhere else
    finding.collectives = sum(group._get_sequence_number_for_group() for group in groups)  # private: nor counts collectives
    finding.wrong = run.wrong
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


def read(path: Path) -> Iterator[tuple[str, object, Finding | None]]:
    """Yield the findings that a rank wrote."""
    if not path.exists():
        return
    with path.open("rb") as report:
        while True:
            try:
                yield pickle.load(report)  # noqa: S301 - written by the process that was started above
            except (EOFError, pickle.UnpicklingError):
                return


@pytest.fixture(scope="module")
def findings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """The findings of both ranks in all regimes of the selected tests."""
    callspecs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    asked = [spec.params for spec in callspecs if spec is not None]
    names = list(dict.fromkeys(one["name"] for one in asked))
    ways = [way for way in WAYS if way in (Way.PLAIN, Way.EVERYTHING) or any(way in one.values() for one in asked)]
    folder = tmp_path_factory.mktemp("ranks")
    ended = ""
    try:
        if not joined(start_ranks(rank_main, str(folder), names, ways), TOGETHER):
            ended = f"did not end within {TOGETHER:.0f} s, all regimes together"
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        ended = f"the process ended: {error}"
    found = [{(name, way): finding for name, way, finding in read(folder / str(rank))} for rank in range(2)]
    lost = Finding(failed=f"not run: an earlier regime {ended}")
    began = Finding(failed=f"in this regime: {ended}")
    return Findings({one: [mine.get(one, lost) or began for mine in found] for one in itertools.product(names, ways)})


@pytest.mark.process
@pytest.mark.parametrize(
    "way",
    [Way.EVERYTHING, *(pytest.param(way, marks=pytest.mark.full) for way in (Way.DEFAULTS, Way.INSIDE, Way.ORIGIN))],
    ids=lambda way: way.name.lower(),
)
@pytest.mark.parametrize("name", thinned(REGIMES))
def test_regime(name: str, way: Way, findings: Findings) -> None:
    """On each rank the scrape agrees with the record, and losses, parameters and collectives are those of a run without."""
    complaints = []
    for rank, (mine, plain) in enumerate(zip(findings.of(name, way), findings[name, Way.PLAIN], strict=True)):
        said = [f"without an exporter: {plain.failed}"] if plain.failed else [mine.failed] if mine.failed else mine.wrong
        if not said and not mine.collectives == plain.collectives > 0:
            said = [f"{mine.collectives} collectives, {plain.collectives} without an exporter"]
        if not said and mine.shown[key("torch_grad_exporter_capture_mode", mode="output")] != 1:
            said = ["the backward was not seen through the root's output"]
        complaints += [f"rank {rank}: {one}" for one in said]
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize("name", thinned(name for name in REGIMES if name.startswith(("ddp", "zero")) and "uneven" not in name))
def test_ranks_agree(name: str, findings: Findings) -> None:
    """Ranks whose gradients are reduced show the same norms and counts, to the last bit."""
    first, second = (
        {one: value for one, value in mine.shown.items() if one[0] in EQUAL_ON_ALL_RANKS}
        for mine in findings.of(name, Way.EVERYTHING)
    )
    assert first
    assert first == second


@pytest.mark.full
@pytest.mark.parametrize("naive", Naive, ids=lambda naive: naive.name.lower())
@pytest.mark.parametrize("name", REGIMES)
def test_naive_capture_is_noticed(name: str, naive: Naive, findings: Findings) -> None:
    """A naive monitor is wrong on some rank in the regimes that say so, and right on all ranks in the others."""
    if name == "sequence_parallel":
        need(2, 10, "what a naive monitor misses there")
    assert not any(mine.failed for mine in findings.of(name, naive))
    wrong = [line for mine in findings[name, naive] for line in mine.wrong]
    assert bool(wrong) == (naive in REGIMES[name].catches), wrong
