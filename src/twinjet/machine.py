"""What this machine offers to this process: cores, memory, instruction sets, accelerators.

Affinity masks and control-group limits count, so that a container gets what it may use and not what the
host has. Knows nothing of models. Reads /proc and /sys; where they are missing (not Linux) it falls back on
what Python knows.
"""

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twinjet.core.errors import ConfigError

_ROOT = Path("/")

INSTRUCTION_SETS = {
    "sse4_2": "SSE4.2",
    "avx": "AVX",
    "f16c": "F16C",
    "fma": "FMA",
    "avx2": "AVX2",
    "avx512f": "AVX-512F",
    "avx512bw": "AVX-512BW",
    "avx512_vnni": "AVX-512-VNNI",
    "avx_vnni": "AVX-VNNI",
    "avx512_bf16": "AVX-512-BF16",
    "amx_int8": "AMX-INT8",
    "asimd": "NEON",
    "asimddp": "DOTPROD",
    "i8mm": "I8MM",
    "sve": "SVE",
}
"""The kernel's flag for each instruction set that matters to us, and its usual name."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Processors that this process may run on."""

    logical: int
    physical: int


def usable_cores(root: Path = _ROOT) -> Cores:
    """Cores within the affinity mask and the control group's quota; a started core counts as one."""
    try:
        cpus = sorted(os.sched_getaffinity(0))
    except AttributeError:
        cpus = list(range(os.cpu_count() or 1))
    siblings = set()
    for cpu in cpus:
        listed = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(listed if listed else str(cpu))
    logical, physical = len(cpus), len(siblings)
    quota = _cpu_quota(root)
    if quota is not None:
        most = max(1, -int(-quota // 1))
        logical, physical = min(logical, most), min(physical, most)
    return Cores(logical, physical)


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that can be had without swapping: the system's figure, capped by every enclosing control group."""
    available = _system_available(root)
    for group in _control_groups(root):
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is None:
            limit, used = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used + _page_cache(group)))
    return available


def total_memory(root: Path = _ROOT) -> int:
    """Bytes of memory that this process could ever have: the machine's, capped by every enclosing control group."""
    total = _meminfo(root, "MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        _number(group / name) for group in _control_groups(root) for name in ("memory.max", "memory.limit_in_bytes")
    ]
    return min([total, *(limit for limit in limits if limit is not None)])


def steady_memory(available_bytes: int, total_bytes: int) -> int:
    """Bytes to plan with: the total, halved until half of it is available.

    Steady from start to start where the available memory is not: a pool of another size is another
    program, and what the last start compiled could not be used.
    """
    planned = total_bytes
    while planned // 2 > available_bytes:
        planned //= 2
    return planned


def instruction_sets(root: Path = _ROOT) -> tuple[str, ...]:
    """Usual names of those instruction sets of the first processor that matter to us."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
            return tuple(name for flag, name in INSTRUCTION_SETS.items() if flag in flags)
    return ()


def processor_name(root: Path = _ROOT) -> str:
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def accelerators(root: Path = _ROOT) -> tuple[str, ...]:
    """Device files of accelerators, by kind; found without loading any driver."""
    kinds = {"NVIDIA GPU": "dev/nvidia[0-9]*", "AMD GPU": "dev/kfd", "TPU": "dev/accel[0-9]*"}
    found = []
    for kind, pattern in kinds.items():
        found += [f"{kind} (/{path.relative_to(root)})" for path in sorted(root.glob(pattern))]
    return tuple(found)


def parse_bytes(text: str) -> int:
    """A size such as "2GiB", "512MiB", "1.5GB" or "1048576" in bytes.

    Raises: ConfigError.
    """
    units = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    units |= {f"{unit}ib": size for unit, size in units.items() if unit in "kmgt" and unit}
    units |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    cleaned = text.strip().lower()
    number = cleaned.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = cleaned[len(number) :].strip()
    try:
        size = int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"a size must be a number of bytes or like 512MiB or 2GiB, got {text!r}") from None
    if size < 1:
        raise ConfigError(f"a size must be over 0, got {text!r}")
    return size


def format_bytes(size: int) -> str:
    """A size for people, in binary units."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _system_available(root: Path) -> int:
    available = _meminfo(root, "MemAvailable")
    if available is not None:
        return available
    if sys.platform == "darwin":  # no figure of this kind there; half of all is a careful guess
        return total_memory(root) // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _meminfo(root: Path, key: str) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None


def _control_groups(root: Path) -> Iterator[Path]:
    """Folders of the control groups that this process is in, with all their parents; version 2 and 1."""
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mounts = [base] if not controllers else [base / controllers, *(base / name for name in controllers.split(","))]
        for mount in mounts:
            folder = mount / path.strip("/")
            # Inside a container the path may be the host's; then only the mount itself is there.
            while folder != mount.parent:
                if folder.is_dir():
                    yield folder
                folder = folder.parent


def _cpu_quota(root: Path) -> float | None:
    """Smallest number of processors that an enclosing control group allows; None: no limit."""
    quotas = []
    for group in _control_groups(root):
        parts = _read(group / "cpu.max").split()
        if len(parts) == 2 and parts[0] != "max":
            quotas.append(int(parts[0]) / int(parts[1]))
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _page_cache(group: Path) -> int:
    """File pages that count as used by the group but are given up under pressure."""
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    try:
        return int(text)
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
