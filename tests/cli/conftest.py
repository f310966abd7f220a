"""One running server for all tests here."""

import contextlib
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.cli.command import COMMAND, TIMEOUT_S, TINY_SERVER, environment


@dataclass
class Served:
    """A `twinjet serve` process and what it has said."""

    process: subprocess.Popen[str]
    url: str
    statuses: list[int] = field(default_factory=list)
    """What /health answered, from when the port was open until it was 200."""
    curl: list[str] = field(default_factory=list)
    """The words of the line it printed."""
    errors: list[str] = field(default_factory=list)
    """Lines of its standard error."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(home: Path, *arguments: str) -> Iterator[Served]:
    """A server that is warm; killed at the end if it still runs."""
    port = free_port()
    process = subprocess.Popen(
        (*COMMAND, "serve", *arguments, "--port", str(port)),
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    served = Served(process, f"http://127.0.0.1:{port}")
    reader = threading.Thread(target=lambda: served.errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not served.statuses or served.statuses[-1] != 200:
            assert process.poll() is None, "".join(served.errors)
            assert time.monotonic() < deadline_s, "".join(served.errors)
            with contextlib.suppress(httpx.ConnectError):
                served.statuses.append(httpx.get(served.url + "/health").status_code)
            time.sleep(0.02)
        assert process.stdout is not None
        served.curl = shlex.split(next(line for line in process.stdout if line.startswith("curl ")))
        yield served
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture(scope="session")
def served(home: Path, tiny: str) -> Iterator[Served]:
    with serving(home, tiny, *TINY_SERVER) as server:
        yield server
