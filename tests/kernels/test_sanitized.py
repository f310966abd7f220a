"""The kernels' tests once more on a build with AddressSanitizer and UBSan, in a process of its own.

The sanitizers' runtime has to be in a process before all else, so that process gets it preloaded; it runs this folder
with `--kernels`, on the sanitized library. Jaxlib throws in C++, which the runtime's own hook can pass on only where
libstdc++ is preloaded too. CPython keeps memory to its end, so leaks are not looked for.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.products import kernels

ROOT = Path(__file__).parents[2]
SANITIZED = ROOT / "build/kernels-sanitized/libtwinjet_cpu.so"

SKIPPED = "real_models or reference or log_probabilities"
"""Tests that spend their time in XLA and numpy rather than in kernels; others run the same kernels."""

OVERRUN = """
import ctypes, sys
import numpy as np
from gguf import GGMLQuantizationType
library = ctypes.CDLL(sys.argv[1])
weights = np.zeros((16, 32), np.float32)
short = np.zeros(int(sys.argv[2]), np.uint8)
library.twinjet_pack.argtypes = [ctypes.c_int64] * 2 + [ctypes.c_void_p] + [ctypes.c_int64] * 2 + [ctypes.c_void_p]
library.twinjet_pack(0, 0, weights.ctypes.data, 16, 32, short.ctypes.data)  # float32 as it is
"""


@pytest.fixture(scope="module")
def environment(pytestconfig: pytest.Config) -> dict[str, str]:
    """Of a process that can load the sanitized library, which is there afterwards."""
    if pytestconfig.getoption("kernels") is not None:
        pytest.skip("these are the tests that such a process runs")
    kernels()  # skips where no kernels can be
    subprocess.run([ROOT / "scripts/build_kernels.sh", "--strict", "--sanitize"], check=True)
    compiler = os.environ.get("CXX", "g++")
    preloaded = []
    for name in ("libasan.so", "libstdc++.so"):
        found = subprocess.run([compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
        path = Path(found.stdout.strip())
        assert path.is_absolute(), f"{compiler} comes without {name}; install GCC's own, or name GCC in CXX"
        preloaded.append(str(path.resolve()))
    return os.environ | {
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def test_the_kernels_stay_inside_their_buffers(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "tests/kernels", "-p", "no:cacheprovider", "-m", "not slow"]
    # Without -s the report of a process that ends there would be lost with what pytest captured.
    command += ["-s", "-k", f"not ({SKIPPED})", "--kernels", str(SANITIZED)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[:8000]}"


def test_a_step_outside_is_seen(environment: dict[str, str]) -> None:
    def pack_into(num_bytes: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", OVERRUN, str(SANITIZED), str(num_bytes)]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    needed = 16 * 32 * 4
    assert pack_into(needed).returncode == 0
    short = pack_into(needed - 4)
    assert short.returncode != 0
    assert "heap-buffer-overflow" in short.stderr


def test_the_library_that_was_asked_for_is_the_one_that_runs(pytestconfig: pytest.Config) -> None:
    asked = pytestconfig.getoption("kernels")
    if asked is None:
        pytest.skip("none was named with --kernels")
    kernels()
    mapped = {
        line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "twinjet" in line
    }
    assert mapped == {str(asked)}
