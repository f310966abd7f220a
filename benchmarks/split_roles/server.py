"""The server of process_split.py: FastAPI, and the engine in a thread or in a process behind it."""

import array
import asyncio
import contextlib
import gc
import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.split_roles.engine import Engine
from benchmarks.split_roles.launch import start_role
from twinjet.wire.messages import Shutdown, StepTokens, Submit, ToEngine
from twinjet.wire.sockets import ServerSocket

SHORT_SWITCH_INTERVAL_S = 0.0001


class CompletionBody(msgspec.Struct):
    prompt: str | list[int]
    max_tokens: int
    stream: bool = False


class Choice(msgspec.Struct):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


class Chunk(msgspec.Struct):
    id: str
    created: int
    choices: list[Choice]
    object: str = "text_completion"
    model: str = "fake"


class Streams:
    """Open streams of the server; `send` hands a message to the engine, wherever that is."""

    def __init__(self) -> None:
        self.send: Callable[[ToEngine], None] = lambda message: None
        self._open: dict[int, asyncio.Queue] = {}
        self._next_id = 0

    def publish(self, message: StepTokens) -> None:
        for sequence_id, token, finish in zip(message.sequence_ids, message.token_ids, message.finish, strict=True):
            self._open[sequence_id].put_nowait((message.step_id, token, finish or None))

    async def tokens(self, prompt: list[int], max_tokens: int):
        self._next_id += 1
        sequence_id = self._next_id
        tokens = self._open[sequence_id] = asyncio.Queue()
        known = array.array("i", prompt).tobytes()
        self.send(Submit(sequence_id, known, max_tokens, 1.0, 0, 1.0, 0.0, 0, 0, []))
        finish = None
        while not finish:
            step_id, token, finish = await tokens.get()
            yield step_id, token, finish
        del self._open[sequence_id]


@dataclass(frozen=True, slots=True)
class Running:
    """A started engine."""

    pids: list[int]
    """Processes of server and engine."""
    join: Callable[[], None]
    """Waits until the engine has written its stamps; blocks."""


def create_app(streams: Streams, on_shutdown: Callable[[], Awaitable[None]]):
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import StreamingResponse

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI):
        yield
        await on_shutdown()  # here, because uvicorn ends the process by the signal it got

    app = FastAPI(lifespan=lifespan)
    decoder, encoder = msgspec.json.Decoder(CompletionBody), msgspec.json.Encoder()

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = decoder.decode(await request.body())
        prompt = body.prompt if isinstance(body.prompt, list) else list(body.prompt.encode())
        tokens = streams.tokens(prompt, body.max_tokens)
        if not body.stream:
            ids = [token async for _, token, _ in tokens]
            return Response(encoder.encode({"prompt_tokens": len(prompt), "token_ids": ids}))

        async def events():
            async for step_id, token, finish in tokens:
                chunk = Chunk(str(step_id), 0, [Choice(0, " word", [token], finish)])
                yield b"data: " + encoder.encode(chunk) + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def start_engine_thread(directory: Path, streams: Streams) -> Running:
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    streams.send = inbox.put
    loop = asyncio.get_running_loop()

    def poll() -> list[ToEngine]:
        messages = []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(inbox.get_nowait())
        return messages

    def publish(message: StepTokens) -> None:
        loop.call_soon_threadsafe(streams.publish, message)

    engine = Engine(directory, poll, publish)
    engine.warm_up()
    thread = threading.Thread(target=engine.run, name="loop", daemon=True)
    thread.start()
    return Running([os.getpid()], thread.join)


async def start_engine_process(directory: Path, streams: Streams) -> Running:
    wire = ServerSocket(f"ipc://{directory}/engines")
    process = start_role("engine", directory)
    await wire.recv()  # the progress that says it is warm

    def send(message: ToEngine) -> None:
        if not wire.send(0, 0, message):
            raise RuntimeError("the engine is gone or has stopped reading")

    async def receive() -> None:
        while True:
            _, _, message = await wire.recv()
            if isinstance(message, StepTokens):
                streams.publish(message)

    streams.send = send
    receiving = asyncio.create_task(receive())

    def join() -> None:
        process.wait()
        receiving.get_loop().call_soon_threadsafe(receiving.cancel)

    gc.collect()
    gc.freeze()
    return Running([os.getpid(), process.pid], join)


async def run_server(directory: Path, mode: str) -> None:
    import uvicorn

    if mode == "thread-switch":
        sys.setswitchinterval(SHORT_SWITCH_INTERVAL_S)
    streams = Streams()
    if mode in ("thread", "thread-switch"):
        engine = start_engine_thread(directory, streams)
    else:
        engine = await start_engine_process(directory, streams)

    async def stop_engine() -> None:
        streams.send(Shutdown())
        await asyncio.to_thread(engine.join)

    app = create_app(streams, stop_engine)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(json.dumps({"port": listener.getsockname()[1], "pids": engine.pids}), flush=True)
    config = uvicorn.Config(app, http="httptools", log_level="warning", access_log=False, timeout_keep_alive=3600)
    await uvicorn.Server(config).serve(sockets=[listener])
