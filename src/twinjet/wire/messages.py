"""Every message between the orchestrator and an engine process.

msgpack by msgspec, decoded by schema only. One message per engine per step, never one per token.
`sequence_id` is the orchestrator's number of one attempt to run one request; a replay gets a new one,
so late news of a lost attempt can only be dropped.
"""

from typing import Literal

import msgspec

from twinjet.core.types import Forecast

MAX_MESSAGE_BYTES = 64 << 20
"""Longest accepted message; pages travel outside of messages."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Root of all messages; the class name is the tag."""


class PagesHandle(msgspec.Struct, frozen=True):
    """Where canonical KV pages [L, 2, tokens, K, H] of one sequence lie, and how to check them."""

    name: str
    """Shared memory segment."""
    start: int
    """First position covered."""
    shape: tuple[int, int, int, int, int]
    dtype: str
    checksum: int
    """CRC-32 of the bytes."""


# --- orchestrator to engine ---------------------------------------------------------------------


class Submit(Message, frozen=True):
    """Run a sequence. Answered by `StepTokens` and, unless it ends there, by one `SequenceEnded`."""

    sequence_id: int
    token_ids: bytes
    """Known tokens, int32 little-endian: the prompt, then what an earlier attempt has already emitted."""
    max_new_tokens: int
    """Tokens still to generate, at least 1."""
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int
    stop_token_ids: list[int]
    num_logprobs: int | None = None
    priority: int = 0
    use_cache: bool = True
    cache_salt: str = ""
    export_pages: bool = False
    """Ship the KV of all known tokens when the first new token is out, then end the sequence here as `exported`."""
    pages: list[PagesHandle] = []
    """KV of the leading known tokens, computed by another engine; at least the last known token is left to compute."""


class Abort(Message, frozen=True):
    """Forget the sequence; answered by `SequenceEnded` unless it has ended. Unknown ids are ignored."""

    sequence_id: int


class ReleasePages(Message, frozen=True):
    """The exporter may free this segment: it was imported, or nobody wants it any more."""

    name: str


class Shutdown(Message, frozen=True):
    """Finish the running step and exit."""


# --- engine to orchestrator ---------------------------------------------------------------------


class Progress(Message, frozen=True):
    """How far start-up is: `done` of `total` units of `stage` ("load", "pack", "compile")."""

    stage: str
    done: int
    total: int


class Ready(Message, frozen=True):
    """The engine is warm. Fields as in `core.types.EngineInfo`, less identity."""

    pid: int
    vocab_size: int
    context: int
    max_streams: int
    num_pages: int
    page_size: int
    token_budget: int
    backend: str
    kv_dtype: str
    warmup_s: float
    forecast: Forecast | None = None


class Failed(Message, frozen=True):
    """The engine cannot start or go on; it exits after this. `kind` is the name of the `TwinjetError` class."""

    kind: str
    text: str


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """As `core.types.TokenLogprobs`."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class StepTokens(Message, frozen=True):
    """Tokens of one step, all sequences in columns of equal length."""

    step_id: int
    sequence_ids: list[int]
    token_ids: list[int]
    finish: list[Literal["", "stop", "length", "exported"]]
    """Empty: goes on. Any other: the sequence is over here, and no `SequenceEnded` follows."""
    logprobs: list[Logprobs | None] | None = None
    """None where no sequence of the step asked."""
    num_cached: dict[int, int] = {}
    """By sequence, where this is its first token and some of its known tokens came from the prefix cache: how many."""
    computed_s: float = 0.0
    """When the device ended the step, by the monotonic clock of the engine's host; 0: not told."""


class SequenceEnded(Message, frozen=True):
    """A sequence is over without a token: aborted, or failed."""

    sequence_id: int
    reason: Literal["cancelled", "error"]
    text: str = ""


class PagesExported(Message, frozen=True):
    """The pages of an `export_pages` sequence are ready; sent after the `StepTokens` with `exported`.

    None, if there was no room for them: whoever goes on with the sequence computes it anew.
    """

    sequence_id: int
    pages: list[PagesHandle]


class PagesImported(Message, frozen=True):
    """The pages given with `Submit` are in the pool, or, with `ok` false, were bad and are recomputed instead."""

    sequence_id: int
    ok: bool


DURATION_BOUNDS_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0),
)
"""Buckets of `Durations`."""


class Durations(msgspec.Struct, frozen=True, array_like=True):
    """A histogram: `counts[i]` of at most `DURATION_BOUNDS_S[i]` and more than the bound before; the last of longer."""

    counts: list[int]
    total_s: float


class Stats(Message, frozen=True):
    """Gauges and counters of the engine, sent at a steady rate, idle or not: also the heartbeat."""

    num_running: int
    """Sequences that hold a slot."""
    num_waiting: int
    pages_used: int
    """Pages that sequences hold."""
    pages_cached: int
    """Pages in the prefix cache, whether sequences hold them or not."""
    waiting_tokens: int
    """Known tokens not yet computed, of running and waiting sequences."""
    num_skipped: int
    """Sequences whose prompt is computed, here or elsewhere, and that had no row in the latest plan all the same."""
    cost_drift: float
    """Time that steps of late took, over what the cost model that was measured at start says."""
    steps_total: int
    rows_total: int
    padding_rows_total: int
    wasted_rows_total: int
    """Rows computed for nothing: their sequence had ended, at a stop token or by an abort."""
    preemptions_total: int
    prefix_queries_total: int
    """Known tokens of sequences that looked for their prefix."""
    prefix_hits_total: int
    """Of these, tokens that were found."""
    prefix_evictions_total: int
    """Cached pages given away because pages ran out."""
    compiles_total: int
    """Programs compiled after warm-up; anything but 0 is a bug."""
    busy_s_total: float
    """Seconds that the device spent in steps."""
    predicted_s_total: float
    """Seconds that it should have spent, by the cost model."""
    stall_bound_violations_total: int
    """Steps in which a running stream waited for its next token for longer than the bound that was told."""
    step_durations: Durations
    gap_durations: Durations
    """Idle time between steps while there was work."""
    step_age_s: float = 0.0
    """How long the present step has been running; 0 between steps."""
    step_expected_s: float | None = None
    """How long it should take, by the cost model."""


ToEngine = Submit | Abort | ReleasePages | Shutdown
ToOrchestrator = Progress | Ready | Failed | StepTokens | SequenceEnded | PagesExported | PagesImported | Stats
