"""Control groups of both versions, as made trees and as this machine has them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.support.collected import series
from tests.support.tools import eventually
from torch_grad_exporter.collectors.container import ContainerCollector

LIMIT = ("torch_container_memory_limit_bytes",)
WORKING_SET = ("torch_container_memory_working_set_bytes",)
CORES = ("torch_container_cpu_limit_cores",)
THROTTLED = ("torch_container_cpu_throttled_seconds_total",)

GIB = 2**30
NO_LIMIT_1 = 9223372036854771712
"""What version 1 writes for "no limit" where pages have 4 KiB."""

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
MEMORY_1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
CPU_1 = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"


def write(directory: Path, files: Mapping[str, str | int]) -> None:
    """Files below a directory, by their paths."""
    for path, text in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")


def tree(root: Path, cgroup: str, mounts: list[str], files: Mapping[str, str | int]) -> dict[tuple[str, ...], float]:
    """What is collected from a made file system; `files` below /sys/fs/cgroup."""
    others = ["22 27 0:21 / /proc rw - proc proc rw", "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw"]
    write(root, {"proc/self/cgroup": cgroup, "proc/self/mountinfo": "\n".join([*others, *mounts])})
    write(root / "sys/fs/cgroup", files)
    return series(ContainerCollector(root=root))


def group_2(name: str, **files: str | int) -> dict[str, str | int]:
    """A group of version 2 with both controllers and no limit, but for what is given."""
    usual: dict[str, str | int] = {
        "memory.max": "max",
        "memory.current": 900,
        "memory.stat": "anon 500\ninactive_anon 3\ninactive_file 100\nactive_file 200",
        "cpu.max": "max 100000",
        "cpu.stat": "usage_usec 99\nnr_periods 7\nnr_throttled 3\nthrottled_usec 2500000",
    }
    return {f"{name}/{file}": text for file, text in (usual | {k.replace("_", ".", 1): v for k, v in files.items()}).items()}


def group_1(name: str, **files: str | int) -> dict[str, str | int]:
    """The same for version 1."""
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
    """Limits, the usage without inactive files and the throttled time of the process' own group, in base units."""
    files = group_2("job", memory_max=4 * GIB, memory_current=3 * GIB, memory_stat=f"inactive_file {GIB}", cpu_max="250000 100000")
    assert tree(tmp_path, "0::/job", [V2], files) == {LIMIT: 4 * GIB, WORKING_SET: 2 * GIB, CORES: 2.5, THROTTLED: 2.5}


def test_version_1(tmp_path: Path) -> None:
    """The same of version 1, whose controllers have a path and a mount each."""
    files = {
        "memory/a/memory.limit_in_bytes": 4 * GIB,
        "memory/a/memory.usage_in_bytes": 3 * GIB,
        "memory/a/memory.stat": f"inactive_file 1\nhierarchical_memory_limit {4 * GIB}\ntotal_inactive_file {GIB}",
        "cpu,cpuacct/b/c/cpu.cfs_quota_us": 150000,
        "cpu,cpuacct/b/c/cpu.cfs_period_us": 50000,
        "cpu,cpuacct/b/c/cpu.stat": "nr_periods 1\nthrottled_time 1500000000",
    }
    found = tree(tmp_path, "9:name=systemd:/x\n4:memory:/a\n2:cpu,cpuacct:/b/c", [MEMORY_1, CPU_1], files)
    assert found == {LIMIT: 4 * GIB, WORKING_SET: 2 * GIB, CORES: 3.0, THROTTLED: 1.5}


@pytest.mark.parametrize("sentinel", [NO_LIMIT_1, 2**63 - 2**16, 2**62])
def test_no_limit(tmp_path: Path, sentinel: int) -> None:
    """Without limits only the working set of the process' own group is there, on hosts with pages of any size."""
    assert tree(tmp_path / "2", "0::/job", [V2], group_2("job")) == {WORKING_SET: 800}
    stat = f"hierarchical_memory_limit {sentinel}\ntotal_inactive_file 300"
    files = group_1("job", memory_limit_in_bytes=sentinel, memory_stat=stat)
    assert tree(tmp_path / "1", "4:memory:/job\n2:cpu,cpuacct:/job", [MEMORY_1, CPU_1], files) == {WORKING_SET: 700}


