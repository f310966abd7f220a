"""What the engine process does about itself: names, signals, its parent's death."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from types import FrameType

from twinjet.core.config import EngineConfig
from twinjet.kernels import KernelsUnavailable, open_library

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

SWITCH_INTERVAL_S = 0.0005
"""How long the device thread waits for the interpreter at most, once a step is done. Python's own 5 ms would show as
gaps between steps."""


def name_thread(name: str) -> None:
    """What `ps`, `top` and `perf` call this thread; from the main thread, the process. Its first 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when the thread that launched it has ended. To be called first."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))


def limit_threads(config: EngineConfig) -> None:
    """Size XLA's CPU pools for an engine. To be called before JAX is loaded.

    With our kernels one thread: it runs the programs one after the other, and the kernels have threads of their own. A
    second one looks for work after every step, on the core that the next step needs.

    jaxlib (0.10.2) has no flag or client option for that; its CPU client takes NPROC as the number of cores
    (`DefaultThreadPoolSize` in xla/pjrt/cpu/cpu_client.cc), else the affinity mask. Seen in /proc/self/task: as many
    "tf_XLAEigen" threads as NPROC says.
    """
    num_threads = config.threads
    if not config.exact:
        with suppress(KernelsUnavailable):
            open_library()
            num_threads = 1
    os.environ["NPROC"] = str(num_threads)


def stop_on_signal_or_orphaned(stop: Callable[[], None], orphan_exit_s: float) -> None:
    """Have `stop` called at SIGTERM, and when the launching process has died or has closed our standard input.

    If the launching process is gone, the exit is forced after `orphan_exit_s`. From the main thread.
    """
    parent = os.getppid()

    def leave() -> None:
        stop()
        time.sleep(orphan_exit_s)
        os._exit(1)

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        stop()
        if os.getppid() != parent:
            Thread(target=leave, name="orphan-exit", daemon=True).start()

    def watch_input() -> None:
        name_thread("parent-watch")
        while os.read(sys.stdin.fileno(), 4096):
            pass
        leave()

    # The kernel's signal (`die_with_parent`) comes even if somebody else holds the pipe open; the pipe's end comes even
    # if the parent died before that signal was asked for.
    signal.signal(signal.SIGTERM, on_sigterm)
    Thread(target=watch_input, name="parent-watch", daemon=True).start()


def _prctl(option: int, argument: "ctypes.c_char_p | ctypes.c_ulong") -> None:
    # Linux only. Elsewhere names are a comfort we do without, and the pipe alone tells of the parent's death.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)
