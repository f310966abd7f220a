"""What this machine can do at most, measured by limits.cc: reading memory, and products of small integers."""

import ctypes
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

READ_BYTES = 512 << 20
"""Far beyond any cache."""


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Of all threads together, the best of five."""

    threads: int
    instructions: str
    gbps: float
    """Memory read, GB/s."""
    int8_gops: float
    """8-bit products with 16-bit sums (AVX2) or 32-bit ones (VNNI), GOP/s; a multiply-add is two."""
    int16_gops: float
    """16-bit products with 32-bit sums, GOP/s."""

    def as_dict(self) -> dict[str, float | str | int]:
        return asdict(self)


def measure_limits(threads: int, instructions: str) -> MachineLimits:
    """`instructions`: one of the kernels' (`ops.cpu_library.INSTRUCTIONS`). Needs g++."""
    source = Path(__file__).with_name("limits.cc")
    vnni = int(instructions != "AVX2")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "limits.so"
        subprocess.run(["g++", "-O2", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        limits = ctypes.CDLL(str(library))
        limits.read_gbps.argtypes = [ctypes.c_int, ctypes.c_int64]
        for function in (limits.read_gbps, limits.int8_gops, limits.int16_gops):
            function.restype = ctypes.c_double
        return MachineLimits(
            threads,
            instructions,
            limits.read_gbps(threads, READ_BYTES),
            limits.int8_gops(threads, vnni),
            limits.int16_gops(threads, vnni),
        )