def test_the_smallest_limit_of_nested_groups(tmp_path: Path) -> None:
    """An ancestor's smaller limit counts, with that ancestor's usage; memory and processors may be limited in different ones."""
    files = (
        group_2("pod", memory_max=2 * GIB, memory_current=1500, cpu_max="400000 100000", cpu_stat="throttled_usec 9000000")
        | group_2("pod/box", memory_max=8 * GIB, memory_current=700, cpu_max="50000 100000", cpu_stat="throttled_usec 1000000")
        | group_2("pod/box/task", memory_current=300)
    )
    found = tree(tmp_path / "2", "0::/pod/box/task", [V2], files)
    assert found == {LIMIT: 2 * GIB, WORKING_SET: 1400, CORES: 0.5, THROTTLED: 1.0}

    files = (
        group_1("pod", memory_limit_in_bytes=2 * GIB, memory_usage_in_bytes=1500)
        | group_1("pod/box", memory_limit_in_bytes=8 * GIB, cpu_cfs_quota_us=50000)
        | group_1("pod/box/task")
    )
    found = tree(tmp_path / "1", "4:memory:/pod/box/task\n2:cpu,cpuacct:/pod/box/task", [MEMORY_1, CPU_1], files)
    assert found == {LIMIT: 2 * GIB, WORKING_SET: 1200, CORES: 0.5, THROTTLED: 1.5}


def test_of_equal_limits_the_highest_counts(tmp_path: Path) -> None:
    """Where a group and the one above have the same limit, the one above reaches it first: its usage is shown."""
    files = group_2("pod", memory_max=GIB, memory_current=2000) | group_2("pod/box", memory_max=GIB, memory_current=500)
    assert tree(tmp_path, "0::/pod/box", [V2], files)[WORKING_SET] == 1900


def test_the_kernels_own_word_on_ancestors(tmp_path: Path) -> None:
    """In version 1 the kernel knows limits of groups that are out of sight, and of some that do not count."""
    mount = "35 31 0:32 /pod/box /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    files = group_1(".", memory_limit_in_bytes=8 * GIB, memory_stat=f"hierarchical_memory_limit {GIB}\ntotal_inactive_file 1")
    assert tree(tmp_path / "unseen", "4:memory:/pod/box", [mount], files) == {LIMIT: GIB, WORKING_SET: 999}

    own = group_1("a/b", memory_limit_in_bytes=4 * GIB, memory_stat=f"hierarchical_memory_limit {4 * GIB}\ntotal_inactive_file 2")
    files = group_1("a", memory_limit_in_bytes=GIB, memory_usage_in_bytes=77) | own
    assert tree(tmp_path / "apart", "4:memory:/a/b", [MEMORY_1], files) == {LIMIT: 4 * GIB, WORKING_SET: 998}


def test_hybrid(tmp_path: Path) -> None:
    """Each resource is where its controller is: memory in version 1, processors in version 2 here."""
    unified = V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    files = group_1("m", memory_limit_in_bytes=GIB) | group_2("unified/u", cpu_max="100000 100000", memory_max=5)
    files |= group_1("u", cpu_cfs_quota_us=700000)
    found = tree(tmp_path, "4:memory:/m\n0::/u", [MEMORY_1, CPU_1, unified], files)
    assert found == {LIMIT: GIB, WORKING_SET: 700, CORES: 1.0, THROTTLED: 2.5}


def test_a_controller_of_version_1_that_is_not_mounted(tmp_path: Path) -> None:
    """Listed for the process but mounted nowhere, it is looked for in version 2."""
    assert tree(tmp_path, "4:memory:/m\n0::/u", [V2], group_2("u", memory_max=GIB))[LIMIT] == GIB


def test_no_control_groups(tmp_path: Path) -> None:
    """Nothing is shown, and nothing fails, where there is no /proc, no group, no mount, or another system's files."""
    assert series(ContainerCollector(root=tmp_path / "nowhere")) == {}
    assert tree(tmp_path / "unmounted", "0::/job", [], {}) == {}
    assert tree(tmp_path / "absent", "", [V2], {"memory.max": 7}) == {}
    assert tree(tmp_path / "garbage", "what is\nthis:\n\n:::\n", ["neither - this", "nor - cgroup2", "1 2 3 - cgroup"], {}) == {}


def test_a_container_with_its_own_namespace(tmp_path: Path) -> None:
    """As in Docker on version 2: the path is the root, and the mount shows the container's own group there."""
    files = group_2(".", memory_max=GIB, memory_current=600, cpu_max="150000 100000")
    assert tree(tmp_path, "0::/", [V2], files) == {LIMIT: GIB, WORKING_SET: 500, CORES: 1.5, THROTTLED: 2.5}


