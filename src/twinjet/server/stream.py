"""Server-sent events straight on ASGI, and watching for a client that goes away. Knows no wire shape.

Memory per stream is bounded: `send` waits while the connection's buffer is full.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twinjet.server.errors import ErrorBody, ErrorDetail

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"

Write = Callable[[msgspec.Struct], Awaitable[None]]


@asynccontextmanager
async def watch_client(receive: Receive, on_gone: Callable[[], None]) -> AsyncIterator[None]:
    """Call `on_gone` once, as soon as the client closes the connection while the block runs."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class EventStream(Response):
    """An answer written event by event by `produce`, which gets a function that sends one."""

    def __init__(self, produce: Callable[[Write], Awaitable[None]], on_gone: Callable[[], None]) -> None:
        # Not `super().__init__`: there is no body, and the headers are fixed.
        self.status_code = 200
        self.background = None
        self.raw_headers = _HEADERS
        self._produce = produce
        self._on_gone = on_gone
        self._encoder = msgspec.json.Encoder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        encode = self._encoder.encode

        async def write(event: msgspec.Struct) -> None:
            body = b"data: " + encode(event) + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async with watch_client(receive, self._on_gone):
            await self._produce(write)
            await send({"type": "http.response.body", "body": _DONE, "more_body": False})


class ErrorEvent(msgspec.Struct):
    """The last event of a stream that could not be finished: a chunk that also has `error`.

    Its choices are those that had not ended, with `finish_reason` "error".
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    error: ErrorDetail


def json_response(answer: msgspec.Struct | ErrorBody, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")
