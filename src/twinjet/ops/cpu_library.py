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
        self._read_clock = library.twinjet_read_clock
        self._read_clock.argtypes = [ctypes.POINTER(ctypes.c_int64)]
        self._read_clock.restype = None
        self._clock = (ctypes.c_int64 * 3)()
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

    def read_clock(self) -> StepClock | None:
        """What kernels did since this was last called; None: nothing."""
        self._read_clock(self._clock)
        started, ended, busy = self._clock
        return StepClock(started / 1e9, ended / 1e9, busy / 1e9) if started else None

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
