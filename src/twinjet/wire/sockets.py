"""The two ends of the wire: one ROUTER in the server process, a DEALER in each engine process.

Owns how messages travel: bounds, strangers, wake-ups. What messages mean is known on either side of it.

A ROUTER accepts whoever reaches its address. An ipc address lies in a directory that only its owner may enter; a
tcp address has no such guard and belongs on loopback or a private network.
"""

import asyncio
import contextlib
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import zmq

from twinjet.core.errors import ConfigError
from twinjet.wire.codec import WireError, decode_to_engine, decode_to_orchestrator, encode
from twinjet.wire.launch import identity, parse_identity
from twinjet.wire.messages import MAX_MESSAGE_BYTES, ToEngine, ToOrchestrator

QUEUE_MESSAGES = 10_000
"""Most messages that wait on either side of a connection."""

LINGER_MS = 1_000
"""How long closing waits for messages to leave."""

RECEIVE_BURST = 64
"""Messages received in a row before other tasks of the event loop get their turn."""

MAX_IPC_PATH_BYTES = 107
"""What fits `sockaddr_un` on Linux."""


class ServerSocket:
    """The orchestrator's end. Belongs to one event loop; `send` never blocks and must be called from its thread."""

    def __init__(self, endpoint: str | None = None) -> None:
        """Bind to `endpoint`: `ipc:///private/dir/engines`, `tcp://127.0.0.1:*`; None: ipc in a new private directory.

        Raises: ConfigError, if the address is taken, wrong, or in a directory that others may enter.
        """
        self.strangers_total = 0
        """Messages dropped because their sender is no engine of ours."""
        self.bad_frames_total = 0
        """Messages dropped because they are not in our schema."""
        self.on_bad_frame: Callable[[int, int, str], None] = lambda engine_id, incarnation, problem: None
        """Told of each of them: news of that engine is missing from then on. Must not raise."""
        if endpoint is not None and len(endpoint.removeprefix("ipc://").encode()) > MAX_IPC_PATH_BYTES:
            raise ConfigError(f"a socket path has at most {MAX_IPC_PATH_BYTES} bytes, got {endpoint}")
        self._own_directory: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readable = asyncio.Event()
        self._burst = 0
        if endpoint is None:
            self._own_directory = tempfile.mkdtemp(prefix="twinjet-")
            endpoint = f"ipc://{self._own_directory}/engines"
        elif endpoint.startswith("ipc://"):
            _secure_directory(Path(endpoint.removeprefix("ipc://")).parent)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _bound(self._socket)
        # Sending to an engine that is not there is reported instead of silently dropped.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen for engines on {endpoint}: {error}") from None
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The address that engines connect to, wildcards resolved."""

    async def recv(self) -> tuple[int, int, ToOrchestrator]:
        """(engine_id, incarnation, message) of the next good message. For one task at a time."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.fileno(), self._check_readable)
        while True:
            if self._burst >= RECEIVE_BURST:
                self._burst = 0
                await asyncio.sleep(0)
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._burst = 0
                self._readable.clear()
                self._check_readable()
                await self._readable.wait()
                continue
            self._burst += 1
            received = self._parse(frames)
            if received is not None:
                return received

    def _check_readable(self) -> None:
        # ZeroMQ's descriptor tells of changes only, and any call on the socket may use one up: so ask after each.
        if not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._readable.set()

    def _parse(self, frames: list[bytes]) -> tuple[int, int, ToOrchestrator] | None:
        sender = parse_identity(frames[0])
        if sender is None:
            self.strangers_total += 1
            return None
        try:
            if len(frames) != 2:
                raise WireError(f"a message is one frame, got {len(frames) - 1}")
            return *sender, decode_to_orchestrator(frames[1])
        except WireError as error:
            self.bad_frames_total += 1
            self.on_bad_frame(*sender, str(error))
            return None

    def send(self, engine_id: int, incarnation: int, message: ToEngine) -> bool:
        """Queue a message, in order; False if that engine is not connected, or has not read for long."""
        try:
            self._socket.send_multipart([identity(engine_id, incarnation), encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        finally:
            self._check_readable()
        return True

    def close(self) -> None:
        """Let what was sent leave, for a short while, and unbind."""
        if self._socket.closed:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close(LINGER_MS)
        self._context.term()
        if self._own_directory is not None:
            shutil.rmtree(self._own_directory, ignore_errors=True)


class EngineSocket:
    """The engine's end. One thread sends, receives and waits; any thread may `wake` it."""

    def __init__(self, endpoint: str, engine_id: int, incarnation: int) -> None:
        self.bad_frames_total = 0
        """Messages dropped because they are not in our schema."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _bound(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, identity(engine_id, incarnation))
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(0)
            self._context.term()
            raise ConfigError(f"cannot connect to the server at {endpoint}: {error}") from None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def send(self, message: ToOrchestrator) -> None:
        """Queue a message; blocks while the server has left `QUEUE_MESSAGES` of them unread."""
        self._socket.send(encode(message))

    def send_if_room(self, message: ToOrchestrator) -> bool:
        """Queue a message that may be lost; False if it was."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def recv(self) -> ToEngine | None:
        """The next good message, or None if none is here now."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                if len(frames) != 1:
                    raise WireError(f"a message is one frame, got {len(frames)}")
                return decode_to_engine(frames[0])
            except WireError:
                self.bad_frames_total += 1

    def wake(self) -> None:
        """End the current or the next `wait` at once. From any thread, or a signal handler; nothing once closed."""
        if self._socket.closed:
            return
        # A full pipe means that a wake-up is already under way.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def wait(self, timeout_s: float) -> None:
        """Sleep until there may be a message, somebody called `wake`, or the time is up."""
        ready = self._poller.poll(max(0, math.ceil(timeout_s * 1e3)))
        if any(source == self._wake_read for source, _ in ready):
            os.read(self._wake_read, 4096)

    def close(self) -> None:
        """Let what was sent leave, for a short while."""
        self._socket.close(LINGER_MS)
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _bound(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, LINGER_MS)


def _secure_directory(directory: Path) -> None:
    """Create `directory` for its owner alone, or see that it is so."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise ConfigError(f"cannot make the socket directory {directory}: {error}") from None
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"the socket directory {directory} must belong to this user with mode 0700, "
            f"its mode is {stat.S_IMODE(found.st_mode):04o}; chmod it or choose another"
        )
