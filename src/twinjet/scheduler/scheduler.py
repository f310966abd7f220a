"""Decides what each step computes: one row for every decoding sequence, then chunks of prompts.

Owns slots, pages and the state of every live sequence. Does not know the device, text, sockets or a clock
of its own. Deterministic: the same calls give the same plans.

Plans are made ahead: `schedule` may be called again before earlier plans complete, and `complete` takes
their outputs strictly in order. What makes that safe is that the device runs plans in the order made:

- A decoding row takes its input from the device's `last_token[slot]`, which the sequence's row in an
  earlier plan sets, so its token need not have been read.
- A slot and its pages are freed as soon as no *later* plan needs them: when the last row that
  `max_new_tokens` allows (or the export) is planned, or when a stop token is read, or on abort. Rows of the
  ended sequence that are still in flight belong to plans made before any that reuses its pages and slot.
  They write their KV and `last_token` first; the new holder writes every position before it reads it, and
  sets `last_token` with its own sampling row before a decoding row takes it. Within one plan nothing is
  reused that the plan's own rows use: what a last row holds is freed after its plan is made.
- A preempted sequence's tokens in flight were computed before its pages went, so they are emitted like any
  other; it is readmitted once they are read, and computes all known tokens anew.

Nobody waits for ever. On admission pages for all known tokens are reserved, so a prompt never stalls half
way; only decoding rows can lack a page. Then the running sequence last in rank is preempted, and one that
is itself the last just skips the step. The first in rank therefore moves in every plan.
"""

from bisect import insort
from collections import deque

from twinjet.core.config import CacheConfig, SchedulerConfig
from twinjet.core.errors import ConfigError, ContextTooLong, InvalidRequest
from twinjet.core.plan import PageExport, PageGrant, PageImport, Plan, SequenceWork, StepOutput
from twinjet.scheduler.admission import WaitingQueue
from twinjet.scheduler.draft import StepDraft, check_output, token_logprobs
from twinjet.scheduler.integrity import check_sequences
from twinjet.scheduler.pace import Drift, Pace
from twinjet.scheduler.pages import PageAllocator
from twinjet.scheduler.policies import MIN_CHUNK_ROWS, POLICIES, Policy
from twinjet.scheduler.prefix_cache import PageKeys, PrefixCache
from twinjet.scheduler.prefixes import PrefixSharing
from twinjet.scheduler.sequence import CompletedStep, Emission, Exported, SchedulerStats, SequenceSpec
from twinjet.scheduler.state import SequenceState