def test_a_container_without_its_own_namespace(tmp_path: Path) -> None:
    """The path is the host's; the mount shows only the container's part of the tree, and says so in its root."""
    mount = V2.replace(" / /sys", " /kubepods/pod1/box /sys")
    files = group_2(".", memory_max=4 * GIB) | group_2("inner", memory_max=GIB, memory_current=350)
    assert tree(tmp_path / "own", "0::/kubepods/pod1/box", [mount], files)[LIMIT] == 4 * GIB
    found = tree(tmp_path / "inner", "0::/kubepods/pod1/box/inner", [mount], files)
    assert (found[LIMIT], found[WORKING_SET]) == (GIB, 250)
    # A name that only begins alike is another group, and so is one that is not shown at all.
    for number, path in enumerate(["/kubepods/pod1/box2", "/elsewhere", "/../..", "/../sibling"]):
        assert tree(tmp_path / str(number), f"0::{path}", [mount], files)[LIMIT] == 4 * GIB


def test_the_path_leads_out_of_the_namespace(tmp_path: Path) -> None:
    """A process whose group lies above what is mounted gets what is mounted, and nothing from beside it."""
    files = group_2(".", memory_max=3 * GIB) | group_2("sibling", memory_max=2 * GIB)
    files |= {"../memory.max": 5, "../../memory.max": 5, "../../../memory.max": 5}
    assert tree(tmp_path / "path", "0::/../..", [V2], files)[LIMIT] == 3 * GIB
    # A mount that was made outside shows more than the process' own part: how far down that is is not shown,
    outside = V2.replace(" / /sys", " /../.. /sys")
    assert tree(tmp_path / "mount", "0::/", [outside], files)[LIMIT] == 3 * GIB
    # but of a group beside it that is known.
    assert tree(tmp_path / "sibling", "0::/../../sibling", [outside], files)[LIMIT] == 2 * GIB


def test_the_mount_that_shows_most(tmp_path: Path) -> None:
    """Of several mounts of the hierarchy the one is taken that shows the group with the most above it."""
    part = "40 23 0:26 /pod/box /var/lib/box/sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    files = group_2("pod", memory_max=GIB) | group_2("pod/box")
    write(tmp_path / "var/lib/box/sys/fs/cgroup", {"memory.max": 2 * GIB})
    assert tree(tmp_path, "0::/pod/box", [part, V2], files)[LIMIT] == GIB


def test_names_with_spaces_and_colons(tmp_path: Path) -> None:
    """The kernel writes spaces in mountinfo in octal, and a group's name may have colons."""
    mount = r"35 31 0:26 / /sys/fs/cgroup/my\040groups rw - cgroup2 cgroup2 rw"
    assert tree(tmp_path, "0::/a b:c", [mount], group_2("my groups/a b:c", memory_max=GIB))[LIMIT] == GIB


def test_the_root_group(tmp_path: Path) -> None:
    """On a host's root group version 2 has no such files: everything is absent."""
    assert tree(tmp_path, "0::/", [V2], {"cgroup.controllers": "cpu memory"}) == {}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A value whose file is missing, is no file or makes no sense is absent; the others are there."""
    limited = {"memory_max": GIB, "cpu_max": "200000 100000"}
    cases = {
        "memory.max": (LIMIT,),
        "memory.current": (WORKING_SET,),
        "memory.stat": (WORKING_SET,),
        "cpu.max": (CORES, THROTTLED),
        "cpu.stat": (THROTTLED,),
    }
    everything = {LIMIT, WORKING_SET, CORES, THROTTLED}
    for file, missing in cases.items():
        for how in ("gone", "directory", "garbage", "bytes"):
            root = tmp_path / file / how
            tree(root, "0::/job", [V2], group_2("job", **limited))
            path = root / "sys/fs/cgroup/job" / file
            path.unlink()
            if how == "directory":
                path.mkdir()
            elif how != "gone":
                path.write_bytes(b"inactive_file many\nthrottled_usec -\n" if how == "garbage" else b"\xff\xfe 1\n")
            assert set(series(ContainerCollector(root=root))) == everything - set(missing), (file, how)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_without_permission(tmp_path: Path) -> None:
    """A file that may not be read makes its value absent."""
    tree(tmp_path, "0::/job", [V2], group_2("job", memory_max=GIB))
    (tmp_path / "sys/fs/cgroup/job/memory.max").chmod(0)
    assert LIMIT not in series(ContainerCollector(root=tmp_path))


@contextlib.contextmanager
def closed(directory: Path) -> Iterator[None]:
    """This user cannot enter the directory meanwhile; root cannot either, once it acts as another user."""
    directory.chmod(0)
    if root := os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        directory.chmod(0o700)


def test_a_group_below_a_closed_directory() -> None:
    """Where a directory above may not be entered, what is mounted counts as for any path that is not shown; nothing fails."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        files = group_2(".", memory_max=GIB) | group_2("pod/box", memory_max=7)
        assert tree(root, "0::/pod/box", [V2], files)[LIMIT] == 7
        known, new = ContainerCollector(root=root), ContainerCollector(root=root)
        assert series(known)[LIMIT] == 7
        with closed(root / "sys/fs/cgroup/pod"):
            assert [series(known)[LIMIT], series(new)[LIMIT]] == [GIB, GIB]


