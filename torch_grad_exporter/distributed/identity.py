"""Who this process is among the ranks of the run: from the process group, else from what a launcher put into the environment.

No collective is ever called: of the process group only its size and this rank are read, which every process knows by itself.
"""

from __future__ import annotations

import logging
import re
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist

from torch_grad_exporter.errors import say

logger = logging.getLogger("torch_grad_exporter")

LATE_GROUP = (
    "the process group came after the exporter: this rank's series carry rank %d, as those of the others may, and all show "
    "their layers; start the exporter after init_process_group, or with torchrun"
)


@dataclass(frozen=True, slots=True)
class Identity:
    """Rank and place of a process; a run without a launcher is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    # The launcher's name for the run, the same on all ranks and after a restart; empty if it has none.
    run: str = ""


def process_group() -> Identity | None:
    """Return this process' rank among all of the default process group, None without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return Identity(dist.get_rank(), dist.get_world_size())


def group_size() -> int:
    """Return the number of ranks in the default process group, 1 without one."""
    group = process_group()
    return 1 if group is None else group.world_size


class LateGroup:
    """Logs, once, that there is a process group of several ranks which came after the exporter."""

    def __init__(self, known: Identity, rank: int) -> None:
        self._known = known
        self._rank = rank
        self._logged = False

    def check(self) -> None:
        """Log it if there is one."""
        if not self._logged and self._known.world_size == 1 and group_size() > 1:
            self._logged = True
            say(logger, logging.WARNING, LATE_GROUP, self._rank)


def identity(environment: Mapping[str, str], group: Identity | None) -> Identity:
    """Return rank and size from the process group, else the launcher; place on the host and the run's name from the launcher.

    If ranks outnumber what was launched, as with `torch.multiprocessing.spawn`, each launched process, or else this host, is
    taken to have an equal, consecutive share of them.

    Args:
        environment: The variables of a launcher.
        group: This process in the default process group, None without one.

    Raises:
        ValueError: A variable is not a number.
    """
    launched = _launched(environment)
    if group is not None and (group.rank, group.world_size) != (launched.rank, launched.world_size):
        share = max(1, group.world_size // max(1, launched.world_size // launched.local_world_size))
        launched = Identity(
            rank=group.rank,
            world_size=group.world_size,
            local_rank=_number(environment, "LOCAL_RANK", group.rank % share),
            local_world_size=_number(environment, "LOCAL_WORLD_SIZE", share),
        )
    return replace(launched, run=_launchers_name(environment, launched))


# Launchers


def _launched(environment: Mapping[str, str]) -> Identity:
    """Return what the first of these launchers has set: torchrun, Open MPI and others of MPI, Slurm's srun, Kubernetes."""
    # mpirun starts a daemon on each host, under Slurm by srun: then Slurm's variables are the daemon's, and MPI's are right.
    return (
        _variables(environment, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        or _variables(environment, *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
        or _variables(environment, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", also="MPI_LOCALRANKID")
        or _variables(environment, "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", also="PMI_LOCAL_RANK")
        or _slurm(environment)
        or _variables(environment, "PMI_RANK", "PMI_SIZE")
        or _kubernetes(environment)
        or Identity()
    )


def _variables(
    environment: Mapping[str, str], rank: str, size: str, local_rank: str = "", local_size: str = "", *, also: str = ""
) -> Identity | None:
    """Return what these variables say, None unless the first one is there, and `also` if that is given."""
    if not environment.get(rank) or (also and not environment.get(also)):
        return None
    return Identity(
        rank=_number(environment, rank, 0),
        world_size=max(1, _number(environment, size, 1)),
        local_rank=_number(environment, local_rank, 0),
        local_world_size=max(1, _number(environment, local_size, 1)),
    )


_NO_TASKS = 0xFFFF_FF00  # from here on, Slurm's numbers of steps are names: of the batch script, of an interactive shell


def _slurm(environment: Mapping[str, str]) -> Identity | None:
    """Return what srun set. The shell of sbatch or salloc has most of its variables too, and is not a task of many."""
    step = environment.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _NO_TASKS or not environment.get("SLURM_PROCID"):
        return None
    return Identity(
        rank=_number(environment, "SLURM_PROCID", 0),
        world_size=max(1, _number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS", 1))),
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        local_world_size=_tasks_here(environment),
    )


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Return the number of the step's tasks on this host; Slurm writes `4(x2),1` for 4, 4 and 1."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is not None:
            counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environment, "SLURM_NODEID", 0)
    return counts[node] if 0 <= node < len(counts) else max(1, _number(environment, "SLURM_NTASKS_PER_NODE", 1))


def _kubernetes(environment: Mapping[str, str]) -> Identity | None:
    """Return the place in an indexed job with one process per pod. Without a size, the pods may work on things of their own."""
    index = environment.get("PET_NODE_RANK") or environment.get("JOB_COMPLETION_INDEX") or ""
    pods = environment.get("PET_NNODES") or environment.get("WORLD_SIZE") or ""
    if not index.isdecimal() or not pods.isdecimal() or not int(index) < int(pods):
        return None
    return Identity(rank=int(index), world_size=int(pods))


# Names


def _launchers_name(environment: Mapping[str, str], identity: Identity) -> str:
    """Return the `--rdzv-id` of torchrun, Slurm's job, or the job of these pods. None of them changes when the job restarts.

    Several steps of a Slurm job may train at a time: the first is named like the job, `77`, others as Slurm calls them, `77.1`. But
    a step that holds only some of the ranks, such as those of one host, is not a run.
    """
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if run not in ("", "none"):
        return run
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")
    slurm, step = _slurm(environment), environment.get("SLURM_STEP_ID", "0")
    if job and step != "0" and slurm is not None and slurm.world_size == identity.world_size:
        job = f"{job}.{step}"
    return job or _pods_job(environment, several=identity.world_size > identity.local_world_size)


def _pods_job(environment: Mapping[str, str], *, several: bool) -> str:
    """Return the name of the Kubernetes job, from this pod's; empty if it does not show, or if the pods are not one run."""
    pod, index = environment.get("HOSTNAME", ""), environment.get("JOB_COMPLETION_INDEX") or environment.get("PET_NODE_RANK") or ""
    if not several or not environment.get("KUBERNETES_SERVICE_HOST"):
        return ""
    kubeflow = re.fullmatch(r"(.+)-(?:master-0|worker-\d+|node-0-\d+)", pod)
    if kubeflow is not None:
        return kubeflow[1]
    return pod.removesuffix(f"-{index}") if index and pod.endswith(f"-{index}") else ""


def new_run_name(now: float) -> str:
    """Return a name for a run without one: its start, UTC, and a few random characters."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(2)}"


def hostname() -> str:
    """Return this host's name."""
    return socket.gethostname()


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(
            f"environment variable {name}={text!r}: a launcher sets it to a whole number; unset it or correct it"
        ) from None
