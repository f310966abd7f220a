"""ServerSocket and EngineSocket over real ipc and tcp."""

import asyncio
import os
import stat
import threading
import time
from pathlib import Path

import pytest
import zmq

from twinjet.core.errors import ConfigError
from twinjet.wire.codec import encode
from twinjet.wire.messages import Abort, Progress, Shutdown
from twinjet.wire.sockets import RECEIVE_BURST, EngineSocket, ServerSocket


def wait_for_message(engine: EngineSocket, timeout_s: float = 5.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        message = engine.recv()
        if message is not None:
            return message
        engine.wait(deadline - time.monotonic())
    raise TimeoutError


@pytest.mark.parametrize("endpoint", [None, "tcp://127.0.0.1:*"])
def test_messages_pass_in_order_both_ways(endpoint) -> None:
    async def scenario() -> None:
        server = ServerSocket(endpoint)
        engines = [EngineSocket(server.endpoint, i, 3) for i in range(2)]
        for n in range(100):
            for engine in engines:
                engine.send(Progress("load", n, 100))
        seen: dict[int, list[int]] = {0: [], 1: []}
        for _ in range(200):
            engine_id, incarnation, message = await asyncio.wait_for(server.recv(), 5)
            assert incarnation == 3
            assert isinstance(message, Progress)
            seen[engine_id].append(message.done)
        assert seen == {0: list(range(100)), 1: list(range(100))}
        for n in range(100):
            assert server.send(1, 3, Abort(n))
        for n in range(100):
            assert wait_for_message(engines[1]) == Abort(n)
        assert engines[0].recv() is None
        for engine in engines:
            engine.close()
        server.close()

    asyncio.run(scenario())


def test_sending_to_nobody_is_reported() -> None:
    async def scenario() -> None:
        server = ServerSocket()
        assert not server.send(0, 0, Shutdown())
        engine = EngineSocket(server.endpoint, 0, 1)
        engine.send(Progress("load", 0, 1))
        await asyncio.wait_for(server.recv(), 5)
        assert not server.send(0, 0, Shutdown()), "an earlier incarnation is not this one"
        assert server.send(0, 1, Shutdown())
        engine.close()
        server.close()

    asyncio.run(scenario())


def test_an_engine_that_never_reads_fills_up_without_blocking(monkeypatch) -> None:
    monkeypatch.setattr("twinjet.wire.sockets.QUEUE_MESSAGES", 10)

    async def scenario() -> None:
        server = ServerSocket()
        engine = EngineSocket(server.endpoint, 0, 0)
        engine.send(Progress("load", 0, 1))
        await asyncio.wait_for(server.recv(), 5)
        num_sent = 0
        while server.send(0, 0, Abort(1)):
            num_sent += 1
            assert num_sent < 1_000_000
        assert num_sent >= 10
        engine.close()
        server.close()

    asyncio.run(scenario())


def test_strangers_and_garbage_are_counted_and_dropped() -> None:
    async def scenario() -> None:
        server = ServerSocket()
        context = zmq.Context()

        def stranger(name: bytes) -> zmq.Socket:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, name)
            socket.connect(server.endpoint)
            return socket

        nameless, known = stranger(b"who"), stranger(b"0.0")
        nameless.send(encode(Progress("load", 1, 2)))
        known.send(b"\xc1garbage")
        known.send(b"")
        known.send(encode(Abort(1)))  # the wrong direction
        known.send_multipart([encode(Progress("load", 1, 2)), b"more"])
        known.send(encode(Progress("load", 7, 8)))
        assert await asyncio.wait_for(server.recv(), 5) == (0, 0, Progress("load", 7, 8))
        assert server.bad_frames_total == 4
        for _ in range(100):
            if server.strangers_total:
                break
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(server.recv(), 0.02)
        assert server.strangers_total == 1

        context.destroy(linger=0)
        server.close()

    asyncio.run(scenario())


def test_an_engine_drops_garbage_and_goes_on() -> None:
    async def scenario() -> None:
        server = ServerSocket()
        engine = EngineSocket(server.endpoint, 0, 0)
        engine.send(Progress("load", 0, 1))
        await asyncio.wait_for(server.recv(), 5)
        for bad in ([b"\xc1"], [b""], [encode(Progress("load", 1, 2))], [encode(Abort(1)), b"more"]):
            server._socket.send_multipart([b"0.0", *bad])
        server.send(0, 0, Abort(5))
        assert wait_for_message(engine) == Abort(5)
        assert engine.bad_frames_total == 4
        engine.close()
        server.close()

    asyncio.run(scenario())


