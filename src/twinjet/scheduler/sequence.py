"""A sequence as the scheduler is given it, and the news it gives back."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from twinjet.core.types import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ImportedPages:
    """KV of positions [start, start + kv.shape[2]), computed elsewhere; kv is [L, 2, tokens, K, H]."""

    start: int
    kv: np.ndarray


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What to run. Known tokens are never empty."""

    sequence_id: int
    token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    num_logprobs: int | None = None
    priority: int = 0
    export_pages: bool = False
    """End as `exported` after the first new token, giving the KV of all tokens of `token_ids`."""
    imports: tuple[ImportedPages, ...] = ()
    """Consecutive from position 0, short of the last known token."""
    use_cache: bool = True
    """Whether the prefix cache may give it pages, and be given its own."""
    cache_salt: str = ""
    """Pages are shared only between sequences of the same salt."""


@dataclass(frozen=True, slots=True)
class Emission:
    """One new token of a sequence."""

    sequence_id: int
    token_id: int
    finish: Literal["", "stop", "length", "exported"] = ""
    logprobs: TokenLogprobs | None = None
    num_cached: int = 0
    """With a sequence's first token: how many of its known tokens came from the prefix cache."""


@dataclass(frozen=True, slots=True)
class Exported:
    """KV of an `export_pages` sequence, positions [start, start + kv.shape[2])."""

    sequence_id: int
    start: int
    kv: np.ndarray


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """What one completed plan means for its sequences, in the order of the plan's rows."""

    emissions: list[Emission]
    exports: list[Exported]
    """Only of sequences that ended as `exported` in this step."""
    predicted_ms: float | None = None
    """How long it should have taken; None without a cost model."""
    decodes: bool = False
    """Somebody's next token was in it, and not the first."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges, and counters since the start (`_total`); fields as in the wire's `Stats`."""

    num_running: int
    num_waiting: int
    pages_used: int
    pages_cached: int
    waiting_tokens: int
    num_skipped: int
    cost_drift: float
    wasted_rows_total: int
    preemptions_total: int
    prefix_queries_total: int
    prefix_hits_total: int
    prefix_evictions_total: int
    rows_total: int
    steps_total: int
