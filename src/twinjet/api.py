"""The Python interface: `LLM` for scripts and notebooks, `AsyncLLM` for programs with an event loop.

    from twinjet import LLM
    with LLM("smollm2") as llm:
        print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text)

Both run the same engine processes as the server does, without HTTP. Knows text and the orchestrator; nothing
of pages, slots or devices. `LLM` is `AsyncLLM` on an event loop in a thread of its own, so that it works inside
notebooks, whose own loop is already running.
"""

import asyncio
import itertools
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from twinjet.assemble import Assembly, OpenedModel, assemble, open_model
from twinjet.core.errors import ConfigError, InvalidRequest, StepFailed
from twinjet.core.types import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs
from twinjet.options import DEFAULT_MODEL, EngineOptions, default_home
from twinjet.text.chat import encode_chat
from twinjet.text.stream import TextStream

__all__ = ["GREEDY", "LLM", "AsyncLLM", "Completion", "Delta", "Messages", "Prompt", "StartProgress", "Usage"]

Prompt = str | Sequence[int]
"""Text, which gets the model's BOS where it has one, or token ids, which are taken as they are."""
Messages = Sequence[Mapping[str, Any]]
"""A conversation, as {"role": ..., "content": ...}."""
StartProgress = Callable[[int, str, int, int], None]
"""(engine_id, stage, done, total), as engines load and compile."""

