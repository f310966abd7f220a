"""The shared library of CPU kernels: where it lies, and whether this machine can run it. Knows no JAX and no models."""

import ctypes
from pathlib import Path

LIBRARY = Path(__file__).with_name("libtwinjet_cpu.so")


class KernelsUnavailable(Exception):
    """Why this process cannot run the kernels, and what would change that."""


def open_library(path: Path = LIBRARY) -> ctypes.CDLL:
    """Raises: KernelsUnavailable."""
    if not path.exists():
        raise KernelsUnavailable(
            f"the CPU kernels are not built ({path.name} is missing); install a C++ compiler and run make install"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"the CPU kernels do not load ({error}); build them anew with make install") from error
    if not library.twinjet_cpu_supported():
        raise KernelsUnavailable("this processor lacks AVX2, FMA or F16C, which the CPU kernels need")
    return library
