"""The real server, orchestrator, wire, worker and scheduler over the simulated engine, in a process of its own.

`simulated_server` starts and stops it; as a module, this is that process.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

from benchmarks.serving import free_port, wait_healthy
from benchmarks.simulated import FIRST_TOKEN, NUM_TICKS


@dataclass(frozen=True, slots=True)
class Server:
    """One that answers."""

    url: str
    pid: int


@contextmanager
def simulated_server(step_ms: float, row_ms: float, *, num_streams: int, tells_time: bool = False) -> Iterator[Server]:
    """A healthy server for as long as the block runs.

    Args:
        step_ms: milliseconds of a step.
        row_ms: milliseconds that each prompt row adds.
        tells_time: tokens say when their step ended, as `benchmarks.simulated` has it.

    Raises: RuntimeError, if it does not start.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {
        **os.environ,
        "SIMULATED_STEP_MS": str(step_ms),
        "SIMULATED_ROW_MS": str(row_ms),
        "SIMULATED_TOKENS": "clock" if tells_time else "words",
    }
    command = [sys.executable, "-m", "benchmarks.simulated.server", "--port", str(port), "--streams", str(num_streams)]
    server = subprocess.Popen(command, env=environment)
    try:
        wait_healthy(url, server)
        yield Server(url, server.pid)
    finally:
        server.terminate()
        server.wait()


async def serve(port: int, num_streams: int) -> None:
    """Until SIGTERM."""
    from twinjet.assemble import engine_config, open_model
    from twinjet.options import EngineOptions, default_home
    from twinjet.orchestrator.orchestrator import Orchestrator
    from twinjet.server.app import ServedModel, create_app, run_server
    from twinjet.server.serving import open_socket

    home = default_home(os.environ)
    model = open_model("smollm2", home)
    if any(map(model.tokenizer.is_special, range(FIRST_TOKEN, FIRST_TOKEN + NUM_TICKS))):
        raise RuntimeError("expected plain tokens where the simulated engine takes its own, found special ones")
    options = EngineOptions(paced=True, max_streams=num_streams)
    config = engine_config(model, options, home, memory_bytes=8 << 30, physical_cores=1)
    orchestrator = Orchestrator(config, factory="benchmarks.simulated:load")
    await orchestrator.start()
    app = create_app(ServedModel(model.name, model.tokenizer, model.template, orchestrator, int(time.time())))
    try:
        await run_server(app, listener=open_socket("127.0.0.1", port))
    finally:
        await orchestrator.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.streams))


if __name__ == "__main__":
    main()
