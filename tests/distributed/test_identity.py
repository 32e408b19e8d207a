from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.tools import PATIENCE
from torch_grad_exporter.distributed.identity import Identity, identity, process_group

SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_RESTART_COUNT": "2",
}  # fmt: skip
SBATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}
OPEN_MPI = {"RANK": "6", "SIZE": "8", "LOCAL_RANK": "2", "LOCAL_SIZE": "4"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}

ENVIRONMENTS: dict[str, tuple[dict[str, str], Identity]] = {
    "nothing": ({}, Identity(0, 1, 0, 1, "")),
    "torchrun": (TORCHRUN, Identity(3, 4, 1, 2, "")),
    "torchrun with a name": (TORCHRUN | {"TORCHELASTIC_RUN_ID": "x"}, Identity(3, 4, 1, 2, "x")),
    "srun": (SRUN, Identity(5, 9, 1, 4, "77")),
    "srun without counts": (
        {"SLURM_STEP_ID": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_LOCALID": "1"},
        Identity(1, 2, 1, 2, ""),
    ),
    "srun of a part of the job": (SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, Identity(1, 2, 1, 4, "77")),
    "a Slurm array": (SRUN | {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "7"}, Identity(5, 9, 1, 4, "70_7")),
    "the second step of a job": (SRUN | {"SLURM_STEP_ID": "1"}, Identity(5, 9, 1, 4, "77.1")),
    "torchrun of one host in a step of its own": (SRUN | TORCHRUN | {"SLURM_STEP_ID": "1"}, Identity(3, 4, 1, 2, "77")),
    "the shell of sbatch": (SBATCH, Identity(0, 1, 0, 1, "77")),
    "an interactive step": (SBATCH | {"SLURM_STEP_ID": "4294967290"}, Identity(0, 1, 0, 1, "77")),
    "torchrun in srun": (SRUN | TORCHRUN, Identity(3, 4, 1, 2, "77")),
    "Open MPI, whose daemon srun started": (
        SRUN | {f"OMPI_COMM_WORLD_{name}": value for name, value in OPEN_MPI.items()},
        Identity(6, 8, 2, 4, "77"),
    ),
    "Hydra, whose daemon srun started": (
        SRUN | {"PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"},
        Identity(6, 8, 2, 4, "77"),
    ),
    "PALS": ({"PMI_RANK": "6", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "2", "PMI_LOCAL_SIZE": "4"}, Identity(6, 8, 2, 4, "")),
    "PMI alone": ({"PMI_RANK": "6", "PMI_SIZE": "8"}, Identity(6, 8, 0, 1, "")),
    "PyTorchJob, worker": (POD | {"RANK": "2", "WORLD_SIZE": "3", "HOSTNAME": "big-run-worker-1"}, Identity(2, 3, 0, 1, "big-run")),
    "TrainJob": (
        POD | {"PET_NNODES": "12", "PET_NODE_RANK": "11", "PET_NPROC_PER_NODE": "1", "HOSTNAME": "tune-node-0-11"},
        Identity(11, 12, 0, 1, "tune"),
    ),
    "TrainJob with torchrun": (POD | TORCHRUN | {"PET_NNODES": "2", "HOSTNAME": "tune-node-0-1"}, Identity(3, 4, 1, 2, "tune")),
    "an indexed job": (POD | {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4", "HOSTNAME": "fit-3"}, Identity(3, 4, 0, 1, "fit")),
    "an indexed job of single runs": (POD | {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "fit-3"}, Identity(0, 1, 0, 1, "")),
    "an indexed job of single hosts": (
        POD | TORCHRUN | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "3", "HOSTNAME": "fit-3"},
        Identity(3, 4, 3, 4, ""),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_launcher(name: str) -> None:
    """Rank, size, place on the host and name of the run follow from what the launcher has set."""
    environment, expected = ENVIRONMENTS[name]
    assert identity(environment, None) == expected


@pytest.mark.parametrize(
    ("environment", "place", "expected"),
    [
        (TORCHRUN, Identity(3, 4), Identity(3, 4, 1, 2)),
        (TORCHRUN, Identity(1, 2), Identity(1, 2, 1, 2)),
        ({}, Identity(2, 4), Identity(2, 4, 2, 4)),
        ({"LOCAL_RANK": "1"}, Identity(3, 4), Identity(3, 4, 1, 4)),
        (SBATCH, Identity(7, 8), Identity(7, 8, 7, 8, "77")),
        (SRUN | {"SLURM_STEP_ID": "1"}, Identity(5, 18), Identity(5, 18, 5, 9, "77")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Identity(13, 16), Identity(13, 16, 5, 8)),
    ],
    ids=["same", "another group", "spawned", "local rank known", "spawned in sbatch", "two steps", "spawned in two pods"],
)  # fmt: skip
def test_the_process_group_wins(environment: dict[str, str], place: Identity, expected: Identity) -> None:
    """Rank and size are the process group's; spawned ranks share the launched processes, or this host, equally."""
    assert identity(environment, place) == expected


def test_a_real_process_group_is_asked() -> None:
    """The default process group's rank and size are found as soon as there is one."""
    assert identity({}, process_group()) == Identity()
    dist.init_process_group("fake", rank=5, world_size=7, store=FakeStore())
    try:
        assert identity({}, process_group()) == Identity(5, 7, 5, 7)
    finally:
        dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.process
def test_without_torch_distributed() -> None:
    """On a build of torch without `torch.distributed` a process is rank 0 of 1, and there is no store."""
    script = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
for name in set(dir(dist)) - {"is_available"}:
    if not name.startswith("__"):
        delattr(dist, name)
dist.is_available = lambda: False
from torch_grad_exporter.distributed.identity import Identity, identity, process_group
from torch_grad_exporter.distributed.store import JobStore, StoreError
assert identity({}, process_group()) == Identity()
try:
    JobStore().agree("run", "x")
except StoreError as error:
    assert "no torch.distributed" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)
