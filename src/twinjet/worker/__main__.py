"""`python -m twinjet.worker`: an engine process. Reads its start-up orders from standard input, see `wire.launch`."""

import logging
import os
import signal
import sys

import msgspec

from twinjet.core.errors import ConfigError
from twinjet.wire.launch import WorkerLaunch, load_launch
from twinjet.worker.process import die_with_parent, limit_threads


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
    limit_threads(launch.config)
    # Only now: what this imports may bring up a device runtime, which reads the environment once.
    from twinjet.worker.start import run_worker

    return run_worker(launch)


def _set_up_logging(launch: WorkerLaunch) -> None:
    logging.basicConfig(format=f"engine {launch.engine_id}: %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("twinjet").setLevel(logging.INFO)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of interpreter shutdown, which would wait for, or trip over, threads inside a device runtime.
    os._exit(code)
