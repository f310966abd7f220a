"""The application on a socket: uvicorn inside a running event loop, and an orderly end.

On the first SIGTERM or SIGINT nothing more is admitted (503), what runs may finish for a while, then the
server closes; a second signal ends that wait. Starting and stopping engines is the caller's business.
"""

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from twinjet.core.errors import ConfigError
from twinjet.orchestrator.interface import Orchestrating

logger = logging.getLogger("twinjet.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that the server never closes one just being used again."""
_CLOSE_S = 5
"""For connections to close once nothing generates any more."""


class _Server(uvicorn.Server):
    """uvicorn that tells when it listens, without its signal handling, which would end the process with the signal."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


def open_socket(host: str, port: int) -> socket.socket:
    """A listening address, port 0 for any free one. Raises ConfigError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another with --port") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; check --host and --port") from None
    listener.setblocking(False)
    return listener


async def run_server(
    app: FastAPI,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    drain_timeout_s: float = 30.0,
    listener: socket.socket | None = None,
    on_listening: Callable[[str, int], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until a signal, or until `stop` is set; returns once the last connection is closed.

    `listener` takes the place of `host` and `port` when the address was opened before. `on_listening` gets
    the actual host and port once connections are accepted. Signals are handled only in the main thread.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    listener = listener or open_socket(host, port)
    address = listener.getsockname()
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_S,
        ),
        lambda: on_listening(address[0], address[1]) if on_listening is not None else None,
    )
    stop = stop or asyncio.Event()
    hurry = asyncio.Event()
    ending = asyncio.create_task(_end(server, app, stop, hurry, drain_timeout_s))
    try:
        with _signals(stop, hurry):
            await server.serve(sockets=[listener])
    finally:
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        listener.close()


@contextmanager
def _signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _end(
    server: uvicorn.Server,
    app: FastAPI,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    drain_timeout_s: float,
) -> None:
    await stop.wait()
    orchestrator: Orchestrating = app.state.service.orchestrator
    app.state.routes.stop_admitting()
    draining = asyncio.create_task(orchestrator.drain(drain_timeout_s))
    hurrying = asyncio.create_task(hurry.wait())
    try:
        await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            # The second signal: end what is left now.
            await orchestrator.drain(0.0)
        if draining.done() and not draining.result():
            logger.warning("some requests were still running after %s s and were cancelled", drain_timeout_s)
    except Exception:
        logger.exception("the orchestrator could not be drained")
    finally:
        for task in (draining, hurrying):
            task.cancel()
        server.should_exit = True
