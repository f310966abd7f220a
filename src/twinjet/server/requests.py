"""Request bodies as clients send them: OpenAI's fields, and vLLM's where those add to them. Knows no meaning.

Every field of the two OpenAI routes is listed, also those that are not built yet: those are refused by name
(`UNSUPPORTED_*`) unless they have a value that asks for nothing. Any other field is unknown and refused.
"""

from typing import Any

import msgspec
from msgspec import Raw, Struct


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted: there is no obfuscation to leave out."""


class GenerationBody(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What both generating routes take."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_prompt: bool | None = None
    """Whether the prefix cache may be read and filled. Default true."""
    cache_salt: str | None = None
    """Prefixes are shared only with requests of the same salt."""
    priority: int | None = None
    """Lower goes first. Default 0."""
    deadline_ms: float | None = None
    """Milliseconds from the request's arrival within which the first token is needed."""

    # Harmless: accepted and without effect.
    user: Any = None
    metadata: Any = None
    store: Any = None

    # Not built yet.
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Raw
    """A string, a list of strings, a list of ids, or a list of lists of ids."""
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    """Whether a text prompt gets the model's BOS, where it wants one. Default true."""

    # Not built yet.
    echo: Any = None
    suffix: Any = None
    best_of: Any = None


class ContentPart(Struct, forbid_unknown_fields=True, frozen=True):
    """A part of a message's content."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class ChatMessage(Struct, forbid_unknown_fields=True, frozen=True):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None

    # Clients send back the messages they got, in which these are null or empty.
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the head of the assistant's turn. Default true."""

    # Not built yet.
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    service_tier: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class TokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """POST /tokenize: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """Default true for a prompt; a chat's template brings its own."""
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """POST /detokenize."""

    tokens: Raw
    model: str | None = None


Neutral = tuple[Any, ...]
"""Values of an unsupported field that ask for nothing."""

_UNSUPPORTED: dict[str, Neutral] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
}

UNSUPPORTED_COMPLETION: dict[str, Neutral] = {**_UNSUPPORTED, "echo": (None, False), "suffix": (None, "")}
"""`best_of` is missing here: what it asks depends on `n`."""

UNSUPPORTED_CHAT: dict[str, Neutral] = {
    **_UNSUPPORTED,
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "service_tier": (None, "auto", "default"),
    "verbosity": (None,),
    "web_search_options": (None,),
}

UNSUPPORTED_MESSAGE: dict[str, Neutral] = {
    "refusal": (None,),
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "tool_calls": (None, []),
    "tool_call_id": (None,),
}

UNSUPPORTED_PART: dict[str, Neutral] = {
    "image_url": (None,),
    "input_audio": (None,),
    "file": (None,),
    "refusal": (None,),
}

COMPLETION = msgspec.json.Decoder(CompletionBody)
CHAT = msgspec.json.Decoder(ChatBody)
TOKENIZE = msgspec.json.Decoder(TokenizeBody)
DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
TEXT = msgspec.json.Decoder(str)
TEXTS = msgspec.json.Decoder(list[str])
RAWS = msgspec.json.Decoder(list[Raw])