class Scheduler:
    """Sequences in, plans out; step outputs in, tokens out."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, policy: Policy | None = None) -> None:
        if cache.num_pages * cache.page_size < config.context:
            raise ConfigError(
                f"the KV pool must hold one context of {config.context} tokens, but holds "
                f"{cache.num_pages * cache.page_size}; raise --kv-memory or lower --context"
            )
        self._config = config
        self._page_size = cache.page_size
        self._policy: Policy = policy or POLICIES[config.policy]()
        self._pace: Pace | None = None
        self._drift = Drift()
        self._cache_config = cache
        self._cache = PrefixCache(PageAllocator(cache.num_pages))
        self._prefixes = PrefixSharing(self._cache, cache.page_size)
        self._free_slots = list(range(config.max_streams - 1, -1, -1))
        self._num_reserved = 0
        """Sum of the running sequences' `num_reserved`."""
        self._live: dict[int, SequenceState] = {}
        self._waiting = WaitingQueue(cache.page_size)
        self._running: list[SequenceState] = []
        """Those that hold a slot, in order of rank."""
        self._in_flight: deque[StepDraft] = deque()
        self._num_added = 0
        self._num_scheduled = 0
        self._steps_total = 0
        self._rows_total = 0
        self._wasted_rows_total = 0
        self._preemptions_total = 0

    def keep_pace(self, pace: Pace) -> None:
        """From now on limit steps by their predicted time, and not by the token budget alone."""
        self._pace = pace

    # --- sequences in ---------------------------------------------------------------------------

    def add(self, spec: SequenceSpec, now_s: float) -> None:
        """Queue a sequence.

        Raises:
            InvalidRequest, ContextTooLong: it could never run; nothing is queued.
        """
        self._check(spec)
        keys = None
        if self._cache_config.prefix_cache and spec.use_cache:
            keys = PageKeys(self._page_size, spec.cache_salt)
        seq = SequenceState(spec, (*self._policy.rank(spec, now_s), self._num_added), keys)
        self._num_added += 1
        self._live[spec.sequence_id] = seq
        self._waiting.add(seq)

    def abort(self, sequence_id: int) -> bool:
        """Forget a sequence and free what it holds; False if it has ended or was never here. It emits no more."""
        seq = self._live.get(sequence_id)
        if seq is None:
            return False
        self._end(seq)
        return True

    # --- plans out ------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> Plan | None:
        """The next plan; None if nothing can be computed before a plan in flight completes or a sequence is added."""
        draft = StepDraft(self._num_scheduled)
        mix = self._policy.mix(sum(seq.decoding for seq in self._running), lambda: bool(self._prompts()))
        if mix.decodes:
            self._plan_decodes(draft)
        if mix.chunks != "none" or not draft.work:
            # Decoding rows may all lack a page that only the end of a prompt will free.
            self._plan_chunks(draft, now_s, mix.chunks)
        if not draft.work:
            return None
        if self._pace is not None:
            draft.modelled_ms = self._pace.model.predict_ms(draft.shape)
            draft.predicted_ms = self._drift.factor * draft.modelled_ms
        for seq in draft.leaving:
            self._release(seq)
        self._num_scheduled += 1
        self._in_flight.append(draft)
        return Plan(
            step_id=draft.step_id,
            work=tuple(draft.work),
            grants=tuple(draft.grants),
            imports=tuple(draft.imports),
            exports=tuple(draft.exports),
        )

    def _plan_decodes(self, draft: StepDraft) -> None:
        index = 0
        while index < len(self._running):  # preemption shortens the list, from its end
            seq = self._running[index]
            index += 1
            if not seq.decoding:
                continue
            if seq.num_computed == len(seq.page_ids) * self._page_size:
                if not self._make_room_for_page(seq):
                    continue
                self._grant(draft, seq, len(seq.page_ids), [], 1)
            self._plan_rows(draft, seq, 1, None)

    def _plan_chunks(self, draft: StepDraft, now_s: float, how_many: str) -> None:
        budget = self._config.token_budget
        if how_many == "least":
            budget = min(budget, draft.shape.rows + MIN_CHUNK_ROWS)
        while (num_rows := budget - draft.shape.rows) > 0:
            prompts = self._prompts()
            if not prompts:
                return
            needs = [need for _, need in prompts]
            if self._pace is None:
                shares = self._policy.divide(num_rows, needs, now_s)
            else:
                shares = self._pace.shares(
                    draft.shape,
                    [seq.num_known - need for seq, need in prompts],
                    needs,
                    lambda rows, needs=needs: self._policy.divide(rows, needs, now_s),
                    num_rows,
                    paced=how_many in ("least", "paced"),
                    drift=self._drift.factor,
                )
            for (seq, _), share in zip(prompts, shares, strict=True):
                if share:
                    if seq.slot is None:
                        self._admit(seq)
                    self._plan_chunk(draft, seq, share)
            if shares != needs:
                return
            # Rows are left, and what these prompts computed may be just what others waited for.

    def _prompts(self) -> list[tuple[SequenceState, int]]:
        """Sequences that could compute a chunk now, in order of rank, with how much each has to compute."""
        prompts = [seq for seq in self._running if not seq.decoding]
        if self._free_slots and self._waiting:
            claims: dict[bytes, SequenceState] = {}
            for seq in prompts:
                self._prefixes.claim(seq, len(self._prefixes.find(seq)), claims)

            def num_shared(seq: SequenceState) -> int | None:
                found = self._prefixes.look(seq, claims)
                return None if found is None else self._prefixes.num_held(found)

            prompts += self._waiting.admissible(
                len(self._free_slots), self._cache.num_available - self._num_reserved, len(self._running), num_shared
            )
            prompts.sort(key=lambda seq: seq.rank)
        claims = {}
        ready: list[tuple[SequenceState, int]] = []
        for seq in prompts:
            found = self._prefixes.look(seq, claims)
            seq.awaits_prefix = found is None
            if found is not None:
                self._prefixes.claim(seq, len(found), claims)
                ready.append((seq, seq.num_uncomputed - len(found) * self._page_size))
        return ready

    def _plan_chunk(self, draft: StepDraft, seq: SequenceState, num_rows: int) -> None:
        """Put up to `num_rows` rows of a prompt into the plan."""
        first_index = len(seq.page_ids)
        granted = self._prefixes.attach(draft, seq)
        start = seq.num_computed + seq.num_imported
        num_rows = min(num_rows, seq.num_known - start)
        stop = start + num_rows
        num_missing = -(-stop // self._page_size) - len(seq.page_ids)
        self._num_reserved -= len(granted) + num_missing
        seq.num_reserved -= len(granted) + num_missing
        self._grant(draft, seq, first_index, granted, num_missing)
        for pages in seq.imports:
            page_ids = tuple(seq.page_ids[: -(-start // self._page_size)])
            draft.imports.append(PageImport(seq.sequence_id, page_ids, pages.start, pages.kv))
        seq.imports = ()
        seq.num_computed = start
        self._plan_rows(draft, seq, num_rows, seq.known_ids(start, stop))
        self._prefixes.register_planned(draft, seq)

    def _plan_rows(
        self, draft: StepDraft, seq: SequenceState, num_rows: int, token_ids: tuple[int, ...] | None
    ) -> None:
        """Put rows of a running sequence, for which it has pages, into the plan."""
        slot = seq.slot
        if slot is None:
            raise RuntimeError(f"sequence {seq.sequence_id} has no slot")
        start = seq.num_computed
        seq.num_computed = start + num_rows
        samples = seq.decoding or seq.num_computed == seq.num_known
        draft.work.append(
            SequenceWork(seq.sequence_id, slot, start, num_rows, token_ids, samples, seq.sampling, seq.num_logprobs)
        )
        draft.shape = draft.shape.plus(start, num_rows, samples)
        draft.members.append(seq)
        seq.last_step = draft.step_id
        if samples:
            seq.decoding = True
            seq.num_unread += 1
            draft.sampled.append(seq)
            if seq.export_pages:
                draft.exports.append(PageExport(seq.sequence_id, tuple(seq.page_ids), 0, seq.num_known))
                draft.exported.append(seq)
            if seq.fully_planned:
                draft.leaving.append(seq)

    # --- outputs in -----------------------------------------------------------------------------

    def complete(self, output: StepOutput) -> CompletedStep:
        """Take in the output of the oldest plan in flight.

        Raises:
            ValueError: the output is not that plan's. Nothing has changed, so the step can still be failed.
        """
        step = self._oldest(output.step_id)
        check_output(step, output)
        self._in_flight.popleft()
        self._steps_total += 1
        self._rows_total += step.shape.rows
        if step.modelled_ms and output.ended_s > output.started_s:
            self._drift.add((output.ended_s - output.started_s) * 1e3, step.modelled_ms)
        for work, seq in zip(step.work, step.members, strict=True):
            if seq.ended:
                self._wasted_rows_total += work.num_tokens
        emissions: list[Emission] = []
        exported_ids: set[int] = set()
        for row, (seq, token_id) in enumerate(zip(step.sampled, output.token_ids.tolist(), strict=True)):
            if seq.ended:
                continue
            seq.num_unread -= 1
            seq.num_known += 1
            seq.new_ids.append(token_id)
            self._prefixes.register_read(seq)
            finish = ""
            if token_id in seq.stop_token_ids:
                finish = "stop"
            elif len(seq.new_ids) == seq.max_new_tokens:
                finish = "length"
            elif seq.export_pages:
                finish = "exported"
                exported_ids.add(seq.sequence_id)
            logprobs = None if seq.num_logprobs is None else token_logprobs(output, row, seq.num_logprobs)
            num_cached = seq.num_cached if len(seq.new_ids) == 1 else 0
            emissions.append(Emission(seq.sequence_id, token_id, finish, logprobs, num_cached))
            if finish:
                self._end(seq)
        exports = [
            Exported(export.sequence_id, export.start, kv)
            for export, kv in zip(step.exports, output.exports, strict=True)
            if export.sequence_id in exported_ids
        ]
        decodes = any(work.token_ids is None for work in step.work)
        return CompletedStep(emissions, exports, step.predicted_ms, decodes)

    def fail(self, step_id: int) -> list[int]:
        """The oldest plan in flight raised: end the sequences that had rows in it, and return their ids.

        So are those ended that share pages which these rows were to fill. Others go on. Plans in flight behind it may
        hold rows of the failed sequences; these may compute anything, but must find the page table as granted, or they
        would write into other sequences' pages. So an engine applies a plan's grants before anything of it can fail.
        """
        step = self._oldest(step_id)
        tainted = self._prefixes.invalidate(step.members, self._in_flight)
        self._in_flight.popleft()
        failed = [seq for seq in tainted if not seq.ended]
        for seq in failed:
            self._end(seq)
        return [seq.sequence_id for seq in failed]

    # --- figures --------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Plans made and neither completed nor failed."""
        return len(self._in_flight)

    @property
    def next_predicted_ms(self) -> float | None:
        """How long the oldest plan in flight should take; None without one, or without a cost model."""
        return self._in_flight[0].predicted_ms if self._in_flight else None

    @property
    def has_work(self) -> bool:
        """A sequence is live, or a plan in flight. With sequences live and no plan in flight, `schedule` gives one."""
        return bool(self._live or self._in_flight)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            pages_used=self._cache.num_held,
            pages_cached=self._cache.num_cached,
            num_skipped=sum(seq.decoding and seq.last_step < self._num_scheduled - 1 for seq in self._running)
            + sum(bool(seq.imports) for seq in self._waiting),
            cost_drift=self._drift.factor,
            waiting_tokens=sum(seq.num_uncomputed for queue in (self._running, self._waiting) for seq in queue),
            wasted_rows_total=self._wasted_rows_total,
            preemptions_total=self._preemptions_total,
            prefix_queries_total=self._prefixes.queries_total,
            prefix_hits_total=self._prefixes.hits_total,
            prefix_evictions_total=self._cache.evictions_total,
            rows_total=self._rows_total,
            steps_total=self._steps_total,
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError if slots, pages, queues and plans in flight contradict each other."""
        check_sequences(
            live=self._live,
            running=self._running,
            waiting=list(self._waiting),
            unread=[seq for step in self._in_flight for seq in step.sampled],
            free_slots=self._free_slots,
            max_streams=self._config.max_streams,
            cache=self._cache,
            num_pages=self._cache_config.num_pages,
            page_size=self._page_size,
            num_reserved=self._num_reserved,
        )

    # --- slots and pages ------------------------------------------------------------------------

    def _admit(self, seq: SequenceState) -> None:
        self._waiting.admit(seq)
        seq.slot = self._free_slots.pop()
        seq.num_reserved = self._waiting.pages_needed(seq)
        self._num_reserved += seq.num_reserved
        insort(self._running, seq, key=lambda seq: seq.rank)

    def _grant(
        self, draft: StepDraft, seq: SequenceState, first_index: int, shared_ids: list[int], num_pages: int
    ) -> None:
        """Tell the device of pages that a running sequence shares, and of others that are known to be there for it."""
        page_ids = self._cache.allocate(num_pages)
        if page_ids is None or seq.slot is None:
            raise RuntimeError(f"no {num_pages} pages for sequence {seq.sequence_id} in slot {seq.slot}")
        seq.page_ids += page_ids
        if shared_ids or page_ids:
            draft.grants.append(PageGrant(seq.slot, first_index, (*shared_ids, *page_ids)))

    def _make_room_for_page(self, seq: SequenceState) -> bool:
        """Preempt from the end of the ranks until a page is free; False if `seq` itself is the end.

        Nobody who is preempted has rows in the plan being made: decoding rows are planned in order of rank,
        chunks after them.
        """
        while self._cache.num_available == self._num_reserved:
            last = self._running[-1]
            if last is seq:
                return False
            self._release(last)
            last.num_computed = 0
            last.decoding = False
            last.preempted = True
            self._waiting.add_preempted(last)
            self._preemptions_total += 1
        return True

    def _release(self, seq: SequenceState) -> None:
        """Take slot and pages from a running sequence."""
        if seq.slot is None:
            raise RuntimeError(f"sequence {seq.sequence_id} has no slot to release")
        self._running.remove(seq)
        self._free_slots.append(seq.slot)
        seq.slot = None
        self._cache.release(seq.page_ids)
        seq.page_ids = []
        seq.num_registered = 0
        self._num_reserved -= seq.num_reserved
        seq.num_reserved = 0

    def _end(self, seq: SequenceState) -> None:
        """Forget a live sequence, whatever its state."""
        if seq.slot is not None:
            self._release(seq)
        elif self._is_waiting(seq):
            self._waiting.remove(seq)
        seq.ended = True
        del self._live[seq.sequence_id]

    def _is_waiting(self, seq: SequenceState) -> bool:
        # Without a slot, a sequence that is decoding has its last row planned; any other waits for a slot.
        return not seq.decoding

    def _oldest(self, step_id: int) -> StepDraft:
        if not self._in_flight or self._in_flight[0].step_id != step_id:
            expected = self._in_flight[0].step_id if self._in_flight else "none"
            raise ValueError(f"plans complete in the order made: expected step {expected}, got {step_id}")
        return self._in_flight[0]

    def _check(self, spec: SequenceSpec) -> None:
        num_known = len(spec.token_ids)
        if spec.sequence_id in self._live:
            raise InvalidRequest(f"sequence {spec.sequence_id} is live already; give each attempt a new id")
        if num_known == 0:
            raise InvalidRequest("a sequence needs at least one token to start from, got none")
        if spec.max_new_tokens < 1:
            raise InvalidRequest(f"max_new_tokens must be at least 1, got {spec.max_new_tokens}")
        if num_known + spec.max_new_tokens > self._config.context:
            raise ContextTooLong(
                f"{num_known} tokens and {spec.max_new_tokens} new ones exceed the context of {self._config.context}; "
                f"shorten the prompt or lower max_tokens"
            )
        stop = 0
        for pages in spec.imports:
            if pages.start != stop or pages.kv.ndim != 5 or pages.kv.shape[2] == 0:
                raise InvalidRequest(
                    f"imported pages must be [L, 2, tokens, K, H] and go on at position {stop}, "
                    f"got shape {pages.kv.shape} at {pages.start}"
                )
            stop += pages.kv.shape[2]
        if stop >= num_known:
            raise InvalidRequest(f"imported pages must leave a token to compute, but cover {stop} of {num_known}")
