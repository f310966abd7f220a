"""The life of requests: placed on an engine, handed over, replayed when it dies, ended exactly once.

Everything here is synchronous, so each message is handled whole before the next. Knows engines only as
records and a `send`; starts no process and reads no socket.

An entry is either *pending* (waits for an engine, in `_pending`) or has an `attempt`. Pages that another
engine holds for it (`entry.held`) are released once they are imported, or once nobody wants them.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from twinjet.core.config import KV_ITEM_BYTES
from twinjet.core.types import FinishReason, Request, TokenLogprobs
from twinjet.orchestrator.journal import Attempt, Entry, HeldPages, Journal, ReplayLimits, submit_message
from twinjet.orchestrator.pools import Engine, EnginePool
from twinjet.orchestrator.prediction import slot_wait_s, ttft_s
from twinjet.orchestrator.router import route
from twinjet.wire.messages import (
    Abort,
    Logprobs,
    PagesExported,
    PagesHandle,
    PagesImported,
    ReleasePages,
    SequenceEnded,
    StepTokens,
    ToEngine,
)

log = logging.getLogger(__name__)


class EngineFault(Exception):
    """An engine said what no sound engine says; it must be replaced."""


@dataclass(slots=True)
class Counters:
    """What happened since the start."""

    replays: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_failures: int = 0
    given_up: int = 0
    """Requests ended for exceeding `ReplayLimits`."""
    sequence_errors: int = 0
    """Sequences that an engine ended with `error`."""


class Dispatcher:
    """Moves entries between engines; the only writer of the journal and of outputs."""

    def __init__(
        self, pool: EnginePool, send: Callable[[Engine, ToEngine], None], limits: ReplayLimits | None = None
    ) -> None:
        self.counters = Counters()
        self._pool = pool
        self._send = send
        self._limits = limits or ReplayLimits()
        self._journal = Journal()
        self._pending: dict[Entry, None] = {}
        """Used as an ordered set."""
        self._apart: Attempt | None = None
        """The attempt that has an engine to itself, at most one."""

    # --- requests ---------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        return len(self._journal)

    def has(self, request_id: str) -> bool:
        return request_id in self._journal

    def submit(self, request: Request) -> Entry:
        """`request_id` must be free, and the request able to run."""
        entry = self._journal.open(request)
        self._pending[entry] = None
        self._place()
        return entry

    def abort(self, request_id: str) -> None:
        entry = self._journal.entry(request_id)
        if entry is not None:
            self.abort_entry(entry)

    def abort_entry(self, entry: Entry) -> None:
        """Harmless if it has ended."""
        self._end(entry, "cancelled")
        self._place()

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        for entry in self._journal.entries():
            self._end(entry, reason, error)

    def end_pending(self, error: str) -> None:
        """No engine will come for those that wait."""
        for entry in list(self._pending):
            self._end(entry, "error", error)

    # --- engines ----------------------------------------------------------------------------------

    def engine_ready(self) -> None:
        self._place()

    def engine_lost(self, engine: Engine, reason: str) -> None:
        """All it ran is to be replayed elsewhere; what made it die once too often is given up."""
        for entry in self._journal.entries():
            if entry.held is not None and entry.held.engine_id == engine.engine_id:
                # An importer that has not read them yet will report so and recompute.
                entry.held = None
        attempts = list(self._journal.attempts_on(engine.engine_id))
        for attempt in self._started(engine, attempts):
            attempt.entry.fruitless += 1
        replayed: dict[Entry, None] = {}
        for attempt in attempts:
            self._drop_attempt(attempt)
            attempt.entry.replays += 1
            if attempt.entry.is_exhausted(self._limits):
                self._give_up(attempt.entry, reason)
            else:
                self.counters.replays += 1
                replayed[attempt.entry] = None
        # Those that were already running go before those that only wait.
        self._pending = replayed | self._pending
        self._place()

    def has_work(self, engine: Engine) -> bool:
        return any(True for _ in self._journal.attempts_on(engine.engine_id))

    def load(self, engine: Engine) -> int:
        """Rows that it still has to compute, at most."""
        return sum(attempt.tokens_left for attempt in self._journal.attempts_on(engine.engine_id))

    def expected_ttft_s(self, engine: Engine, num_prompt: int) -> float | None:
        """Of a request that arrives now, if it went to this engine; None if the engine foretold nothing."""
        if engine.info is None or engine.info.forecast is None:
            return None
        attempts = list(self._journal.attempts_on(engine.engine_id))
        ahead = [a.entry.num_known for a in attempts if not (a.proven or a.imports)]
        remaining = [1 if a.exports else a.entry.remaining for a in attempts]
        return ttft_s(engine.info.forecast, num_prompt, ahead, remaining, engine.info.max_streams)

    def expected_wait_s(self, engine: Engine) -> float | None:
        """Until a slot of this engine is free for one more; None if the engine foretold nothing."""
        if engine.info is None or engine.info.forecast is None:
            return None
        remaining = [a.entry.remaining for a in self._journal.attempts_on(engine.engine_id)]
        return slot_wait_s(engine.info.forecast, remaining, engine.info.max_streams)

    # --- news -------------------------------------------------------------------------------------

    def step_tokens(self, engine: Engine, message: StepTokens) -> None:
        """Raises: EngineFault."""
        columns = [message.sequence_ids, message.token_ids, message.finish]
        if message.logprobs is not None:
            columns.append(message.logprobs)
        if len({len(column) for column in columns}) != 1:
            raise EngineFault(f"the columns of step {message.step_id} differ in length: {[len(c) for c in columns]}")
        logprobs = message.logprobs or [None] * len(message.token_ids)
        for sequence_id, token_id, finish, logprob in zip(*columns[:3], logprobs, strict=True):
            attempt = self._journal.attempt(sequence_id, engine.engine_id)
            if attempt is not None:
                attempt.entry.output.computed_s = message.computed_s
                self._token(engine, attempt, token_id, finish, logprob, message.num_cached.get(sequence_id, 0))
        self._place()

    def _token(
        self,
        engine: Engine,
        attempt: Attempt,
        token_id: int,
        finish: str,
        logprobs: Logprobs | None,
        num_cached: int,
    ) -> None:
        entry = attempt.entry
        if attempt.exported or (finish == "exported" and not attempt.exports):
            raise EngineFault(f"sequence {attempt.sequence_id} gave a token or an export that it was not asked for")
        if engine.info is None or not 0 <= token_id < engine.info.vocab_size:
            raise EngineFault(f"token {token_id} of sequence {attempt.sequence_id} is not in the vocabulary")
        if entry.request.num_logprobs is not None and logprobs is None:
            raise EngineFault(f"sequence {attempt.sequence_id} came without the log-probabilities it asked for")
        if not entry.emitted:
            # What a later attempt finds of the prompt was computed for this request already.
            entry.output.num_cached = min(num_cached, len(entry.request.prompt_ids))
        entry.emitted.append(token_id)
        entry.fruitless = 0
        entry.output.push(token_id, None if entry.request.num_logprobs is None else _logprobs(logprobs))
        if attempt is self._apart:
            self._apart = None
        if finish in ("stop", "length"):
            self._drop_attempt(attempt)
            self._end(entry, finish)
        elif entry.remaining == 0:
            # Its engine would go on; what the client asked for is complete.
            self._end(entry, "length")
        elif finish == "exported":
            attempt.exported = True

    def sequence_ended(self, engine: Engine, message: SequenceEnded) -> None:
        attempt = self._journal.attempt(message.sequence_id, engine.engine_id)
        if attempt is None:
            return
        entry = attempt.entry
        self._drop_attempt(attempt)
        if message.reason == "error":
            self.counters.sequence_errors += 1
            self._end(entry, "error", message.text or "the engine failed this request and gave no reason")
        else:
            # Nobody here asked for that, so it is as lost as with a dead engine.
            self._replay(entry, "the engine dropped the request")
        self._place()

    def pages_exported(self, engine: Engine, message: PagesExported) -> None:
        """Raises: EngineFault."""
        attempt = self._journal.attempt(message.sequence_id, engine.engine_id)
        if attempt is None:
            for handle in message.pages:
                self._send(engine, ReleasePages(handle.name))
            return
        if not attempt.exported:
            raise EngineFault(f"sequence {attempt.sequence_id} exported pages before its token, or unasked")
        entry = attempt.entry
        self._drop_attempt(attempt)
        if message.pages:
            entry.held = HeldPages(engine.engine_id, engine.incarnation, tuple(message.pages))
        else:
            # The export failed; whoever gets the entry computes the prompt again.
            self.counters.transfer_failures += 1
        self._pending = {entry: None} | self._pending
        self._place()

    def pages_imported(self, engine: Engine, message: PagesImported) -> None:
        attempt = self._journal.attempt(message.sequence_id, engine.engine_id)
        if attempt is None or not attempt.imports:
            return
        entry = attempt.entry
        if message.ok:
            self.counters.transfers += 1
            if entry.held is not None:
                self.counters.transfer_bytes += sum(map(_size_bytes, entry.held.handles))
        else:
            self.counters.transfer_failures += 1
            log.warning("engine %d could not import pages of another; it computes the prompt again", engine.engine_id)
        self._release(entry)

    # --- placing ----------------------------------------------------------------------------------

    def _place(self) -> None:
        """Send pending entries to engines, as far as any may take them."""
        if not self._pending:
            return
        engines = self._pool.ready()
        suspects = [entry for entry in self._pending if entry.is_suspect(self._limits)]
        reserved = self._place_suspect(suspects, engines)
        if reserved is not None:
            engines = [engine for engine in engines if engine is not reserved]
        if not engines:
            return
        loads = {engine: self.load(engine) for engine in engines}
        for entry in [entry for entry in self._pending if not entry.is_suspect(self._limits)]:
            found = route(entry, engines, loads.__getitem__)
            if found is None:
                return
            loads[found.engine] += self._begin(entry, found.engine, exports=found.exports).tokens_left

    def _place_suspect(self, suspects: list[Entry], engines: list[Engine]) -> Engine | None:
        """Run one suspect where nothing else can be to blame. Returns the engine kept free for that, if any."""
        if self._apart is not None:
            return self._pool[self._apart.engine_id]
        if not suspects or not engines:
            return None

        def num_unproven(engine: Engine) -> int:
            return sum(not attempt.proven for attempt in self._journal.attempts_on(engine.engine_id))

        engine = min(engines, key=lambda e: (num_unproven(e), e.engine_id))
        if num_unproven(engine) == 0:
            # Neither export nor import: those, too, may be what kills.
            self._release(suspects[0])
            self._apart = self._begin(suspects[0], engine, exports=False)
        return engine

    def _begin(self, entry: Entry, engine: Engine, *, exports: bool) -> Attempt:
        del self._pending[entry]
        if not self.has_work(engine):
            engine.idle_ticks = 0
        attempt = self._journal.begin(entry, engine.engine_id, exports=exports)
        self._send(engine, submit_message(attempt))
        return attempt

    # --- ends -------------------------------------------------------------------------------------

    def _end(self, entry: Entry, reason: FinishReason, error: str | None = None) -> None:
        if entry.ended:
            return
        self._pending.pop(entry, None)
        if entry.attempt is not None:
            engine, sequence_id = self._pool[entry.attempt.engine_id], entry.attempt.sequence_id
            self._drop_attempt(entry.attempt)
            self._send(engine, Abort(sequence_id))
        self._release(entry)
        self._journal.close(entry)
        entry.output.end(reason, error)

    def _replay(self, entry: Entry, reason: str) -> None:
        entry.replays += 1
        if entry.is_exhausted(self._limits):
            self._give_up(entry, reason)
        else:
            self.counters.replays += 1
            self._pending = {entry: None} | self._pending

    def _give_up(self, entry: Entry, reason: str) -> None:
        self.counters.given_up += 1
        log.error("request %s is given up after %d lost attempts: %s", entry.request.request_id, entry.replays, reason)
        self._end(
            entry,
            "error",
            f"{entry.replays} attempts to run this request were lost ({reason}), and it is taken for the cause; "
            "the engines' output says more",
        )

    def _drop_attempt(self, attempt: Attempt) -> None:
        if attempt is self._apart:
            self._apart = None
        self._journal.end_attempt(attempt)

    def _release(self, entry: Entry) -> None:
        held, entry.held = entry.held, None
        if held is None:
            return
        exporter = self._pool.believed(held.engine_id, held.incarnation)
        if exporter is not None:
            for handle in held.handles:
                self._send(exporter, ReleasePages(handle.name))

    def _started(self, engine: Engine, attempts: list[Attempt]) -> list[Attempt]:
        """Those that may have been running: the engine's slots go by priority and arrival."""
        num_slots = len(attempts) if engine.info is None else engine.info.max_streams
        return sorted(attempts, key=lambda a: (a.entry.request.priority, a.sequence_id))[:num_slots]


def _logprobs(logprobs: Logprobs | None) -> TokenLogprobs | None:
    if logprobs is None:
        return None
    return TokenLogprobs(logprobs.logprob, tuple(logprobs.top_ids), tuple(logprobs.top_logprobs))


def _size_bytes(handle: PagesHandle) -> int:
    return prod(handle.shape) * KV_ITEM_BYTES.get(handle.dtype, 0)
