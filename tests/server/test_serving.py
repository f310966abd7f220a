"""The server as a process: addresses, signals, draining."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.server.fakes import FakeOrchestrator, fake_service
from tests.server.live import live_server
from twinjet.core.errors import ConfigError
from twinjet.server.app import create_app, run_server
from twinjet.server.serving import open_socket

BODY = {"prompt": "a", "max_tokens": 40, "stream": True, "ignore_eos": True}

PROGRAM = """
import asyncio, sys
from tests.server.fakes import FakeOrchestrator, fake_service
from twinjet.server.app import create_app, run_server

orchestrator = FakeOrchestrator()
orchestrator.step_s = 0.05
app = create_app(fake_service(orchestrator))
print_port = lambda host, port: print(port, flush=True)
asyncio.run(run_server(app, "127.0.0.1", 0, drain_timeout_s=float(sys.argv[1]), on_listening=print_port))
print("left", orchestrator.running, "aborted", len(orchestrator.aborted), flush=True)
"""


@contextmanager
def server_process(drain_timeout_s: float) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(drain_timeout_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


class Reader(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.text = ""
        self.first = threading.Event()
        self.start()
        assert self.first.wait(10)

    def run(self) -> None:
        with httpx.stream("POST", self._url + "/v1/completions", json=BODY, timeout=20) as answer:
            for piece in answer.iter_text():
                self.text += piece
                self.first.set()


def wait_for_drain(url: str) -> None:
    deadline = time.monotonic() + 5
    while (health := httpx.get(url + "/health")).status_code == 200:
        assert time.monotonic() < deadline
    assert health.json()["reason"] == "draining"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_finish_and_admits_nothing(number: signal.Signals):
    with server_process(20) as (process, url):
        reader = Reader(url)
        process.send_signal(number)
        wait_for_drain(url)
        refused = httpx.post(url + "/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "unavailable"
        reader.join(20)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
    assert reader.text.count('"text"') == 40
    assert reader.text.endswith("data: [DONE]\n\n")
    assert out == "left {} aborted 0\n"
    assert "Traceback" not in err


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_what_does_not_finish_in_time_is_told_so(how: str):
    with server_process(0.2 if how == "timeout" else 60) as (process, url):
        reader = Reader(url)
        process.send_signal(signal.SIGTERM)
        if how == "second signal":
            # Two signals at once may arrive as one.
            wait_for_drain(url)
            process.send_signal(signal.SIGTERM)
        reader.join(20)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
    assert 0 < reader.text.count('"text"') < 40
    assert '"code":"unavailable"' in reader.text
    assert reader.text.endswith("data: [DONE]\n\n")
    assert out == "left {} aborted 1\n"


def test_a_taken_port_is_said_in_words():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            open_socket("127.0.0.1", port)


def test_an_address_of_another_machine_is_said_in_words():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 port 80"):
        open_socket("192.0.2.1", 80)


def test_a_given_listener_is_used_and_closed():
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]

    async def main() -> None:
        stop = asyncio.Event()
        ports = []

        def listening(_: str, port: int) -> None:
            ports.append(port)
            stop.set()

        app = create_app(fake_service(FakeOrchestrator()))
        await run_server(app, listener=listener, on_listening=listening, stop=stop)
        assert ports == [port]

    asyncio.run(main())
    assert listener.fileno() == -1
    # Free again at once.
    open_socket("127.0.0.1", port).close()


def test_a_connection_is_kept_between_requests():
    with live_server() as server, httpx.Client(base_url=server.url) as client:
        ports = {client.get("/health").extensions["network_stream"].get_extra_info("client_addr")[1] for _ in range(3)}
    assert len(ports) == 1
