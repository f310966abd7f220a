"""Jobs and deltas in OpenAI's two shapes, completions and chat, whole or as a stream."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from time import monotonic, time

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Receive

from twinjet.server.errors import ErrorAnswer, answer_error
from twinjet.server.generation import Choice, Delta, Generation
from twinjet.server.metrics import ServerMetrics
from twinjet.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    Message,
    MessageDelta,
    TokenIds,
    Usage,
    chat_logprobs,
    completion_logprobs,
    count_usage,
)
from twinjet.server.service import ServedModel
from twinjet.server.stream import ErrorEvent, EventStream, Write, json_response, watch_client


@dataclass(slots=True)
class Gathered:
    """A choice put together for an answer that is not streamed."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    """Kept only with log-probabilities."""
    finish_reason: FinishReason | None = None

    def add(self, delta: Delta, with_logprobs: bool) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason
        if with_logprobs:
            self.deltas.append(delta)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def whole(self) -> Delta:
        """As one delta."""
        entries = tuple(entry for delta in self.deltas for entry in delta.logprobs or ())
        return Delta(tuple(self.token_ids), self.text, entries, None)


class Reply(ABC):
    """One job's answer. Subclasses know the shape of a chunk and of the whole."""

    chunk_object: str

    def __init__(self, service: ServedModel, generation: Generation, metrics: ServerMetrics) -> None:
        job = generation.job
        self._tokenizer = service.tokenizer
        self._orchestrator = service.orchestrator
        self._generation = generation
        self._metrics = metrics
        self._job = job
        self._id = job.job_id
        self._created = int(time())
        self._model = service.name
        self._fingerprint = service.fingerprint
        self._with_logprobs = job.requests[0].num_logprobs is not None
        # In a stream with usage, every chunk but the last has it as null.
        self._chunk_usage: UnsetType | None = None if job.include_usage else UNSET
        self._to_start = set(range(len(job.requests)))
        self._to_finish = set(range(len(job.requests)))

    def streamed(self) -> Response:
        """A stream of chunks, ended by `[DONE]` whatever happens."""
        return EventStream(self._produce, self._generation.abandon)

    async def gathered(self, receive: Receive) -> Response | None:
        """The answer once all choices have ended, or None when the client did not wait for it.

        Raises:
            EngineError, CapacityError: a choice could not be finished.
        """
        parts = [Gathered() for _ in self._generation.choices]

        async def gather(choice: Choice, delta: Delta) -> None:
            parts[choice.index].add(delta, self._with_logprobs)

        async with watch_client(receive, self._generation.abandon):
            await self._generation.run(gather)
        return None if self._generation.abandoned else json_response(self._answer(parts))

    async def _produce(self, write: Write) -> None:
        generation = self._generation

        async def emit(choice: Choice, delta: Delta) -> None:
            first = choice.index in self._to_start
            if first:
                self._to_start.remove(choice.index)
            if delta.finish_reason is not None:
                self._to_finish.remove(choice.index)
            await write(self._chunk(choice, delta, first))
            if delta.computed_s:
                self._metrics.delivery.add(monotonic() - delta.computed_s)

        try:
            await generation.run(emit)
        except Exception as error:
            answer = answer_error(error, serving=self._orchestrator.health().ok)
            self._metrics.errors[answer.status] += 1
            await write(self._error_event(answer))
            return
        if self._job.include_usage and not generation.abandoned:
            await write(self._usage_chunk(self._usage()))

    def _usage(self) -> Usage:
        generation = self._generation
        return count_usage(self._job.prompt_tokens, generation.completion_tokens, generation.cached_tokens)

    def _error_event(self, answer: ErrorAnswer) -> ErrorEvent:
        ended = Delta((), "", None, None)
        choices = []
        for index in sorted(self._to_finish):
            choice = self._chunk_choice(self._generation.choices[index], ended, False)
            choice.finish_reason = "error"
            choices.append(choice)
        return ErrorEvent(
            self._id, self.chunk_object, self._created, self._model, self._fingerprint, choices, answer.detail
        )

    def _if_asked(self, ids: TokenIds) -> TokenIds:
        return ids if self._job.return_token_ids else UNSET

    @abstractmethod
    def _chunk_choice(self, choice: Choice, delta: Delta, first: bool) -> CompletionChoice | ChatChunkChoice: ...

    @abstractmethod
    def _chunk(self, choice: Choice, delta: Delta, first: bool) -> msgspec.Struct: ...

    @abstractmethod
    def _usage_chunk(self, usage: Usage) -> msgspec.Struct: ...

    @abstractmethod
    def _answer(self, parts: list[Gathered]) -> msgspec.Struct: ...