GREEDY = SamplingParams(temperature=0.0)
DEFAULT_MAX_TOKENS = 256
MAX_REQUESTS = 512
"""Requests handed over at once, and no more than the orchestrator takes; others wait here, as nobody is sent away."""
_CLOSE_TIMEOUT_S = 30.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of a stream. The last has a `finish_reason`; any may have no text, while it is withheld."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """As long as `token_ids` where they were asked for."""
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt gave."""

    text: str
    """Without special tokens and without the stop string."""
    token_ids: tuple[int, ...]
    """Everything that was generated, the end token included."""
    finish_reason: FinishReason
    """"stop": an end token or a stop string; "length": `max_tokens` or the context; "cancelled": closed meanwhile."""
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry for each of `token_ids`, where `logprobs` was given."""

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt_token_ids), len(self.token_ids))


class AsyncLLM:
    """A model with its engine processes, for use from one event loop.

    `async with AsyncLLM("smollm2") as llm:` starts the engines and ends them; so do `start` and `close`.
    """

    def __init__(
        self,
        model: str | OpenedModel = DEFAULT_MODEL,
        *,
        options: EngineOptions | None = None,
        home: str | os.PathLike[str] | None = None,
    ) -> None:
        """`model` is a known name, a GGUF file, or `hf:org/repo[:file]`; it is pulled by `start` where it is missing.
        One that was opened already is taken as it is.

        `home` is where models and compiled programs are kept; None: `TWINJET_HOME`, else ~/.cache/twinjet.
        """
        self._model = model
        self._options = options or EngineOptions()
        self._home = Path(home) if home is not None else default_home(os.environ)
        self._assembly: Assembly | None = None
        self._request_numbers = itertools.count()
        slots = self._options.max_streams * len(self._options.roles)
        self._room = asyncio.Semaphore(min(MAX_REQUESTS, slots + self._options.max_waiting))

    async def start(self, on_progress: StartProgress | None = None) -> Self:
        """Pull and open the model, start the engines, return when they are warm.

        Raises: CheckpointError, ConfigError, EngineDead.
        """
        if self._assembly is not None:
            return self
        model = self._model
        if isinstance(model, str):
            model = await asyncio.to_thread(open_model, model, self._home)
        assembly = assemble(model, self._options, self._home)
        try:
            await assembly.orchestrator.start(on_progress)
        except BaseException:
            await assembly.orchestrator.stop()
            raise
        self._assembly = assembly
        return self

    async def close(self) -> None:
        """End the engine processes; what still runs ends with an error. May be called twice."""
        assembly, self._assembly = self._assembly, None
        if assembly is not None:
            await assembly.orchestrator.stop()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def assembly(self) -> Assembly:
        """The opened model, the engines' settings, and the orchestrator. Raises ConfigError before `start`."""
        if self._assembly is None:
            raise ConfigError("the model is not running: use it inside `with`, or call start() first and close() last")
        return self._assembly

    async def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        ignore_eos: bool = False,
    ) -> list[Completion]:
        """As `LLM.generate`."""
        batch: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        each = [sampling] * len(batch) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(batch):
            raise InvalidRequest(f"expected one sampling for each of {len(batch)} prompts, got {len(each)}", "sampling")
        requests = [
            self._request(self._prompt_ids(prompt), choice, max_tokens, logprobs, ignore_eos)
            for prompt, choice in zip(batch, each, strict=True)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._complete(request, stop)) for request in requests]
        except ExceptionGroup as failures:  # the first ended all others, and is what happened
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def chat(
        self,
        messages: Messages,
        sampling: SamplingParams = GREEDY,
        *,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
    ) -> Completion:
        """As `LLM.chat`."""
        request = self._request(self._chat_ids(messages), sampling, max_tokens, logprobs, False)
        return await self._complete(request, stop)

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams = GREEDY,
        *,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        ignore_eos: bool = False,
    ) -> AsyncGenerator[Delta, None]:
        """`async for delta in llm.stream(...)`: the answer as it comes. Closing the generator ends the request."""
        return self._deltas(self._request(self._prompt_ids(prompt), sampling, max_tokens, logprobs, ignore_eos), stop)

    def stream_chat(
        self,
        messages: Messages,
        sampling: SamplingParams = GREEDY,
        *,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """The next message of a conversation as it comes. Closing the generator ends the request."""
        return self._deltas(self._request(self._chat_ids(messages), sampling, max_tokens, logprobs, False), stop)

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.assembly.model.tokenizer.encode(prompt, add_special=True))
        if not isinstance(prompt, Sequence):
            raise InvalidRequest(
                f"a prompt is a text or a sequence of token ids, got {prompt!r}; "
                "the ids of one prompt go into a list of their own: [[1, 2, 3]]",
                "prompt",
            )
        return tuple(prompt)

    def _chat_ids(self, messages: Messages) -> tuple[int, ...]:
        model = self.assembly.model
        if model.template is None:
            raise InvalidRequest(
                f"{model.name} is a base model without a chat template; use generate() with a prompt", "messages"
            )
        return tuple(encode_chat(model.tokenizer, model.template, [dict(message) for message in messages]))

    def _request(
        self,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        max_tokens: int | None,
        logprobs: int | None,
        ignore_eos: bool,
    ) -> Request:
        assembly = self.assembly
        if not prompt_ids:
            raise InvalidRequest("the prompt has no tokens", "prompt")
        room = assembly.engine.scheduler.context - len(prompt_ids)
        return Request(
            request_id=f"api-{next(self._request_numbers)}",
            prompt_ids=prompt_ids,
            # A prompt that fills the context is refused by the orchestrator, which names the limit.
            max_tokens=max(1, room) if max_tokens is None else max_tokens,
            sampling=sampling,
            stop_token_ids=frozenset() if ignore_eos else frozenset(assembly.model.tokenizer.end_ids),
            num_logprobs=logprobs,
        )

    async def _complete(self, request: Request, stop: str | Sequence[str]) -> Completion:
        text: list[str] = []
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        finish_reason: FinishReason = "error"
        async for delta in self._deltas(request, stop):
            text.append(delta.text)
            token_ids += delta.token_ids
            logprobs += delta.logprobs or ()
            finish_reason = delta.finish_reason or finish_reason
        return Completion(
            text="".join(text),
            token_ids=tuple(token_ids),
            finish_reason=finish_reason,
            prompt_token_ids=request.prompt_ids,
            logprobs=tuple(logprobs) if request.num_logprobs is not None else None,
        )

    async def _deltas(self, request: Request, stop: str | Sequence[str]) -> AsyncGenerator[Delta, None]:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        text = TextStream(self.assembly.model.tokenizer, stops)
        orchestrator = self.assembly.orchestrator
        async with self._room:
            events = orchestrator.submit(request)
            try:
                async for event in events:
                    if event.finish_reason == "error":
                        raise StepFailed(event.error or "the engine failed the request")
                    delta = _delta(event, text)
                    yield delta
                    if delta.finish_reason is not None:
                        return
            finally:
                # Left early, for a stop string or by the caller; no news to a request that is over.
                orchestrator.abort(request.request_id)


def _delta(event: TokenEvent, text: TextStream) -> Delta:
    """Text of an event's tokens, up to the first that completes a stop string."""
    pushed = text.push(event.token_ids)
    if pushed.stop is not None:
        count = pushed.num_tokens
        logprobs = event.logprobs[:count] if event.logprobs is not None else None
        return Delta(pushed.text, event.token_ids[:count], logprobs, "stop")
    if event.finish_reason is None:
        return Delta(pushed.text, event.token_ids, event.logprobs)
    last = text.finish()
    finish_reason = "stop" if last.stop is not None else event.finish_reason
    return Delta(pushed.text + last.text, event.token_ids, event.logprobs, finish_reason)


