"""From a decoded body to requests in token ids: defaults, ranges, prompts, templates.

Owns the checks that need the model or the server's limits; knows no HTTP. Long texts are tokenized on
threads beside the event loop, so that they cannot stall streams. Those of /tokenize and /detokenize, which no
context bounds, have a thread of their own and make no prompt wait.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from twinjet.core.errors import ContextTooLong, InvalidRequest, Overloaded
from twinjet.core.types import MAX_LOGPROBS, EngineInfo, Request, SamplingParams
from twinjet.server import requests as bodies
from twinjet.server.body import decode_body, decode_ids, ids_decoder
from twinjet.server.requests import ChatBody, ChatMessage, CompletionBody, GenerationBody, Neutral, TokenizeBody
from twinjet.server.service import ServedModel, ServerLimits
from twinjet.text.chat import encode_rendered_chat

T = TypeVar("T")

_INLINE_CHARS = 2000
"""Texts up to this length are tokenized on the event loop: a thread would cost more than it saves."""
_MESSAGE_CHARS = 50
"""What a message costs to render besides its content, counted in characters."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_DEFAULT_COMPLETION_TOKENS = 16
_MAX_SALT_CHARS = 256
_MAX_PRIORITY = 1000
_MAX_DEADLINE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Job:
    """A client's request, checked, in token ids."""

    job_id: str
    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[Request, ...]
    """By choice index: prompt index times `n`, plus which of the `n`."""
    n: int
    stops: tuple[str, ...]
    return_token_ids: bool
    stream: bool
    include_usage: bool

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counted once, as OpenAI does."""
        return sum(map(len, self.prompts))


class Intake:
    """Turns bodies into jobs."""

    def __init__(self, service: ServedModel, limits: ServerLimits) -> None:
        self._service = service
        self._limits = limits
        self._ids = ids_decoder(service.tokenizer.vocab_size)
        self._prompt_thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._longest_token: int | None = None

    def close(self) -> None:
        """Give up the threads."""
        for thread in (self._prompt_thread, self._text_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    async def completion(self, body: CompletionBody) -> Job:
        """Raises RequestError or Overloaded."""
        info = self._check_common(body, bodies.UNSUPPORTED_COMPLETION)
        n = self._check_n(body.n, info)
        if body.best_of not in (None, 1, n):
            raise _unsupported("best_of")
        prompts = await self._prompts(body, info)
        if len(prompts) * n > self._limits.max_choices:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n = {n} are {len(prompts) * n} choices; the most in one request is "
                f"{self._limits.max_choices}. Send fewer",
                "prompt",
            )
        num_logprobs = _check_int("logprobs", body.logprobs, 0, MAX_LOGPROBS)
        max_tokens = [
            _check_max_tokens("max_tokens", body.max_tokens, len(ids), info.context)
            or min(_DEFAULT_COMPLETION_TOKENS, info.context - len(ids))
            for ids in prompts
        ]
        return self._job("cmpl", body, prompts, n, max_tokens, num_logprobs)

    async def chat(self, body: ChatBody) -> Job:
        """Raises RequestError or Overloaded."""
        info = self._check_common(body, bodies.UNSUPPORTED_CHAT)
        n = self._check_n(body.n, info)
        num_logprobs = _check_int("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
        if not body.logprobs:
            if num_logprobs:
                raise InvalidRequest("top_logprobs needs logprobs to be true; set it", "top_logprobs")
            num_logprobs = None
        elif num_logprobs is None:
            num_logprobs = 0
        field, asked = "max_tokens", body.max_tokens
        if body.max_completion_tokens is not None:
            field, asked = "max_completion_tokens", body.max_completion_tokens
            if body.max_tokens not in (None, asked):
                raise InvalidRequest(
                    f"max_tokens ({body.max_tokens}) and max_completion_tokens ({asked}) mean the same and differ; "
                    "send one",
                    field,
                )
        ids = await self._chat_ids(body.messages, body.add_generation_prompt, info.context)
        self._check_prompt("messages", ids, info.context)
        max_tokens = _check_max_tokens(field, asked, len(ids), info.context) or info.context - len(ids)
        return self._job("chatcmpl", body, [ids], n, [max_tokens], num_logprobs)

    async def tokenize(self, body: TokenizeBody) -> list[int]:
        """Ids of a text or a chat. Raises RequestError."""
        self._service.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either `prompt` or `messages`", "prompt")
        if body.messages is not None:
            if body.add_special_tokens:
                raise InvalidRequest(
                    "a chat's template brings the special tokens; leave add_special_tokens out", "add_special_tokens"
                )
            return list(await self._chat_ids(body.messages, body.add_generation_prompt, None))
        text = body.prompt or ""
        special = body.add_special_tokens is not False
        encode = self._service.tokenizer.encode
        return await self._beside(len(text), lambda: encode(text, add_special=special), self._text_thread)

    async def detokenize(self, raw: bytes) -> str:
        """Text of a JSON list of ids, special tokens shown. Raises RequestError."""
        ids = await self._decode_flat_ids(raw, "tokens")
        decode = self._service.tokenizer.decode
        return await self._beside(len(ids), lambda: decode(ids, skip_special=False), self._text_thread)

    # --- checks ---------------------------------------------------------------------------------

    def _check_common(self, body: GenerationBody, unsupported: dict[str, Neutral]) -> EngineInfo:
        self._service.check_name(body.model)
        _refuse(body, unsupported)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options needs stream to be true; set it, or leave it out", "stream_options")
        info = self._service.ready_info()
        if info is None:
            raise Overloaded("the model is still being loaded; try again in a moment", retry_after_s=2.0)
        return info

    def _check_n(self, n: int | None, info: EngineInfo) -> int:
        checked = _check_int("n", n, 1, info.max_streams)
        return 1 if checked is None else checked

    def _check_prompt(self, field: str, ids: Sequence[int], context: int) -> None:
        if not ids:
            raise InvalidRequest("the prompt is empty; it needs at least one token", field)
        if len(ids) >= context:
            raise _prompt_too_long(field, str(len(ids)), context)

    def _stops(self, stop: str | list[str] | None) -> tuple[str, ...]:
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        limits = self._limits
        if len(stops) > limits.max_stops:
            raise InvalidRequest(f"at most {limits.max_stops} stop strings are possible, got {len(stops)}", "stop")
        for text in stops:
            if not 1 <= len(text) <= limits.max_stop_chars:
                raise InvalidRequest(
                    f"a stop string has from 1 to {limits.max_stop_chars} characters, got one of {len(text)}", "stop"
                )
        return stops

    def _stop_token_ids(self, body: GenerationBody) -> frozenset[int]:
        asked = body.stop_token_ids or []
        if len(asked) > self._limits.max_stop_token_ids:
            raise InvalidRequest(
                f"at most {self._limits.max_stop_token_ids} stop_token_ids are possible, got {len(asked)}",
                "stop_token_ids",
            )
        vocab_size = self._service.tokenizer.vocab_size
        for token in asked:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"stop_token_ids must be from 0 to {vocab_size - 1} (the vocabulary), got {token}",
                    "stop_token_ids",
                )
        return frozenset(asked) if body.ignore_eos else frozenset(asked) | frozenset(self._service.tokenizer.end_ids)

    # --- prompts --------------------------------------------------------------------------------

    async def _prompts(self, body: CompletionBody, info: EngineInfo) -> list[tuple[int, ...]]:
        raw = bytes(body.prompt)
        special = body.add_special_tokens is not False
        context = info.context
        first = raw[1:].lstrip()[:1] if raw[:1] == b"[" else b""
        if raw[:1] == b'"':
            texts = [decode_body(bodies.TEXT, raw, "prompt")]
        elif first == b'"':
            texts = decode_body(bodies.TEXTS, raw, "prompt")
        elif first == b"[":
            lists = decode_body(bodies.RAWS, raw, "prompt")
            self._check_num_prompts(len(lists))
            return [await self._id_prompt(bytes(one), f"prompt[{at}]", context) for at, one in enumerate(lists)]
        elif first == b"]":
            raise InvalidRequest("the prompt is empty; it needs at least one token", "prompt")
        elif first:
            return [await self._id_prompt(raw, "prompt", context)]
        else:
            raise InvalidRequest(
                "`prompt` must be a string, a list of strings, a list of token ids, or a list of such lists", "prompt"
            )
        self._check_num_prompts(len(texts))
        if not all(texts):
            raise InvalidRequest("the prompt is empty; it needs at least one character", "prompt")
        prompts = []
        for text in texts:
            ids = await self._text_ids(text, special, context)
            self._check_prompt("prompt", ids, context)
            prompts.append(ids)
            if len(texts) > 1:
                # Many short ones are as much work as a long one.
                await asyncio.sleep(0)
        return prompts

    def _check_num_prompts(self, count: int) -> None:
        if count > self._limits.max_choices:
            raise InvalidRequest(f"at most {self._limits.max_choices} prompts are possible, got {count}", "prompt")

    async def _id_prompt(self, raw: bytes, field: str, context: int) -> tuple[int, ...]:
        # Counting commas is far cheaper than building a million integers to refuse them.
        if (count := raw.count(b",") + 1) > context:
            raise _prompt_too_long(field, str(count), context)
        ids = tuple(await self._decode_flat_ids(raw, field))
        self._check_prompt(field, ids, context)
        return ids

    async def _decode_flat_ids(self, raw: bytes, field: str) -> list[int]:
        if raw[:1] != b"[":
            raise InvalidRequest(f"`{field}` must be a list of token ids", field)
        try:
            return await decode_ids(self._ids, raw, field)
        except InvalidRequest as error:
            last = self._service.tokenizer.vocab_size - 1
            raise InvalidRequest(f"{error}; token ids are integers from 0 to {last}", error.param) from None

    async def _text_ids(self, text: str, special: bool, context: int) -> tuple[int, ...]:
        tokenizer = self._service.tokenizer
        await self._check_length(text, "prompt", context)
        return tuple(await self._beside(len(text), lambda: tokenizer.encode(text, add_special=special)))

    async def _chat_ids(
        self, messages: list[ChatMessage], add_generation_prompt: bool | None, context: int | None
    ) -> tuple[int, ...]:
        template = self._service.template
        if template is None:
            raise InvalidRequest(
                f"the model {self._service.name!r} has no chat template; use /v1/completions", "messages"
            )
        if not messages:
            raise InvalidRequest("messages is empty; send at least one message", "messages")
        if len(messages) > self._limits.max_messages:
            raise InvalidRequest(
                f"at most {self._limits.max_messages} messages are possible, got {len(messages)}", "messages"
            )
        turns = [_plain_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
        size = sum(len(turn["content"]) + _MESSAGE_CHARS for turn in turns)
        tokenizer = self._service.tokenizer
        head = add_generation_prompt is not False
        thread = self._text_thread if context is None else self._prompt_thread
        text = await self._beside(size, lambda: template.render(turns, add_generation_prompt=head), thread)
        if context is not None:
            await self._check_length(text, "messages", context)
        return tuple(await self._beside(len(text), lambda: encode_rendered_chat(tokenizer, text), thread))

    async def _check_length(self, text: str, field: str, context: int) -> None:
        """Refuse, without tokenizing it, a text that is too long however it is split."""
        if len(text) <= max(_INLINE_CHARS, context):
            return
        if self._longest_token is None:
            tokenizer = self._service.tokenizer
            self._longest_token = await self._beside(
                len(text), lambda: max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
            )
        at_least = len(text) // max(1, self._longest_token)
        if at_least >= context:
            raise _prompt_too_long(field, f"at least {at_least}", context)

    async def _beside(self, size: int, work: Callable[[], T], thread: ThreadPoolExecutor | None = None) -> T:
        if size <= _INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(thread or self._prompt_thread, work)

    # --- the job --------------------------------------------------------------------------------

    def _job(
        self,
        prefix: str,
        body: GenerationBody,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        max_tokens: Sequence[int],
        num_logprobs: int | None,
    ) -> Job:
        job_id = f"{prefix}-{secrets.token_hex(12)}"
        # A drawn seed travels with the request, so that a replay repeats its tokens.
        seed = secrets.randbits(63) if body.seed is None else body.seed
        top_k = 0 if body.top_k in (None, -1) else body.top_k
        samplings = [
            SamplingParams(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_k=top_k or 0,
                top_p=1.0 if body.top_p is None else body.top_p,
                min_p=0.0 if body.min_p is None else body.min_p,
                seed=seed,
                choice=choice,
            )
            for choice in range(n)
        ]
        stop_token_ids = self._stop_token_ids(body)
        cache_salt = _check_salt(body.cache_salt)
        priority = _check_int("priority", body.priority, -_MAX_PRIORITY, _MAX_PRIORITY)
        deadline_s = None if body.deadline_ms is None else body.deadline_ms / 1e3
        if deadline_s is not None and not 0 < deadline_s <= _MAX_DEADLINE_S:
            raise InvalidRequest(
                f"deadline_ms must be over 0 and at most {_MAX_DEADLINE_S * 1e3:.0f}, got {body.deadline_ms}",
                "deadline_ms",
            )
        requests = tuple(
            Request(
                request_id=f"{job_id}-{at * n + choice}",
                prompt_ids=ids,
                max_tokens=most,
                sampling=samplings[choice],
                stop_token_ids=stop_token_ids,
                num_logprobs=num_logprobs,
                use_cache=body.cache_prompt is not False,
                cache_salt=cache_salt,
                priority=priority or 0,
                deadline_s=deadline_s,
            )
            for at, (ids, most) in enumerate(zip(prompts, max_tokens, strict=True))
            for choice in range(n)
        )
        return Job(
            job_id=job_id,
            prompts=tuple(prompts),
            requests=requests,
            n=n,
            stops=self._stops(body.stop),
            return_token_ids=bool(body.return_token_ids),
            stream=bool(body.stream),
            include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        )


def _plain_message(message: ChatMessage, where: str) -> dict[str, str]:
    """As templates want it: role and one string."""
    _refuse(message, bodies.UNSUPPORTED_MESSAGE, where + ".")
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(_ROLES)}, got {message.role[:100]!r}", f"{where}.role"
        )
    content = message.content
    if content is None:
        raise InvalidRequest(f"{where}.content is missing; send a string or a list of text parts", f"{where}.content")
    if not isinstance(content, str):
        texts = []
        for at, part in enumerate(content):
            if part.type != "text":
                raise InvalidRequest(
                    f"{where}.content[{at}]: only parts of type 'text' are supported, got {part.type[:100]!r}",
                    f"{where}.content[{at}].type",
                )
            _refuse(part, bodies.UNSUPPORTED_PART, f"{where}.content[{at}].")
            if part.text is None:
                raise InvalidRequest(f"{where}.content[{at}].text is missing", f"{where}.content[{at}].text")
            texts.append(part.text)
        content = "\n".join(texts)
    plain = {"role": role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _refuse(body: msgspec.Struct, unsupported: dict[str, Neutral], where: str = "") -> None:
    for name, neutral in unsupported.items():
        if getattr(body, name) not in neutral:
            raise _unsupported(where + name)


def _unsupported(name: str) -> InvalidRequest:
    return InvalidRequest(f"`{name}` is not supported yet; leave it out", name)


def _check_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not 1 <= len(salt) <= _MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt must have from 1 to {_MAX_SALT_CHARS} characters, got {len(salt)}; leave it out to share "
            "prefixes with everybody who does",
            "cache_salt",
        )
    return salt


def _check_int(name: str, value: Any, low: int, high: int) -> int | None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low} to {high}, got {value}", name)
    return value


def _check_max_tokens(field: str, asked: int | None, prompt_tokens: int, context: int) -> int | None:
    if asked is None:
        return None
    if asked < 1:
        raise InvalidRequest(f"{field} must be at least 1, got {asked}", field)
    if prompt_tokens + asked > context:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and {field} is {asked}, together {prompt_tokens + asked}; the "
            f"context is {context} tokens. Shorten the prompt, or lower {field} to at most {context - prompt_tokens}",
            field,
        )
    return asked


def _prompt_too_long(field: str, tokens: str, context: int) -> ContextTooLong:
    return ContextTooLong(
        f"the prompt has {tokens} tokens; the context is {context} tokens, one of which must be left to generate. "
        f"Shorten the prompt to at most {context - 1}",
        field,
    )
