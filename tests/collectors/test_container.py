"""Control groups of both versions, as made trees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.collected import series
from torch_grad_exporter.collectors.container import ContainerCollector
from torch_grad_exporter.resources.host_memory import available_memory

LIMIT = ("torch_container_memory_limit_bytes",)
WORKING_SET = ("torch_container_memory_working_set_bytes",)
CORES = ("torch_container_cpu_limit_cores",)
THROTTLED = ("torch_container_cpu_throttled_seconds_total",)

GIB = 2**30
NO_LIMIT_1 = 9223372036854771712  # what version 1 writes for "no limit" where pages have 4 KiB


def write(directory: Path, files: Mapping[str, str | int]) -> None:
    """Write files below a directory, by their paths."""
    for path, text in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")


def tree(root: Path, cgroup: str, files: Mapping[str, str | int]) -> dict[tuple[str, ...], float]:
    """Return what is collected from a made file system; `files` are below /sys/fs/cgroup."""
    write(root, {"proc/self/cgroup": cgroup})
    write(root / "sys/fs/cgroup", files)
    return series(ContainerCollector(root=root))


def group_2(name: str, **files: str | int) -> dict[str, str | int]:
    """Return a group of version 2 with both controllers and no limit but the given ones."""
    usual: dict[str, str | int] = {
        "memory.max": "max",
        "memory.current": 900,
        "memory.stat": "anon 500\ninactive_anon 3\ninactive_file 100\nactive_file 200",
        "cpu.max": "max 100000",
        "cpu.stat": "usage_usec 99\nnr_periods 7\nnr_throttled 3\nthrottled_usec 2500000",
    }
    return {f"{name}/{file}": text for file, text in (usual | {k.replace("_", ".", 1): v for k, v in files.items()}).items()}


def group_1(name: str, **files: str | int) -> dict[str, str | int]:
    """Return the same for version 1."""
    memory: dict[str, str | int] = {
        "memory.limit_in_bytes": NO_LIMIT_1,
        "memory.usage_in_bytes": 1000,
        "memory.stat": "cache 5\ninactive_file 7\ntotal_cache 400\ntotal_inactive_file 300",
    }
    cpu: dict[str, str | int] = {
        "cpu.cfs_quota_us": -1,
        "cpu.cfs_period_us": 100000,
        "cpu.stat": "nr_periods 7\nnr_throttled 3\nthrottled_time 1500000000",
    }
    given = {k.replace("_", ".", 1): v for k, v in files.items()}
    return {
        f"{hierarchy}/{name}/{file}": given.get(file, text)
        for hierarchy, usual in (("memory", memory), ("cpu,cpuacct", cpu))
        for file, text in usual.items()
    }


def test_version_2(tmp_path: Path) -> None:
    """Limits, usage without inactive files and throttled time are those of the process' own group, in base units."""
    files = group_2("job", memory_max=4 * GIB, memory_current=3 * GIB, memory_stat=f"inactive_file {GIB}", cpu_max="250000 100000")
    assert tree(tmp_path, "0::/job", files) == {LIMIT: 4 * GIB, WORKING_SET: 2 * GIB, CORES: 2.5, THROTTLED: 2.5}


def test_version_1(tmp_path: Path) -> None:
    """The same holds for version 1, whose controllers have a path and a mount each."""
    files = {
        "memory/a/memory.limit_in_bytes": 4 * GIB,
        "memory/a/memory.usage_in_bytes": 3 * GIB,
        "memory/a/memory.stat": f"inactive_file 1\nhierarchical_memory_limit {4 * GIB}\ntotal_inactive_file {GIB}",
        "cpu,cpuacct/b/c/cpu.cfs_quota_us": 150000,
        "cpu,cpuacct/b/c/cpu.cfs_period_us": 50000,
        "cpu,cpuacct/b/c/cpu.stat": "nr_periods 1\nthrottled_time 1500000000",
    }
    found = tree(tmp_path, "9:name=systemd:/x\n4:memory:/a\n2:cpu,cpuacct:/b/c", files)
    assert found == {LIMIT: 4 * GIB, WORKING_SET: 2 * GIB, CORES: 3.0, THROTTLED: 1.5}


@pytest.mark.parametrize("sentinel", [NO_LIMIT_1, 2**62])
def test_no_limit(tmp_path: Path, sentinel: int) -> None:
    """Without limits only the working set is shown, on hosts with pages of any size."""
    assert tree(tmp_path / "2", "0::/job", group_2("job")) == {WORKING_SET: 800}
    stat = f"hierarchical_memory_limit {sentinel}\ntotal_inactive_file 300"
    files = group_1("job", memory_limit_in_bytes=sentinel, memory_stat=stat)
    assert tree(tmp_path / "1", "4:memory:/job\n2:cpu,cpuacct:/job", files) == {WORKING_SET: 700}


