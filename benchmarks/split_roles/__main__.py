"""One process of process_split.py."""

import argparse
import asyncio
import os
import sys
import threading
from pathlib import Path


def die_with_parent() -> None:
    """The parent holds the other end of standard input open for as long as it lives."""
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    # Each role imports its own only: the clients and the server of `process` mode must not pay for JAX.
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("server", "engine", "streams", "poster"))
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--mode")
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    threading.Thread(target=die_with_parent, daemon=True).start()
    if args.role == "server":
        import uvloop

        from benchmarks.split_roles.server import run_server

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_server(args.directory, args.mode))
    elif args.role == "engine":
        from benchmarks.split_roles.engine import run_engine_process

        run_engine_process(args.directory)
    else:
        from benchmarks.split_roles.clients import run_poster, run_streams

        asyncio.run((run_streams if args.role == "streams" else run_poster)(args.directory, args.port))


main()
