"""When Python's cyclic garbage collector runs in the engine process: never in the middle of something.

Reference counting frees nearly everything; what is left over is collected at moments of the loop's choosing.
"""

import gc


def settle() -> None:
    """Call when start-up is over. What is alive now (modules, compiled programs) is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()


def collect_young() -> None:
    """For busy times: takes microseconds, looks at objects made since the last call."""
    gc.collect(1)


def collect_all() -> None:
    """For idle times."""
    gc.collect()