def test_the_smallest_limit_of_nested_groups(tmp_path: Path) -> None:
    """The smallest limit of all ancestors counts, with that ancestor's usage, for each resource on its own."""
    files = (
        group_2("pod", memory_max=2 * GIB, memory_current=1500, cpu_max="400000 100000", cpu_stat="throttled_usec 9000000")
        | group_2("pod/box", memory_max=8 * GIB, memory_current=700, cpu_max="50000 100000", cpu_stat="throttled_usec 1000000")
        | group_2("pod/box/task", memory_current=300)
    )
    found = tree(tmp_path / "2", "0::/pod/box/task", files)
    assert found == {LIMIT: 2 * GIB, WORKING_SET: 1400, CORES: 0.5, THROTTLED: 1.0}

    files = (
        group_1("pod", memory_limit_in_bytes=2 * GIB, memory_usage_in_bytes=1500)
        | group_1("pod/box", memory_limit_in_bytes=8 * GIB, cpu_cfs_quota_us=50000)
        | group_1("pod/box/task")
    )
    found = tree(tmp_path / "1", "4:memory:/pod/box/task\n2:cpu,cpuacct:/pod/box/task", files)
    assert found == {LIMIT: 2 * GIB, WORKING_SET: 1200, CORES: 0.5, THROTTLED: 1.5}


def test_of_equal_limits_the_highest_counts(tmp_path: Path) -> None:
    """Of equal limits that of the highest group counts, since it is reached first."""
    files = group_2("pod", memory_max=GIB, memory_current=2000) | group_2("pod/box", memory_max=GIB, memory_current=500)
    assert tree(tmp_path, "0::/pod/box", files)[WORKING_SET] == 1900


def test_hybrid(tmp_path: Path) -> None:
    """Each resource is read where its controller is: memory in version 1, processors in version 2."""
    files = group_1("m", memory_limit_in_bytes=GIB) | group_2("unified/u", cpu_max="100000 100000", memory_max=5)
    files |= group_1("u", cpu_cfs_quota_us=700000)
    found = tree(tmp_path, "4:memory:/m\n0::/u", files)
    assert found == {LIMIT: GIB, WORKING_SET: 700, CORES: 1.0, THROTTLED: 2.5}


def test_no_control_groups(tmp_path: Path) -> None:
    """Without /proc, group or mount, or with files of another kind, nothing is shown and nothing fails."""
    assert series(ContainerCollector(root=tmp_path / "nowhere")) == {}
    assert tree(tmp_path / "unmounted", "0::/job", {}) == {}
    assert tree(tmp_path / "absent", "", {"memory.max": 7}) == {}
    assert tree(tmp_path / "garbage", "what is\nthis:\n\n:::\n", {}) == {}


@pytest.mark.parametrize("path", ["/kubepods/pod1/box", "/kubepods/pod1/box/inner", "/../..", "/../sibling"])
def test_a_path_of_another_namespace(tmp_path: Path, path: str) -> None:
    """If the path is the host's, as without a namespace of the container's own, the mounted group is taken."""
    files = group_2(".", memory_max=4 * GIB) | group_2("inner", memory_max=GIB)
    assert tree(tmp_path, f"0::{path}", files)[LIMIT] == 4 * GIB


@pytest.mark.parametrize("content", [None, b"inactive_file many\nthrottled_usec -\n", b"\xff\xfe 1\n"])
@pytest.mark.parametrize(
    ("file", "missing"),
    [("memory.max", {LIMIT}), ("memory.current", {WORKING_SET}), ("cpu.max", {CORES, THROTTLED}), ("cpu.stat", {THROTTLED})],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, file: str, missing: set[tuple[str]], content: bytes | None) -> None:
    """A value whose file is missing or makes no sense is absent; the others are shown."""
    tree(tmp_path, "0::/job", group_2("job", memory_max=GIB, cpu_max="200000 100000"))
    path = tmp_path / "sys/fs/cgroup/job" / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert set(series(ContainerCollector(root=tmp_path))) == {LIMIT, WORKING_SET, CORES, THROTTLED} - missing


def test_a_process_that_is_moved(tmp_path: Path) -> None:
    """The next collection reads the new group."""
    tree(tmp_path, "0::/a", group_2("a", memory_max=GIB) | group_2("b", memory_max=2 * GIB))
    collector = ContainerCollector(root=tmp_path)
    assert series(collector)[LIMIT] == GIB
    write(tmp_path, {"proc/self/cgroup": "0::/b"})
    assert series(collector)[LIMIT] == 2 * GIB


def test_available_memory_is_what_the_group_leaves(tmp_path: Path) -> None:
    """What a process may still take is the limit of its group without what that uses; without a limit, what the host has."""
    write(tmp_path, {"proc/self/cgroup": "0::/job"})
    write(tmp_path / "sys/fs/cgroup", {"cgroup.controllers": "cpu memory", **group_2("job", memory_max=1000)})
    assert available_memory(root=tmp_path) == 200
    host = available_memory(root=tmp_path / "nowhere")
    assert host is not None
    assert host > 2**20
