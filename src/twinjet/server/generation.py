"""A job while it runs: one choice per sequence, events in, deltas out. Knows no HTTP and no wire shape.

A delta is what one step brought for one choice: the tokens delivered, and the text that may be shown by now.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from twinjet.core.errors import CapacityError, DeadlineExceeded, StepFailed
from twinjet.core.types import Request, TokenEvent, TokenLogprobs
from twinjet.server.intake import Job
from twinjet.server.metrics import ServerMetrics
from twinjet.server.service import ServedModel
from twinjet.text.stream import TextStream


@dataclass(slots=True)
class Delta:
    """One step of one choice."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: Literal["stop", "length"] | None
    computed_s: float = 0.0
    """As in `TokenEvent`."""


class Choice:
    """One sequence of a job."""

    __slots__ = (
        "_arrived",
        "_last",
        "_metrics",
        "ended",
        "events",
        "index",
        "num_cached",
        "num_tokens",
        "prompt_index",
        "request",
        "stream",
    )

    def __init__(
        self,
        index: int,
        prompt_index: int,
        request: Request,
        events: AsyncIterator[TokenEvent],
        stream: TextStream,
        metrics: ServerMetrics,
        arrived: float,
    ) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.request = request
        self.events = events
        self.stream = stream
        self.num_tokens = 0
        """Delivered so far."""
        self.num_cached = 0
        """Tokens of the prompt from the prefix cache; known with the first token."""
        self.ended = False
        """No more events are wanted or will come."""
        self._metrics = metrics
        self._arrived = arrived
        self._last: float | None = None

    def advance(self, event: TokenEvent) -> Delta:
        """Take in an event of one token at most.

        Raises:
            StepFailed, CapacityError: the sequence ended without its last token.
        """
        finish = event.finish_reason
        if finish == "error":
            self._end("error")
            raise StepFailed(event.error or "the orchestrator gave no reason")
        if finish == "cancelled":
            self._end("cancelled")
            raise CapacityError("the server is stopping and cancelled this request; send it again")

        ids = event.token_ids
        text = ""
        # What ends a generation by its id is delivered, but has no text to show.
        if ids and finish != "stop":
            piece = self.stream.push(ids)
            text = piece.text
            if piece.stop is not None:
                finish = "stop"
        if finish is not None and self.stream.stop is None:
            tail = self.stream.finish()
            text += tail.text
            if tail.stop is not None:
                finish = "stop"

        if ids:
            self._count()
        if finish is not None:
            self._end(finish)
        return Delta(ids, text, event.logprobs, finish, event.computed_s)

    def _count(self) -> None:
        now = monotonic()
        metrics = self._metrics
        if self._last is None:
            metrics.ttft.add(now - self._arrived)
        else:
            metrics.itl.add(now - self._last)
        self._last = now
        self.num_tokens += 1
        metrics.generation_tokens += 1

    def _end(self, reason: str) -> None:
        self.ended = True
        self._metrics.finished[reason] += 1
        self._metrics.e2e.add(monotonic() - self._arrived)

    def cancel(self) -> None:
        """Count a sequence that nobody waits for any more."""
        self._end("cancelled")


Emit = Callable[[Choice, Delta], Awaitable[None]]


class Generation:
    """All sequences of one job, submitted on construction.

    Raises:
        RequestError, CapacityError, EngineDead: from the orchestrator; nothing is left running then.
    """

    def __init__(self, service: ServedModel, job: Job, metrics: ServerMetrics, arrived: float) -> None:
        self.job = job
        self.abandoned = False
        """The client went away."""
        self.choices: list[Choice] = []
        self._orchestrator = service.orchestrator
        # The event loop's clock need not be that of `arrived`.
        self._began_s = asyncio.get_running_loop().time() - (monotonic() - arrived)
        try:
            for index, request in enumerate(job.requests):
                events = self._orchestrator.submit(request)
                stream = TextStream(service.tokenizer, job.stops)
                self.choices.append(Choice(index, index // job.n, request, events, stream, metrics, arrived))
        except BaseException:
            self.abort()
            raise
        metrics.prompt_tokens += job.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Delivered so far, over all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Of the prompts, each counted once: its later choices find what the first has computed."""
        return sum(choice.num_cached for choice in self.choices[:: self.job.n])

    def abandon(self) -> None:
        """The client went away: end everything now."""
        self.abandoned = True
        self.abort()

    def abort(self) -> None:
        """End what still runs. Safe to call at any time."""
        for choice in self.choices:
            if not choice.ended:
                choice.cancel()
                self._orchestrator.abort(choice.request.request_id)

    async def run(self, emit: Emit) -> None:
        """Hand every delta to `emit`, of each choice in order, until all have ended or the job was aborted.

        Raises:
            EngineError, CapacityError: a sequence could not be finished; the others are ended with it.
        """
        try:
            if len(self.choices) == 1:
                await self._run_choice(self.choices[0], emit)
            else:
                await self._run_choices(emit)
        finally:
            self.abort()

    async def _run_choices(self, emit: Emit) -> None:
        tasks = [asyncio.create_task(self._run_choice(choice, emit)) for choice in self.choices]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_choice(self, choice: Choice, emit: Emit) -> None:
        events = choice.events
        deadline_s = choice.request.deadline_s
        limit = asyncio.timeout_at(None if deadline_s is None else self._began_s + deadline_s)
        try:
            async with limit:
                await self._emit_choice(choice, emit, limit)
        except TimeoutError:
            if not limit.expired():
                raise
            choice.cancel()
            raise DeadlineExceeded(
                f"the first token did not come within {deadline_s} s, as was asked; try again later, or allow more time"
            ) from None
        finally:
            if (close := getattr(events, "aclose", None)) is not None:
                await close()

    async def _emit_choice(self, choice: Choice, emit: Emit, limit: asyncio.Timeout) -> None:
        """`limit` is lifted when the first token is there."""
        async for event in choice.events:
            if limit.when() is not None and not limit.expired():
                limit.reschedule(None)
            choice.num_cached += event.num_cached
            for step in _by_step(event):
                if choice.ended:
                    return
                delta = choice.advance(step)
                if delta.finish_reason is not None and event.finish_reason is None:
                    # A stop string, of which the orchestrator knows nothing.
                    self._orchestrator.abort(choice.request.request_id)
                await emit(choice, delta)
        if not choice.ended:
            choice.cancel()
            raise StepFailed("the events of a sequence ended without a finish reason")


def _by_step(event: TokenEvent) -> Iterator[TokenEvent]:
    """Undo the merging of events for a reader that was behind: a client gets one delta per step."""
    ids = event.token_ids
    # A failed sequence's last token is not the failure: it is delivered first.
    finish_apart = event.finish_reason in ("error", "cancelled")
    if len(ids) <= (0 if finish_apart else 1):
        yield event
        return
    logprobs = event.logprobs
    for at in range(len(ids)):
        finish = event.finish_reason if at == len(ids) - 1 and not finish_apart else None
        step_logprobs = None if logprobs is None else logprobs[at : at + 1]
        yield TokenEvent(ids[at : at + 1], step_logprobs, finish, computed_s=event.computed_s)
    if finish_apart:
        yield TokenEvent(finish_reason=event.finish_reason, error=event.error)
