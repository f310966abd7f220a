"""`python -m twinjet.worker`: an engine process. Reads its start-up orders from standard input, see `wire.launch`."""

import logging
import os
import signal
import sys

import msgspec

from twinjet.core.errors import ConfigError
from twinjet.wire.launch import WorkerLaunch, load_launch
from twinjet.worker.process import die_with_parent


def main() -> int:
    die_with_parent()
    # Ctrl-C in a terminal reaches the whole process group; the server decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        launch = load_launch(sys.stdin.buffer.readline())
    except (msgspec.MsgspecError, ConfigError) as error:
        print(f"engine: standard input holds no start-up orders (twinjet.wire.launch): {error}", file=sys.stderr)
        return 1
    _set_up_logging(launch)
    _limit_threads(launch.config.threads)
    # Only now: what this imports may bring up a device runtime, which reads the environment once.
    from twinjet.worker.start import run_worker

    return run_worker(launch)


def _set_up_logging(launch: WorkerLaunch) -> None:
    logging.basicConfig(format=f"engine {launch.engine_id}: %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("twinjet").setLevel(logging.INFO)


def _limit_threads(num_threads: int) -> None:
    """Size XLA's CPU pools.

    jaxlib (0.10.2) has no flag or client option for that; its CPU client takes NPROC as the number of cores
    (`DefaultThreadPoolSize` in xla/pjrt/cpu/cpu_client.cc), else the affinity mask. Seen in /proc/self/task: as many
    "tf_XLAEigen" threads as NPROC says.
    """
    os.environ["NPROC"] = str(num_threads)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of interpreter shutdown, which would wait for, or trip over, threads inside a device runtime.
    os._exit(code)
