"""What is left of memory, as the machine, made-up control groups and a real one say; and of descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from control_groups import GROUP_BYTES

from ups_store.system import memory
from ups_store.system.memory import available_bytes, cgroup_available_bytes, free_descriptors, num_cores

V1_UNLIMITED = 9223372036854771712  # what the kernel writes: LONG_MAX in whole pages


def v2(
    *, used: int, max_: int | str = "max", high: int | str = "max", file: tuple[int, int] = (0, 0)
) -> dict[str, str]:
    return {
        "memory.max": f"{max_}\n",
        "memory.high": f"{high}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\nfile 9\ninactive_file {file[0]}\nactive_file {file[1]}\nslab 3\n",
    }


def v1(*, used: int, limit: int, file: tuple[int, int] = (0, 0)) -> dict[str, str]:
    stat = f"cache 7\ninactive_file 1\ntotal_inactive_file {file[0]}\ntotal_active_file {file[1]}\n"
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": stat,
    }


def write_groups(folder: Path, membership: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    for group, contents in groups.items():
        place = folder / "cgroup" / group
        place.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (place / name).write_text(text)
    (folder / "membership").write_text(membership)


@pytest.mark.parametrize(
    ("membership", "groups", "expected"),
    [
        ("0::/a/job\n", {"a/job": v2(used=300, max_=1000), "a": v2(used=700, max_=900)}, [700, 200]),
        ("0::/job\n", {"job": v2(used=900, max_=1000, file=(300, 200))}, [600]),  # pages of files count
        ("0::/job\n", {"job": v2(used=100, max_=1000, high=400)}, [900, 300]),
        ("0::/job\n", {"job": v2(used=100, high=40)}, [-60]),
        ("0::/job\n", {"job": v2(used=100)}, []),
        ("0::/docker/0123\n", {".": v2(used=400, max_=1000)}, [600]),  # in a container, with the host's path
        (
            "5:devices:/job\n4:memory:/slurm/job\n1:name=systemd:/x\n0::/\n",
            {
                "memory/slurm/job": v1(used=500, limit=800, file=(100, 50)),
                "memory/slurm": v1(used=600, limit=V1_UNLIMITED),
            },
            [450, V1_UNLIMITED - 600],
        ),
        ("4:hugetlb,memory:/docker/0123\n", {"memory": v1(used=500, limit=800)}, [300]),
    ],
)
def test_limit_of_every_control_group_counts(
    tmp_path: Path, membership: str, groups: Mapping[str, Mapping[str, str]], expected: list[int]
) -> None:
    write_groups(tmp_path, membership, groups)
    assert list(cgroup_available_bytes(tmp_path / "cgroup", tmp_path / "membership")) == expected


@pytest.mark.parametrize(
    ("groups", "expected"), [([5 << 30, 3 << 30], 3 << 30), ([8 << 30], 4 << 30), ([], 4 << 30), ([-9], 0)]
)
def test_available_bytes_is_the_least_of_machine_and_groups(
    groups: list[int], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {4 << 20} kB\nBuffers: 1 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "cgroup_available_bytes", lambda root, membership: iter(groups))
    assert available_bytes() == expected


@pytest.mark.multi_process
def test_memory_in_a_real_control_group_is_at_most_its_limit(limited_group: Path) -> None:
    """Asked by the public name."""
    code = (
        "import sys, ups_store; ups_store.available_memory_bytes(); open(sys.argv[1], 'w').write('0')\n"
        "print(ups_store.available_memory_bytes())"
    )
    command = [sys.executable, "-c", code, limited_group]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert GROUP_BYTES // 2 < int(done.stdout) <= GROUP_BYTES


# --- cores and descriptors ----------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine of which the process may use three cores; the folder of its control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 7})
    monkeypatch.setattr(memory, "_CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "membership")
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    memory._core_limit.cache_clear()
    yield tmp_path
    memory._core_limit.cache_clear()


@pytest.mark.parametrize(
    ("membership", "groups", "expected"),
    [
        ("0::/a/b\n", {"a/b": {"cpu.max": "max 100000\n"}, "a": {"cpu.max": "150000 100000\n"}}, 2),
        ("0::/a/b\n", {"a/b": {"cpu.max": "50000 100000\n"}, "a": {"cpu.max": "200000 100000\n"}}, 1),
        ("0::/a\n", {"a": {"cpu.max": "1000 100000\n"}}, 1),
        ("0::/a\n", {"a": {"cpu.max": "max 100000\n"}}, 3),
        ("0::/a\n", {"a": {"cpu.max": "900000 100000\n"}}, 3),
        (
            "4:cpu,cpuacct:/a\n",
            {"cpu/a": {"cpu.cfs_quota_us": "200000\n", "cpu.cfs_period_us": "100000\n"}},
            2,
        ),
        ("4:cpu,cpuacct:/a\n", {"cpu/a": {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}}, 3),
        ("4:cpuset:/a\n", {"cpu/a": {"cpu.cfs_quota_us": "100000\n", "cpu.cfs_period_us": "100000\n"}}, 3),
    ],
)
def test_cores_are_within_the_quota_of_every_control_group(
    machine: Path, membership: str, groups: Mapping[str, Mapping[str, str]], expected: int
) -> None:
    write_groups(machine, membership, groups)
    assert num_cores() == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"SLURM_CPUS_PER_TASK": "2", "SLURM_CPUS_ON_NODE": "64"}, 2),
        ({"SLURM_CPUS_ON_NODE": "1"}, 1),
        ({"SLURM_CPUS_PER_TASK": "64"}, 3),
        ({"SLURM_CPUS_PER_TASK": "0"}, 1),
        ({"SLURM_CPUS_PER_TASK": "many", "SLURM_CPUS_ON_NODE": "2"}, 2),
    ],
)
def test_cores_are_those_of_the_task_of_slurm(
    machine: Path, monkeypatch: pytest.MonkeyPatch, given: Mapping[str, str], expected: int
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert num_cores() == expected


def test_free_descriptors_fall_with_each_open_file(tmp_path: Path) -> None:
    before = free_descriptors()
    with (tmp_path / "file").open("w"):
        assert free_descriptors() == before - 1
