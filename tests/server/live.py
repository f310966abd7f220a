"""A real server on a free port of this machine, in a thread, over a fake orchestrator."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvloop

from tests.server.fakes import FakeOrchestrator, fake_service
from twinjet.server.app import ServerLimits, create_app, run_server


@dataclass(slots=True)
class LiveServer:
    """A running server and the orchestrator behind it."""

    url: str
    host: str
    port: int
    orchestrator: FakeOrchestrator
    stop: asyncio.Event
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    http: httpx.Client
    """One for all requests of a test: making a client costs more than a request."""

    def ask_to_stop(self) -> None:
        """What a signal does in a process of its own."""
        self.loop.call_soon_threadsafe(self.stop.set)


@contextmanager
def live_server(
    orchestrator: FakeOrchestrator | None = None,
    *,
    chat: bool = True,
    limits: ServerLimits | None = None,
    drain_timeout_s: float = 5.0,
) -> Iterator[LiveServer]:
    """Serve until the block ends, and fail if the server does not end with it."""
    orchestrator = orchestrator or FakeOrchestrator()
    listening = threading.Event()
    started: dict[str, LiveServer] = {}
    failure: list[BaseException] = []

    async def serve() -> None:
        stop = asyncio.Event()

        def on_listening(host: str, port: int) -> None:
            url = f"http://{host}:{port}"
            http = httpx.Client(base_url=url, verify=False, timeout=30)
            loop = asyncio.get_running_loop()
            started["server"] = LiveServer(url, host, port, orchestrator, stop, loop, thread, http)
            listening.set()

        app = create_app(fake_service(orchestrator, chat=chat), limits)
        await run_server(app, "127.0.0.1", 0, drain_timeout_s=drain_timeout_s, on_listening=on_listening, stop=stop)

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        except BaseException as error:
            failure.append(error)
        finally:
            listening.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert listening.wait(20)
    if failure:
        raise failure[0]
    server = started["server"]
    try:
        yield server
    finally:
        server.http.close()
        server.ask_to_stop()
        thread.join(20)
    assert not thread.is_alive()
    assert not failure
