"""The shared library of CPU kernels: calling it, and making it known to XLA. Knows no models."""

import ctypes
import functools
from pathlib import Path

import jax.ffi
import numpy as np

from twinjet.kernels import LIBRARY, open_library
from twinjet.ops.ops import StepClock

PACKED_FOR = "avx2"
"""Instruction set whose order of weights is packed; the kernels for the other one read the same."""

INSTRUCTIONS = ("AVX2", "AVX-512 VNNI")
"""What products may use, by number (`Instructions` of kernels/cpu/microkernels.h)."""

HANDLERS = (
    "twinjet_attend",
    "twinjet_embed",
    "twinjet_gather_kv",
    "twinjet_head",
    "twinjet_matmul",
    "twinjet_mlp",
    "twinjet_project",
    "twinjet_qkv",
    "twinjet_rope",
    "twinjet_sample",
    "twinjet_scatter_kv",
)
"""Names of the calls, in the library and in XLA programs alike."""


class CpuLibrary:
    """The loaded library. Its functions are process-wide: there is one set of kernel threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._pack = library.twinjet_pack
        self._pack.argtypes = (
            [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p] + [ctypes.c_int64] * 2 + [ctypes.c_void_p]
        )
        self._pack.restype = ctypes.c_int
        self._wait_step = library.twinjet_wait_step
        self._wait_step.argtypes = [
            ctypes.c_int32,
            ctypes.c_int64,
            ctypes.POINTER(ctypes.c_int64),
            ctypes.c_void_p,
            ctypes.c_int64,
        ]
        self._wait_step.restype = ctypes.c_int64
        self._instructions = library.twinjet_instructions
        self._instructions.restype = ctypes.c_int64
        self._use_instructions = library.twinjet_use_instructions
        self._use_instructions.argtypes = [ctypes.c_int64]
        self._use_instructions.restype = ctypes.c_int

    @property
    def instructions(self) -> str:
        """What products use: the best that this processor has, if nobody chose."""
        return INSTRUCTIONS[self._instructions()]

    def use_instructions(self, name: str) -> bool:
        """Make products use one of `INSTRUCTIONS`, in this whole process; False: this processor lacks it.

        The results are the same bits: this is for comparing them, or their speed.
        """
        return self._use_instructions(INSTRUCTIONS.index(name)) == 1

    def wait_step(self, tag: int, timeout_s: float, most: int) -> tuple[np.ndarray, StepClock] | None:
        """Wait for the step of that tag, with the GIL released; what it gave, `most` numbers at most, once.

        None: it has not ended in that time, or was told of already.
        """
        table, times = np.empty(most, np.int32), (ctypes.c_int64 * 3)()
        size = self._wait_step(tag, int(timeout_s * 1e6), times, table.ctypes.data, most)
        if size < 0:
            return None
        started, ended, busy = times
        return table[: min(size, most)], StepClock(started / 1e9, ended / 1e9, busy / 1e9)

    def set_threads(self, num_threads: int) -> None:
        """Kernel threads from now on; the thread that calls a kernel is one of them."""
        self._library.twinjet_init(ctypes.c_int(num_threads))

    def pack(
        self, weight_format: int, quant_type: int, data: np.ndarray, shape: tuple[int, int], out: np.ndarray
    ) -> bool:
        """Pack a tensor [columns, inputs] of a GGUF type into `out`, which is zeroed bytes. False: not all finite."""
        num_columns, num_inputs = shape
        return self._pack(weight_format, quant_type, data.ctypes.data, num_columns, num_inputs, out.ctypes.data) == 0


def load_library(path: Path = LIBRARY) -> CpuLibrary:
    """The kernels, registered with XLA. Raises `KernelsUnavailable`."""
    return _load(path)


@functools.cache
def _load(path: Path) -> CpuLibrary:
    library = open_library(path)
    for name in HANDLERS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return CpuLibrary(library)
