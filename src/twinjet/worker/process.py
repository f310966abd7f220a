"""What the engine process does about itself: names, signals, its parent's death."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from threading import Thread

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

SWITCH_INTERVAL_S = 0.0005
"""How long the device thread waits for the interpreter at most, once a step is done. Python's own 5 ms would show as
gaps between steps."""


def name_thread(name: str) -> None:
    """What `ps`, `top` and `perf` call this thread; from the main thread, the process. Its first 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def end_with_parent(stop: Callable[[], None], exit_within_s: float) -> None:
    """Have `stop` called when the launching process has died or closed our standard input, and see to it.

    That is: exit by force if `stop` has not led to it after `exit_within_s`.
    """
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))

    def watch() -> None:
        name_thread("parent-watch")
        # The kernel's signal tells of a parent that dies from now on, the pipe also of one that died before.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        stop()
        time.sleep(exit_within_s)
        os._exit(1)

    Thread(target=watch, name="parent-watch", daemon=True).start()


def _prctl(option: int, argument: "ctypes.c_char_p | ctypes.c_ulong") -> None:
    # Linux only. Elsewhere names are a comfort we do without, and the pipe alone tells of the parent's death.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)