class LLM:
    """A model with its engine processes, for scripts and notebooks: ready when the constructor returns.

    Use it in a `with` block or call `close`; engines also end with the program. Methods may be called from any
    thread, several at once.
    """

    def __init__(
        self,
        model: str | OpenedModel = DEFAULT_MODEL,
        *,
        options: EngineOptions | None = None,
        home: str | os.PathLike[str] | None = None,
        on_progress: StartProgress | None = None,
    ) -> None:
        """`model` is a known name, a GGUF file, or `hf:org/repo[:file]`; it is pulled where it is missing.

        Raises: CheckpointError, ConfigError, EngineDead.
        """
        self._llm = AsyncLLM(model, options=options, home=home)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="twinjet-api", daemon=True)
        thread.start()
        # Also runs at the program's end, before daemon threads are cut off; holds no reference to self.
        self._finalizer = weakref.finalize(self, _close_loop, self._llm, self._loop, thread)
        try:
            self._wait(self._llm.start(on_progress))
        except BaseException:
            self._finalizer()
            raise

    def close(self) -> None:
        """End the engine processes. May be called twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def assembly(self) -> Assembly:
        """The opened model, the engines' settings, and the orchestrator."""
        return self._llm.assembly

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        ignore_eos: bool = False,
    ) -> list[Completion]:
        """Complete all prompts together; results in the prompts' order.

        Args:
            prompts: One text, or several texts or sequences of token ids.
            sampling: One for all prompts, or one for each. Equal prompts with equal seeds give equal results.
            max_tokens: Tokens to generate at most; None: until the context is full.
            stop: Strings that end a result, and are not part of it.
            logprobs: 0: each token's log-probability; n: also the n most likely alternatives'.
            ignore_eos: Go on past end tokens.

        Raises:
            InvalidRequest, ContextTooLong: a prompt or a setting cannot work; nothing was generated.
            EngineError: an engine failed.
        """
        return self._wait(
            self._llm.generate(
                prompts, sampling, max_tokens=max_tokens, stop=stop, logprobs=logprobs, ignore_eos=ignore_eos
            )
        )

    def chat(
        self,
        messages: Messages,
        sampling: SamplingParams = GREEDY,
        *,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
    ) -> Completion:
        """The next message of a conversation; arguments as in `generate`.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the messages.
        """
        return self._wait(self._llm.chat(messages, sampling, max_tokens=max_tokens, stop=stop, logprobs=logprobs))

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams = GREEDY,
        *,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        ignore_eos: bool = False,
    ) -> Iterator[Delta]:
        """The answer as it comes. Leaving the loop early ends the request."""
        return self._iterate(
            self._llm.stream(
                prompt, sampling, max_tokens=max_tokens, stop=stop, logprobs=logprobs, ignore_eos=ignore_eos
            )
        )

    def stream_chat(
        self,
        messages: Messages,
        sampling: SamplingParams = GREEDY,
        *,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
    ) -> Iterator[Delta]:
        """The next message of a conversation as it comes. Leaving the loop early ends the request."""
        return self._iterate(
            self._llm.stream_chat(messages, sampling, max_tokens=max_tokens, stop=stop, logprobs=logprobs)
        )

    def _iterate(self, deltas: AsyncGenerator[Delta, None]) -> Iterator[Delta]:
        arrived: SimpleQueue[Delta | BaseException | None] = SimpleQueue()

        async def pump() -> None:
            try:
                async with aclosing(deltas):
                    async for delta in deltas:
                        arrived.put(delta)
                arrived.put(None)
            except BaseException as error:
                arrived.put(error)
                raise

        pumping = self._start(pump())
        try:
            while (item := arrived.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            pumping.cancel()

    def _start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        if not self._finalizer.alive:
            work.close()
            raise ConfigError("this LLM is closed; make a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = self._start(work)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C arrives here while the work goes on over there.
            future.cancel()
            raise


def _close_loop(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    try:
        asyncio.run_coroutine_threadsafe(llm.close(), loop).result(_CLOSE_TIMEOUT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_TIMEOUT_S)
        if not thread.is_alive():
            loop.close()
