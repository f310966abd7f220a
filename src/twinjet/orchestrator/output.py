"""One request's events on their way to its reader. Knows no engines.

News that comes faster than the reader reads merges into one event, so that what is held for a slow
reader is bounded by the request's `max_tokens`, and nobody else waits for it.
"""

import asyncio
import contextlib
from collections.abc import Callable

from twinjet.core.types import FinishReason, TokenEvent, TokenLogprobs


class Output:
    """Tokens not yet read, and the end. Written by the dispatcher, read by one `TokenStream`."""

    __slots__ = ("_error", "_finish_reason", "_logprobs", "_token_ids", "_waiter", "computed_s", "num_cached")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish_reason: FinishReason | None = None
        self._error: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.num_cached = 0
        """As in `TokenEvent`; goes out with the next event."""
        self.computed_s = 0.0
        """As in `TokenEvent`."""

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._wake()

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        self._finish_reason = reason
        self._error = error
        self._wake()

    def take(self) -> TokenEvent | None:
        """Everything unread as one event; None if there is nothing new."""
        if not self._token_ids and self._finish_reason is None:
            return None
        event = TokenEvent(
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs) if self._logprobs else None,
            finish_reason=self._finish_reason,
            num_cached=self.num_cached,
            error=self._error,
            computed_s=self.computed_s,
        )
        self.num_cached = 0
        self._token_ids.clear()
        self._logprobs.clear()
        return event

    async def wait(self) -> None:
        """Until `take` has something to give."""
        if self._token_ids or self._finish_reason is not None:
            return
        if self._waiter is not None:
            raise RuntimeError("two tasks read the stream of one request; give each its own request")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class TokenStream:
    """The reader's end. Left before its last event, it aborts the request: closed, cancelled or forgotten."""

    def __init__(self, output: Output, abort: Callable[[], None]) -> None:
        self._output = output
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._over = False

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> TokenEvent:
        if self._over:
            raise StopAsyncIteration
        while (event := self._output.take()) is None:
            try:
                await self._output.wait()
            except asyncio.CancelledError:
                await self.aclose()
                raise
        self._over = event.finish_reason is not None
        return event

    async def aclose(self) -> None:
        if not self._over:
            self._over = True
            self._abort()

    def __del__(self) -> None:
        # `break` in an `async for` closes nothing; without this the engine would go on for nobody.
        if not self._over:
            # Collection may happen on any thread, and after the loop has closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._abort)
