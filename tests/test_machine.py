"""Limits of this process, read from a made-up /proc and /sys."""

import os
from pathlib import Path

import pytest

from twinjet import machine
from twinjet.core.errors import ConfigError
from twinjet.machine import Cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def topology(pairs: dict[int, str]) -> dict[str, str]:
    folder = "sys/devices/system/cpu"
    return {f"{folder}/cpu{cpu}/topology/thread_siblings_list": f"{text}\n" for cpu, text in pairs.items()}


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


@pytest.mark.usefixtures("four_cpus")
def test_hyperthreads_count_as_one_physical_core(tmp_path: Path):
    root = write(tmp_path, topology({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}))
    assert machine.usable_cores(root) == Cores(logical=4, physical=2)


@pytest.mark.usefixtures("four_cpus")
def test_without_a_topology_every_processor_is_a_core(tmp_path: Path):
    assert machine.usable_cores(tmp_path) == Cores(4, 4)


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": "max 100000\n"}, 4),
        # A parent's limit counts, and a path that is only valid on the host is no error.
        ({"proc/self/cgroup": "0::/host/box\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_a_control_groups_quota_caps_the_cores(tmp_path: Path, files: dict[str, str], cores: int):
    assert machine.usable_cores(write(tmp_path, files)) == Cores(cores, cores)


def test_available_memory_is_capped_by_every_control_group(tmp_path: Path):
    files = {"proc/meminfo": "MemTotal: 4000 kB\nMemAvailable:    3000 kB\n", "proc/self/cgroup": "0::/outer/inner\n"}
    root = write(tmp_path, files)
    assert machine.available_memory(root) == 3000 * 1024
    assert machine.total_memory(root) == 4000 * 1024
    outer = {"sys/fs/cgroup/outer/memory.max": "1000000", "sys/fs/cgroup/outer/memory.current": "400000"}
    # File pages are given up when somebody needs the memory.
    outer["sys/fs/cgroup/outer/memory.stat"] = "anon 5\ninactive_file 100000\n"
    inner = {"sys/fs/cgroup/outer/inner/memory.max": "max", "sys/fs/cgroup/outer/inner/memory.current": "1"}
    write(root, {**outer, **inner})
    assert machine.available_memory(root) == 700000
    assert machine.total_memory(root) == 1000000


def test_memory_to_plan_with_is_steady_while_half_of_it_is_available():
    assert machine.steady_memory(900, 1600) == machine.steady_memory(1500, 1600) == 1600
    assert machine.steady_memory(799, 1600) == machine.steady_memory(400, 1600) == 800
    assert machine.steady_memory(0, 1600) == 1


def test_instruction_sets_and_name_come_from_cpuinfo(tmp_path: Path):
    root = write(tmp_path, {"proc/cpuinfo": "model name\t: Some CPU\nflags\t\t: fpu avx2 fma nonsense\n"})
    assert machine.instruction_sets(root) == ("FMA", "AVX2")
    assert machine.processor_name(root) == "Some CPU"


def test_accelerators_are_found_by_their_device_files(tmp_path: Path):
    assert machine.accelerators(tmp_path) == ()
    root = write(tmp_path, {"dev/nvidia0": "", "dev/nvidiactl": "", "dev/accel0": ""})
    assert machine.accelerators(root) == ("NVIDIA GPU (/dev/nvidia0)", "TPU (/dev/accel0)")


def test_this_machine_has_cores_and_memory():
    cores = machine.usable_cores()
    assert 1 <= cores.physical <= cores.logical
    assert 0 < machine.available_memory() <= machine.total_memory()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("2G", 2 << 30),
        ("1.5GB", 1_500_000_000),
        ("64kb", 64_000),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_are_read(text: str, size: int):
    assert machine.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "2GiBs", "two", "1e9999", "nan"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(ConfigError, match="size must be"):
        machine.parse_bytes(text)


def test_sizes_are_shown_for_people():
    assert [machine.format_bytes(n) for n in (10, 1536, 3 << 30, 1 << 41)] == ["10 B", "1.5 KiB", "3.0 GiB", "2.0 TiB"]