def test_senseless_quotas(tmp_path: Path) -> None:
    """A quota or a period of nothing is no limit."""
    for number, quota in enumerate(["0 100000", "100000 0", "-1 100000", "100000", "", "max"]):
        assert CORES not in tree(tmp_path / str(number), "0::/job", [V2], group_2("job", cpu_max=quota))


def test_the_working_set_is_never_negative(tmp_path: Path) -> None:
    """Usage and cache are read one after the other, so the second may be larger."""
    files = group_2("job", memory_current=100, memory_stat="inactive_file 150")
    assert tree(tmp_path, "0::/job", [V2], files)[WORKING_SET] == 0


def test_a_process_that_is_moved(tmp_path: Path) -> None:
    """The next collection reads the new group; also where the old one vanished under the same name and is seen elsewhere."""
    tree(tmp_path, "0::/a", [V2], group_2("a", memory_max=GIB) | group_2("b", memory_max=2 * GIB))
    collector = ContainerCollector(root=tmp_path)
    assert series(collector)[LIMIT] == GIB
    write(tmp_path, {"proc/self/cgroup": "0::/b"})
    assert series(collector)[LIMIT] == 2 * GIB

    (tmp_path / "sys/fs/cgroup/b").rename(tmp_path / "sys/fs/cgroup/c")
    write(tmp_path, {"proc/self/mountinfo": V2.replace(" / /sys/fs/cgroup ", " /b /sys/fs/cgroup/c ")})
    assert series(collector)[LIMIT] == 2 * GIB


def throttled(root: Path, collector: ContainerCollector, limits: Mapping[str, str], seconds: Mapping[str, float]) -> float | None:
    """The counter, with these quotas and these times of the groups."""
    write(root / "sys/fs/cgroup", {f"{group}/cpu.max": f"{quota} 100000" for group, quota in limits.items()})
    write(root / "sys/fs/cgroup", {f"{group}/cpu.stat": f"throttled_usec {int(time * 1e6)}" for group, time in seconds.items()})
    return series(collector).get(THROTTLED)


def test_a_limit_that_moves_to_another_group(tmp_path: Path) -> None:
    """The time goes on from where it was: of the group that becomes the smallest limit only what is new is added."""
    tree(tmp_path, "0::/pod/box", [V2], group_2("pod") | group_2("pod/box"))
    collector = ContainerCollector(root=tmp_path)
    own, above, none = ({"pod": pod, "pod/box": box} for pod, box in (("400000", "200000"), ("400000", "max"), ("max", "max")))
    steps = [
        (own, {"pod": 900, "pod/box": 7}, 7),
        (own, {"pod": 901, "pod/box": 8}, 8),
        (above, {"pod": 902, "pod/box": 9}, 8),
        (above, {"pod": 905, "pod/box": 10}, 11),
        (none, {"pod": 906, "pod/box": 11}, None),
        (above, {"pod": 907, "pod/box": 11}, 13),
        (own, {"pod": 908, "pod/box": 50}, 13),
        (own, {"pod": 909, "pod/box": 50.5}, 13.5),
        (own, {"pod": 909, "pod/box": 1}, 13.5),
        (own, {"pod": 909, "pod/box": 2}, 14.5),
    ]
    assert [throttled(tmp_path, collector, limits, seconds) for limits, seconds, _ in steps] == [total for *_, total in steps]


def test_time_that_cannot_be_read_for_a_while_counts_once(tmp_path: Path) -> None:
    """A scrape without it has no value, and the next one goes on."""
    tree(tmp_path, "0::/box", [V2], group_2("box", cpu_max="50000 100000", cpu_stat="throttled_usec 7000000"))
    collector, stat = ContainerCollector(root=tmp_path), tmp_path / "sys/fs/cgroup/box/cpu.stat"
    totals = []
    for text in ("throttled_usec 7000000", "", "throttled_usec 8000000"):
        stat.write_text(text)
        totals.append(series(collector).get(THROTTLED))
    assert totals == [7, None, 8]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a named pipe")