def test_an_oversized_message_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("twinjet.wire.sockets.MAX_MESSAGE_BYTES", 1000)

    async def scenario() -> None:
        server = ServerSocket()
        context = zmq.Context()
        sender = context.socket(zmq.DEALER)
        sender.setsockopt(zmq.IDENTITY, b"0.0")
        sender.connect(server.endpoint)
        sender.send(b"x" * 2000)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.recv(), 0.2)
        assert server.bad_frames_total == 0, "it never got as far as the decoder"
        context.destroy(linger=0)
        server.close()

    asyncio.run(scenario())


def test_sends_between_receives_lose_no_wake_up() -> None:
    """ZeroMQ's descriptor is edge-triggered and a send may eat the edge of an incoming message."""

    async def scenario() -> None:
        server = ServerSocket()
        engine = EngineSocket(server.endpoint, 0, 0)
        engine.send(Progress("load", 0, 1))
        await asyncio.wait_for(server.recv(), 5)
        stop = threading.Event()

        def echo() -> None:
            while not stop.is_set():
                engine.wait(0.05)
                while engine.recv() is not None:
                    engine.send(Progress("echo", 1, 1))

        thread = threading.Thread(target=echo)
        thread.start()
        for _ in range(300):
            received = asyncio.ensure_future(server.recv())
            await asyncio.sleep(0)
            server.send(0, 0, Abort(1))
            server.send(0, 0, Abort(2))
            await asyncio.wait_for(received, 5)
            await asyncio.wait_for(server.recv(), 5)
        stop.set()
        thread.join()
        engine.close()
        server.close()

    asyncio.run(scenario())


def test_a_flood_leaves_the_event_loop_alive() -> None:
    async def scenario() -> None:
        server = ServerSocket()
        engine = EngineSocket(server.endpoint, 0, 0)
        for n in range(RECEIVE_BURST * 20):
            engine.send(Progress("load", n, 1))
        await asyncio.sleep(0.1)
        turns = 0

        async def other_task() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.ensure_future(other_task())
        for _ in range(RECEIVE_BURST * 20):
            await asyncio.wait_for(server.recv(), 5) if not turns else await server.recv()
        assert turns >= 10
        other.cancel()
        engine.close()
        server.close()

    asyncio.run(scenario())


def test_a_wake_from_another_thread_ends_a_wait() -> None:
    async def bind() -> ServerSocket:
        return ServerSocket()

    server = asyncio.run(bind())
    engine = EngineSocket(server.endpoint, 0, 0)
    engine.wake()
    begin = time.monotonic()
    engine.wait(5)
    assert time.monotonic() - begin < 1, "a wake before the wait counts"
    timer = threading.Timer(0.05, engine.wake)
    timer.start()
    engine.wait(5)
    assert time.monotonic() - begin < 2
    timer.join()
    begin = time.monotonic()
    engine.wait(0.05)
    assert time.monotonic() - begin >= 0.045, "old wake-ups are used up"
    for _ in range(100_000):
        engine.wake()  # a full pipe neither blocks nor raises
    engine.close()
    server.close()


def test_only_the_owner_reaches_an_ipc_socket(tmp_path: Path) -> None:
    server = ServerSocket()
    directory = Path(server.endpoint.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    server.close()
    server.close()
    assert not directory.exists()

    server = ServerSocket(f"ipc://{tmp_path}/run/engines")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    server.close()

    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o755)
    with pytest.raises(ConfigError, match="mode 0700, its mode is 0755"):
        ServerSocket(f"ipc://{tmp_path}/open/engines")


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:notaport", "nonsense", "ipc:///tmp/" + "x" * 120 + "/engines"])
def test_a_wrong_address_is_a_config_error(endpoint: str) -> None:
    with pytest.raises(ConfigError):
        ServerSocket(endpoint)


def test_a_taken_address_is_a_config_error() -> None:
    server = ServerSocket("tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match="cannot listen for engines"):
        ServerSocket(server.endpoint)
    server.close()
    with pytest.raises(ConfigError, match="cannot connect"):
        EngineSocket("nonsense", 0, 0)
