"""Answers of the OpenAI routes, field for field as the official client reads them. Knows no HTTP.

Fields beyond OpenAI's are vLLM's: `token_ids` and `prompt_token_ids` (in the choice on completions, beside
the choices on chat), sent only with `return_token_ids`.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from twinjet.server.generation import Delta
from twinjet.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "error"]

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""

TokenIds = Sequence[int] | UnsetType


class PromptTokensDetails(Struct, frozen=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""


class Usage(Struct, frozen=True):
    """`usage`. Only tokens that were delivered count as completion tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class CompletionLogprobs(Struct):
    """`choices[].logprobs` on completions: columns of equal length."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct):
    """`choices[]` on completions, of a stream or not."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_token_ids: TokenIds = UNSET
    token_ids: TokenIds = UNSET


class Completion(Struct):
    """An answer of /v1/completions, and a chunk of one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Struct):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """The token that came."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """`choices[].logprobs` on chat."""

    content: list[TokenLogprob]
    refusal: None = None


class Message(Struct):
    """`choices[].message`."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(Struct):
    """`choices[]` on chat."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: TokenIds = UNSET


class ChatCompletion(Struct):
    """An answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[ChatChoice]
    usage: Usage
    prompt_token_ids: TokenIds = UNSET


class MessageDelta(Struct, kw_only=True):
    """`choices[].delta`; the role comes with a choice's first chunk."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str


class ChatChunkChoice(Struct):
    """`choices[]` of a chunk."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: TokenIds = UNSET


class ChatChunk(Struct):
    """A chunk of a chat answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: TokenIds = UNSET


class Model(Struct):
    """One entry of /v1/models."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    """Context in tokens; null until the engines are ready."""


class ModelList(Struct):
    """/v1/models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Struct):
    """/tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Struct):
    """/detokenize."""

    prompt: str


def count_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    details = PromptTokensDetails(cached_tokens)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


def completion_logprobs(tokenizer: Tokenizer, delta: Delta, offset: int) -> tuple[CompletionLogprobs, int]:
    """Columns for one delta, and the text offset behind it.

    An offset counts characters of the choice's text from its start; a token inside a character has the
    offset of that character. A token that is no whole text is written `bytes:\\xNN...`, as OpenAI does, so
    that two such tokens stay apart as keys. `top_logprobs` holds the chosen token besides the most likely.
    """
    columns = CompletionLogprobs([], [], [], [])
    for token, entry in zip(delta.token_ids, delta.logprobs or (), strict=False):
        raw = tokenizer.token_bytes(token)
        name = _token_name(raw, "bytes:")
        chosen = _finite(entry.logprob)
        top: dict[str, float] = {}
        for other, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            # Of two tokens with one text the likelier is shown.
            top.setdefault(_token_name(tokenizer.token_bytes(other), "bytes:"), _finite(logprob))
        top.setdefault(name, chosen)
        inside = bool(raw) and raw[0] & 0xC0 == 0x80
        columns.tokens.append(name)
        columns.token_logprobs.append(chosen)
        columns.top_logprobs.append(top)
        columns.text_offset.append(max(0, offset - inside))
        if not tokenizer.is_special(token):
            offset += sum(byte & 0xC0 != 0x80 for byte in raw)
    return columns, offset


def chat_logprobs(tokenizer: Tokenizer, delta: Delta) -> ChatLogprobs:
    """`bytes` are a token's own, so that characters split over tokens can be put together."""
    content = []
    for token, entry in zip(delta.token_ids, delta.logprobs or (), strict=False):
        raw = tokenizer.token_bytes(token)
        top = []
        for other, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            other_raw = tokenizer.token_bytes(other)
            top.append(TopLogprob(_token_name(other_raw, ""), _finite(logprob), list(other_raw)))
        content.append(TokenLogprob(_token_name(raw, ""), _finite(entry.logprob), list(raw), top))
    return ChatLogprobs(content)


def _token_name(raw: bytes, prefix: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
