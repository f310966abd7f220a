"""The plan: what goes into one step. Made by the scheduler, run by the engine, which knows no queues.

There is no prefill and no decode phase. Every sequence has *known* tokens (the prompt, what was read
back) and *computed* ones (whose KV exists, or will once the plans already made have run). A plan
advances the computed ones by `num_tokens` for each sequence in it. Plans run strictly in the order they
were made, on one device thread; that order is what makes page reuse, imports and exports correct.

Rows of a step lie in the order of `work`, each sequence's rows side by side.
"""

from dataclasses import dataclass

import numpy as np

from twinjet.core.types import SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """Advance one sequence by `num_tokens` rows, positions [start, start + num_tokens)."""

    sequence_id: int
    slot: int
    start: int
    """Position of the first row; all positions before it are computed."""
    num_tokens: int
    """1 for a decoding row or a one-token chunk; more for a chunk of the prompt."""
    token_ids: tuple[int, ...] | None
    """The rows' input ids, `num_tokens` of them; None: one row, whose input is the device's `last_token[slot]`."""
    samples: bool
    """True if the last row's logits give the sequence's next token, at position start + num_tokens."""
    sampling: SamplingParams
    num_logprobs: int | None = None
    """As in `Request`."""


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Page table entries [first_index, first_index + len(page_ids)) of `slot` become `page_ids`.

    A new holder of a slot starts with a grant at index 0. Entries beyond what was granted are never read.
    """

    slot: int
    first_index: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageImport:
    """Before the rows run, write `kv` for positions [start, start + kv.shape[2]) of a sequence into `page_ids`.

    `page_ids[i]` holds positions [i * page_size, (i + 1) * page_size) of the sequence, from position 0 on.
    """

    sequence_id: int
    page_ids: tuple[int, ...]
    start: int
    kv: np.ndarray
    """Canonical pages: [L, 2, tokens, K, H]; keys at index 0, values at 1, keys after RoPE."""


@dataclass(frozen=True, slots=True)
class PageExport:
    """After the rows have run, read positions [start, stop) of a sequence as canonical pages.

    `page_ids` as in `PageImport`.
    """

    sequence_id: int
    page_ids: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. May have no rows, where only pages are to be moved."""

    step_id: int
    work: tuple[SequenceWork, ...] = ()
    grants: tuple[PageGrant, ...] = ()
    imports: tuple[PageImport, ...] = ()
    exports: tuple[PageExport, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(w.num_tokens for w in self.work)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave back, on the host.

    Row i of the arrays belongs to the i-th entry of `plan.work` that has `samples`.
    """

    step_id: int
    token_ids: np.ndarray
    """[samples] int32."""
    logprobs: np.ndarray | None = None
    """[samples] float32, the chosen tokens' log-probabilities; None if no row asked."""
    top_ids: np.ndarray | None = None
    """[samples, MAX_LOGPROBS] int32, most likely first."""
    top_logprobs: np.ndarray | None = None
    """[samples, MAX_LOGPROBS] float32."""
    exports: tuple[np.ndarray, ...] = ()
    """One array of canonical pages for each of `plan.exports`."""
    started_s: float = 0.0
    """Monotonic clock when the device began the step."""
    ended_s: float = 0.0
    """Monotonic clock when the device finished it."""
    kernel_s: float | None = None
    """Time in kernels between the two; None: the device does not tell, and the two are the host's."""
    num_padding_rows: int = 0
    """Rows the bucket added."""