class CompletionReply(Reply):
    """/v1/completions."""

    chunk_object = "text_completion"

    def __init__(self, service: ServedModel, generation: Generation, metrics: ServerMetrics) -> None:
        super().__init__(service, generation, metrics)
        self._offsets = [0] * len(generation.choices)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._id, "text_completion", self._created, self._model, self._fingerprint, choices, usage)

    def _logprobs(self, index: int, delta: Delta) -> CompletionLogprobs | None:
        if not self._with_logprobs:
            return None
        columns, self._offsets[index] = completion_logprobs(self._tokenizer, delta, self._offsets[index])
        return columns

    def _prompt_ids(self, choice: Choice) -> TokenIds:
        return self._if_asked(self._job.prompts[choice.prompt_index])

    def _chunk_choice(self, choice: Choice, delta: Delta, first: bool) -> CompletionChoice:
        return CompletionChoice(
            choice.index,
            delta.text,
            self._logprobs(choice.index, delta),
            delta.finish_reason,
            self._prompt_ids(choice) if first else UNSET,
            self._if_asked(delta.token_ids),
        )

    def _chunk(self, choice: Choice, delta: Delta, first: bool) -> Completion:
        return self._completion([self._chunk_choice(choice, delta, first)], self._chunk_usage)

    def _usage_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def _answer(self, parts: list[Gathered]) -> Completion:
        choices = [
            CompletionChoice(
                choice.index,
                part.text,
                self._logprobs(choice.index, part.whole()),
                part.finish_reason,
                self._prompt_ids(choice),
                self._if_asked(part.token_ids),
            )
            for choice, part in zip(self._generation.choices, parts, strict=True)
        ]
        return self._completion(choices, self._usage())


class ChatReply(Reply):
    """/v1/chat/completions."""

    chunk_object = "chat.completion.chunk"

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, delta) if self._with_logprobs else None

    def _chunk_choice(self, choice: Choice, delta: Delta, first: bool) -> ChatChunkChoice:
        return ChatChunkChoice(
            choice.index,
            MessageDelta(role="assistant" if first else UNSET, content=delta.text),
            self._logprobs(delta),
            delta.finish_reason,
            self._if_asked(delta.token_ids),
        )

    def _chunk(self, choice: Choice, delta: Delta, first: bool) -> ChatChunk:
        choices = [self._chunk_choice(choice, delta, first)]
        # Beside the choices, so once for all of them: they share the prompt.
        first_of_all = first and len(self._to_start) == len(self._generation.choices) - 1
        prompt_ids = self._if_asked(self._job.prompts[0]) if first_of_all else UNSET
        return self._shape_chunk(choices, self._chunk_usage, prompt_ids)

    def _usage_chunk(self, usage: Usage) -> ChatChunk:
        return self._shape_chunk([], usage, UNSET)

    def _shape_chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None, prompt_ids: TokenIds
    ) -> ChatChunk:
        return ChatChunk(
            self._id,
            "chat.completion.chunk",
            self._created,
            self._model,
            self._fingerprint,
            choices,
            usage,
            prompt_ids,
        )

    def _answer(self, parts: list[Gathered]) -> ChatCompletion:
        choices = [
            ChatChoice(
                choice.index,
                Message("assistant", part.text),
                self._logprobs(part.whole()),
                part.finish_reason,
                self._if_asked(part.token_ids),
            )
            for choice, part in zip(self._generation.choices, parts, strict=True)
        ]
        return ChatCompletion(
            self._id,
            "chat.completion",
            self._created,
            self._model,
            self._fingerprint,
            choices,
            self._usage(),
            self._if_asked(self._job.prompts[0]),
        )
