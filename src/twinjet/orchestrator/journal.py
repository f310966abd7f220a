"""What must outlive an engine: each request, the tokens it has emitted, and where it runs now.

Sampling depends on seed, choice and position only, so prompt + emitted tokens, submitted anew to any
engine, go on with the same tokens. Knows no processes and sends nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from twinjet.core.types import Request
from twinjet.orchestrator.output import Output
from twinjet.wire.messages import PagesHandle, Submit


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """When a request is taken for the cause of its engines' deaths and given up with `error`.

    A request that only happened to be there makes progress on its next engine; one that kills engines
    dies at the same place again.
    """

    max_fruitless: int = 3
    """Losses in a row without one new token in between. The last before the limit is run apart, so that
    a neighbour's fault is never counted here."""
    max_replays: int = 16
    """Losses in all. From half of them on the request is run apart at each start."""


@dataclass(frozen=True, slots=True)
class HeldPages:
    """Pages that an exporter keeps for a request until told to release them."""

    engine_id: int
    incarnation: int
    handles: tuple[PagesHandle, ...]


@dataclass(eq=False, slots=True)
class Entry:
    """One accepted request that has not ended."""

    request: Request
    output: Output = field(default_factory=Output)
    emitted: list[int] = field(default_factory=list)
    attempt: "Attempt | None" = None
    """Where it runs; None while it waits for an engine."""
    held: HeldPages | None = None
    replays: int = 0
    fruitless: int = 0
    """Losses since its last new token."""
    ended: bool = False

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - len(self.emitted)

    @property
    def num_known(self) -> int:
        return len(self.request.prompt_ids) + len(self.emitted)

    def is_suspect(self, limits: ReplayLimits) -> bool:
        """Whether its next loss could be held against it, so that it has to run apart."""
        return self.fruitless >= limits.max_fruitless - 1 or 2 * self.replays >= limits.max_replays

    def is_exhausted(self, limits: ReplayLimits) -> bool:
        return self.fruitless >= limits.max_fruitless or self.replays >= limits.max_replays


@dataclass(eq=False, slots=True)
class Attempt:
    """One try to run an entry, on one incarnation of one engine."""

    sequence_id: int
    engine_id: int
    entry: Entry
    exports: bool
    """Submitted to be handed over after its first token."""
    imports: bool
    """Submitted with pages of another engine."""
    num_emitted_before: int
    exported: bool = False
    """Its token is out, its pages are on their way."""

    @property
    def proven(self) -> bool:
        """Has produced a token, so it is no likely cause of its engine's death."""
        return len(self.entry.emitted) > self.num_emitted_before

    @property
    def tokens_left(self) -> int:
        """Rows that its engine still has to compute for it, at most."""
        uncomputed = 0 if self.proven or self.imports else self.entry.num_known
        return uncomputed + (1 if self.exports else self.entry.remaining)


class Journal:
    """All entries by request id, all attempts by sequence id."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._attempts: dict[int, Attempt] = {}
        self._sequence_ids = count(1)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def entry(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)

    def open(self, request: Request) -> Entry:
        entry = self._entries[request.request_id] = Entry(request)
        return entry

    def close(self, entry: Entry) -> None:
        entry.ended = True
        del self._entries[entry.request.request_id]

    def begin(self, entry: Entry, engine_id: int, *, exports: bool) -> Attempt:
        attempt = Attempt(
            sequence_id=next(self._sequence_ids),
            engine_id=engine_id,
            entry=entry,
            exports=exports,
            imports=entry.held is not None,
            num_emitted_before=len(entry.emitted),
        )
        entry.attempt = attempt
        self._attempts[attempt.sequence_id] = attempt
        return attempt

    def end_attempt(self, attempt: Attempt) -> None:
        """From here on all news of it is dropped."""
        attempt.entry.attempt = None
        del self._attempts[attempt.sequence_id]

    def attempt(self, sequence_id: int, engine_id: int) -> Attempt | None:
        """None if it has ended, or if another engine claims it."""
        attempt = self._attempts.get(sequence_id)
        return attempt if attempt is not None and attempt.engine_id == engine_id else None

    def attempts_on(self, engine_id: int) -> Iterator[Attempt]:
        """In the order they were begun."""
        return (a for a in self._attempts.values() if a.engine_id == engine_id)


def submit_message(attempt: Attempt) -> Submit:
    """The orders for one attempt: known tokens are the prompt and all that was emitted so far."""
    entry = attempt.entry
    request, sampling = entry.request, entry.request.sampling
    return Submit(
        sequence_id=attempt.sequence_id,
        token_ids=np.asarray((*request.prompt_ids, *entry.emitted), dtype="<i4").tobytes(),
        max_new_tokens=entry.remaining,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        choice=sampling.choice,
        stop_token_ids=sorted(request.stop_token_ids),
        num_logprobs=request.num_logprobs,
        priority=request.priority,
        use_cache=request.use_cache,
        cache_salt=request.cache_salt,
        export_pages=attempt.exports,
        pages=list(entry.held.handles) if attempt.imports and entry.held is not None else [],
    )