def test_two_scrapes_at_once_count_time_once(tmp_path: Path) -> None:
    """A scrape whose reading is overtaken by another's does not make the next one count what lies between again."""
    tree(tmp_path, "0::/box", [V2], group_2("box", cpu_max="50000 100000"))
    collector, stat = ContainerCollector(root=tmp_path), tmp_path / "sys/fs/cgroup/box/cpu.stat"
    stat.unlink()
    os.mkfifo(stat)
    pipe: list[int] = []

    def is_read() -> bool:
        with contextlib.suppress(OSError):  # It has not been opened yet.
            pipe.append(os.open(stat, os.O_WRONLY | os.O_NONBLOCK))
        return bool(pipe)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(series, collector)
        assert eventually(is_read)
        write(tmp_path, {"new": "throttled_usec 10000000"})
        (tmp_path / "new").rename(stat)
        second = pool.submit(series, collector)
        wait([second], timeout=0.2)
        os.write(pipe[0], b"throttled_usec 8000000")
        os.close(pipe[0])
    assert (first.result()[THROTTLED], second.result()[THROTTLED], series(collector)[THROTTLED]) == (8, 10, 10)


def test_mounts_are_not_listed_each_time(tmp_path: Path) -> None:
    """As long as the process stays in its group, the table of mounts is not read again."""
    tree(tmp_path, "0::/a", [V2], group_2("a", memory_max=GIB))
    collector = ContainerCollector(root=tmp_path)
    before = series(collector)
    (tmp_path / "proc/self/mountinfo").unlink()
    assert series(collector) == before


def test_two_scrapes_at_once(tmp_path: Path) -> None:
    """Threads that collect while the process moves to and fro see a limit always with the usage of the same group."""
    files = group_2("a", memory_max=GIB, memory_current=500) | group_2("b", memory_max=2 * GIB, memory_current=700)
    tree(tmp_path, "0::/a", [V2], files)
    collector = ContainerCollector(root=tmp_path)

    def move() -> None:
        for number in range(100):
            (tmp_path / "new").write_text(f"0::/{'ba'[number % 2]}\n")
            (tmp_path / "new").rename(tmp_path / "proc/self/cgroup")

    with ThreadPoolExecutor(3) as pool:
        moving = pool.submit(move)
        found = list(pool.map(lambda _: series(collector), range(100)))
        moving.result()
    assert {(one[LIMIT], one[WORKING_SET]) for one in found} <= {(GIB, 400), (2 * GIB, 600)}


def naive(controller: str) -> list[Path]:
    """This process' group and those above it on this machine, from the top, by the shortest way there is."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    first = [(p, m) for _, cs, p in lines if controller in cs.split(",") for m in mounts if controller in m[-1].split(",")]
    found = first or [(p, m) for _, cs, p in lines if not cs for m in mounts if "cgroup2" in m[-3:]]
    path, mount = found[0]
    current, way = Path(mount[4]), [Path(mount[4])]
    for part in path.split("/"):
        current = current / part
        if part and current.is_dir():
            way.append(current)
    return way


def first_words(directories: list[Path], name: str) -> list[str]:
    """The first word of the file in each directory that has it."""
    return [(directory / name).read_text().split()[0] for directory in directories if (directory / name).exists()]


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="control groups are Linux'")
def test_this_machine() -> None:
    """What the collector finds here is what a plain loop over the same files finds."""
    memory, cpu = naive("memory"), naive("cpu")
    found = series(ContainerCollector())
    limits = [int(word) for name in ("memory.limit_in_bytes", "memory.max") for word in first_words(memory, name) if word != "max"]
    limits = [limit for limit in limits if limit < 2**60]
    assert found.get(LIMIT) == (min(limits) if limits else None)
    usage = first_words(memory, "memory.usage_in_bytes") + first_words(memory, "memory.current")
    if usage and not limits:
        # Others in the group go on meanwhile.
        assert 0 < found[WORKING_SET] <= 2 * int(usage[-1])
    quotas = [int(word) for name in ("cpu.cfs_quota_us", "cpu.max") for word in first_words(cpu, name) if word not in ("max", "-1")]
    if not quotas:
        assert not {CORES, THROTTLED} & set(found)
    elif set(first_words(cpu, "cpu.cfs_period_us")) <= {"100000"}:  # The usual one, of version 2 as well.
        assert (found[CORES], THROTTLED in found) == (min(quotas) / 100000, True)
