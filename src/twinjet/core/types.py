"""What a request is and what comes back, in token ids only.

Text, HTTP and templates live above (`text`, `server`); pages, slots and devices below.
"""

from dataclasses import dataclass
from typing import Literal

from twinjet.core.errors import InvalidRequest

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_LOGPROBS = 20
"""Most alternatives reported per token, as on the OpenAI chat route."""

MAX_TOP_K = 1 << 30
"""Any `top_k` from the vocabulary size up means "off"; this is the largest accepted."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Temperature 0 is greedy and ignores the rest.

    Order of the filters: temperature, top-k, top-p (over what top-k left, renormalised), min-p
    (relative to the most likely token).
    """

    temperature: float = 1.0
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Unsigned, under 2**63. A client that sends none gets one drawn by the server, so that a replay repeats it."""
    choice: int = 0
    """Which of the request's `n` choices this is; part of the sampling key."""

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_k", self.top_k, 0, MAX_TOP_K)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("seed", self.seed, 0, 2**63 - 1)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p must be over 0 and at most 1, got {self.top_p}", "top_p")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    # Written so that NaN fails.
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low} to {high}, got {value}", name)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. A client's request for `n` choices is `n` of these."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    """Tokens to generate at most, at least 1."""
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: frozenset[int] = frozenset()
    """Generation ends with the first of these, which is emitted. EOS ids are put here by the caller."""
    num_logprobs: int | None = None
    """None: no log-probabilities; 0: the chosen token's; n: also the n most likely."""
    priority: int = 0
    """Lower runs first: each level is worth as much as having come some seconds earlier."""
    deadline_s: float | None = None
    """Seconds from now within which the first token is needed. It is refused if that is not to be expected."""
    use_cache: bool = True
    """Whether the prefix cache may be read and filled."""
    cache_salt: str = ""
    """Prefixes are shared only between requests of the same salt, so that one tenant learns nothing of another's."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one generated token, before temperature and filters."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """News of one sequence: new tokens, or its end, or both.

    Exactly one event of a sequence has a `finish_reason`, and it is the last.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """As long as `token_ids` where the request asked for them."""
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    """With the first token: how many of the prompt's came from the prefix cache."""
    error: str | None = None
    """What went wrong, with `finish_reason == "error"`."""
    computed_s: float = 0.0
    """When the device ended the step of the last token, by this host's monotonic clock; 0: not known."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What an engine is expected to do, by steps that were measured when it was warmed up."""

    itl_target_ms: float
    """Longest step, as predicted, while anybody decodes."""
    stall_bound_ms: float | None
    """A running stream waits for its next token no longer than this, as long as decoding alone keeps to the target;
    None: the policy lets prompts go first."""
    full_stall_bound_ms: float | None
    """The same with all streams on a full KV pool."""
    chunk_rows: int
    """Prompt tokens computed in a step while nobody decodes."""
    busy_streams: int
    busy_chunk_rows: int
    """Prompt tokens computed in a step beside so many streams."""
    ttft_ms: tuple[tuple[int, float], ...]
    """(prompt tokens, milliseconds to the first token) with nobody else there."""
    busy_ttft_ms: tuple[tuple[int, float], ...]
    """The same beside `busy_streams` streams."""
    itl_ms: tuple[tuple[int, float], ...]
    """(streams, milliseconds between tokens) while no prompt is computed."""
    busy_itl_ms: float
    """Milliseconds between tokens of `busy_streams` streams while the longest prompt of `busy_ttft_ms` is computed."""
    prefill_tokens_s: float
    decode_tokens_s: float
    """Of all streams together, as many as there are slots."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine tells about itself once it is warm."""

    engine_id: int
    incarnation: int
    """Grows by one at each restart, so that a message of a dead process is recognised."""
    pid: int
    vocab_size: int
    context: int
    """Most tokens, prompt and generated together, that one sequence may have."""
    max_streams: int
    num_pages: int
    page_size: int
    token_budget: int
    backend: str
    """Which ops run: "reference" now; kernels add theirs."""
    kv_dtype: str
    warmup_s: float
    forecast: Forecast | None = None
    """None: no steps were measured."""
