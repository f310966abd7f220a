"""A device whose arithmetic can be done by hand, and which refuses plans that would go wrong on a real one.

The next token is made from the sum of (position + 1) * (token + 1) over all tokens so far, read back from a store
of pages; see `next_token`. Every entry of the store records its position and all that came before it, as KV does, so
that a row that reads another prefix's page, a position never written, or beyond its grants is an error and not a wrong
token. Sharing pages is right exactly where the whole prefix and its salt are the same.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from twinjet.core.config import CacheConfig, SchedulerConfig
from twinjet.core.plan import PageExport, PageGrant, Plan, SequenceWork, StepOutput
from twinjet.core.types import MAX_LOGPROBS, SamplingParams
from twinjet.scheduler.policies import Policy
from twinjet.scheduler.scheduler import Scheduler
from twinjet.scheduler.sequence import CompletedStep, Emission, Exported, ImportedPages, SequenceSpec

VOCAB_SIZE = 13


def next_token(tokens: Sequence[int]) -> int:
    """The sum plus its quotient by `VOCAB_SIZE`, modulo that.

    The sum's remainder alone would not do: the next one is it times (position + 2), so that every sequence comes
    to nothing but zeros where that factor is a multiple of `VOCAB_SIZE`.
    """
    total = sum((position + 1) * (token + 1) for position, token in enumerate(tokens))
    return (total + total // VOCAB_SIZE) % VOCAB_SIZE


def alone(spec: SequenceSpec) -> tuple[list[int], str]:
    """The tokens and the finish of a sequence that nothing disturbs."""
    tokens, finish = _alone(spec.token_ids, spec.max_new_tokens, spec.stop_token_ids, spec.export_pages)
    return list(tokens), finish


@cache
def _alone(
    token_ids: tuple[int, ...], max_new_tokens: int, stop_token_ids: frozenset[int], export_pages: bool
) -> tuple[tuple[int, ...], str]:
    tokens = list(token_ids)
    for count in range(1, max_new_tokens + 1):
        tokens.append(next_token(tokens))
        new = tuple(tokens[len(token_ids) :])
        if tokens[-1] in stop_token_ids:
            return new, "stop"
        if count == max_new_tokens:
            return new, "length"
        if export_pages:
            return new, "exported"
    raise AssertionError("max_new_tokens must be at least 1")


def canonical(tokens: Sequence[int]) -> np.ndarray:
    """[1, 2, tokens, 1, 1], the token as its own key and value."""
    return np.broadcast_to(np.asarray(tokens, np.float32)[None, None, :, None, None], (1, 2, len(tokens), 1, 1))


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple((seed * 7 + i * i * 3 + i) % VOCAB_SIZE for i in range(length))


def spec(
    sequence_id: int,
    token_ids: Sequence[int] = (1, 2, 3),
    max_new_tokens: int = 4,
    *,
    stop: Sequence[int] = (),
    num_logprobs: int | None = None,
    priority: int = 0,
    export: bool = False,
    num_imported: int = 0,
    use_cache: bool = True,
    salt: str = "",
) -> SequenceSpec:
    """A greedy sequence; `num_imported` of its tokens come as pages, in two pieces where possible."""
    half = num_imported // 2
    cuts = [(start, stop) for start, stop in ((0, half), (half, num_imported)) if stop > start]
    return SequenceSpec(
        sequence_id,
        tuple(token_ids),
        max_new_tokens,
        SamplingParams(temperature=0.0),
        frozenset(stop),
        num_logprobs,
        priority,
        export,
        tuple(ImportedPages(start, canonical(token_ids[start:stop])) for start, stop in cuts),
        use_cache,
        salt,
    )


@dataclass
class Entry:
    position: int
    token: int
    history: int = -1
    """Number of the salt and all tokens up to this one, see `FakeDevice.history`; -1: computed from what is not there.
    """


class FakeDevice:
    """Runs plans in order; a violated assertion is a bug of the scheduler."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig) -> None:
        self.config = config
        self.page_size = cache.page_size
        self.num_pages = cache.num_pages
        self.store: dict[tuple[int, int], Entry] = {}
        self.tables: dict[int, list[int]] = {}
        self.last_token: dict[int, int] = {}
        self.next_step_id = 0
        self.specs: dict[int, SequenceSpec] = {}
        """Filled by who adds sequences: what their prompts and salts are."""
        self.failed_ids: set[int] = set()
        """Sequences that failed with a step, or read what one of these left unwritten: nobody may get their tokens."""
        self.step_s: Callable[[Plan], float] = lambda plan: 0.0
        """How long a step takes, by its stamps."""
        self._histories: dict[tuple[object, int], int] = {}

    def step(self, plan: Plan) -> StepOutput:
        self._begin(plan)
        for imported in plan.imports:
            assert imported.start + imported.kv.shape[2] <= len(imported.page_ids) * self.page_size
            tokens = [int(token) for token in imported.kv[0, 0, :, 0, 0]]
            for position, token in enumerate(tokens, imported.start):
                self.store[(imported.page_ids[position // self.page_size], position % self.page_size)] = Entry(
                    position,
                    token,
                    self._history(imported.sequence_id, self._prompt(imported.sequence_id, position + 1)),
                )
        # All rows write before any reads, so that two sequences writing one page would be seen.
        own: set[int] = set()
        for w in plan.work:
            failed = w.sequence_id in self.failed_ids
            last_token = self.last_token.get(w.slot, 0 if failed else None)
            assert w.token_ids is not None or last_token is not None, f"{w} has no last token"
            inputs = (last_token or 0,) if w.token_ids is None else w.token_ids
            for offset, token in enumerate(inputs):
                entry = Entry(w.start + offset, token)
                self.store[self._where(w.slot, w.start + offset)] = entry
                if not failed:
                    own.add(id(entry))
        known = {w.slot: self._read(w, own) for w in plan.work}
        sampled: list[int] = []
        for w in plan.work:
            if w.samples and w.sequence_id in self.failed_ids:
                sampled.append(0)
            elif w.samples:
                self.last_token[w.slot] = next_token(known[w.slot])
                sampled.append(self.last_token[w.slot])
        tokens = np.asarray(sampled, np.int32)
        asked = any(w.num_logprobs is not None for w in plan.work if w.samples)
        top = np.arange(MAX_LOGPROBS)
        return StepOutput(
            plan.step_id,
            tokens,
            logprobs=tokens * np.float32(-0.5) if asked else None,
            top_ids=tokens[:, None] + top[None, :].astype(np.int32) if asked else None,
            top_logprobs=np.tile(top * np.float32(-1.0), (len(sampled), 1)) if asked else None,
            exports=tuple(self._export(export) for export in plan.exports),
            ended_s=self.step_s(plan),
        )

    def fail(self, plan: Plan) -> None:
        """The step raises after its grants; nothing it should have computed is there, nor what was there before."""
        self._begin(plan)
        for w in plan.work:
            self.failed_ids.add(w.sequence_id)
            for position in range(w.start, w.start + w.num_tokens):
                self.store.pop(self._where(w.slot, position), None)

    def _begin(self, plan: Plan) -> None:
        assert plan.step_id == self.next_step_id, "plans run in the order made, none left out"
        self.next_step_id += 1
        assert 0 < plan.num_rows <= self.config.token_budget
        slots = [w.slot for w in plan.work]
        assert len(set(slots)) == len(slots), "one sequence per slot"
        assert all(0 <= slot < self.config.max_streams for slot in slots)
        for w in plan.work:
            assert w.num_tokens == (1 if w.token_ids is None else len(w.token_ids)) > 0
            assert w.start + w.num_tokens <= self.config.context
        assert {grant.slot for grant in plan.grants} <= set(slots), "who gets pages has rows"
        for grant in plan.grants:
            self._grant(grant)

    def _grant(self, grant: PageGrant) -> None:
        assert grant.page_ids
        assert all(0 <= page_id < self.num_pages for page_id in grant.page_ids)
        if grant.first_index == 0:
            self.tables[grant.slot] = []  # a new holder
        table = self.tables[grant.slot]
        assert grant.first_index == len(table), "page tables grow without holes"
        table += grant.page_ids
        assert len(table) * self.page_size < self.config.context + self.page_size
        assert len(set(table)) == len(table)

    def _where(self, slot: int, position: int) -> tuple[int, int]:
        table = self.tables[slot]
        assert position // self.page_size < len(table), f"position {position} was never granted"
        return table[position // self.page_size], position % self.page_size

    def _read(self, w: SequenceWork, own: set[int]) -> list[int]:
        """Tokens [0, w.start + w.num_tokens), each entry's history checked, or set where this step writes it."""
        entries = [self.store.get(self._where(w.slot, position)) for position in range(w.start + w.num_tokens)]
        if w.sequence_id in self.failed_ids or any(entry is None for entry in entries):
            self.failed_ids.add(w.sequence_id)
            return [0]
        tokens = [entry.token for entry in entries if entry is not None]
        prompt = self._prompt(w.sequence_id, w.start + w.num_tokens)
        assert tuple(tokens[: len(prompt)]) == prompt, f"{w} reads another prompt"
        history = self._history(w.sequence_id, ())
        for position, entry in enumerate(entries):
            assert entry is not None
            assert entry.position == position, f"{w} reads {entry} at {position}"
            history = self._next_history(history, entry.token)
            if entry.history == -1 and id(entry) in own:
                entry.history = history
            elif entry.history == -1:
                self.failed_ids.add(w.sequence_id)
                return [0]
            assert entry.history == history, f"{w} reads {entry}, which another prefix left there"
        return tokens

    def _prompt(self, sequence_id: int, stop: int) -> tuple[int, ...]:
        return self.specs[sequence_id].token_ids[:stop]

    def _history(self, sequence_id: int, tokens: Sequence[int]) -> int:
        """A number that stands for a salt and the tokens after it, and for nothing else."""
        history = self._next_history(self.specs[sequence_id].cache_salt, 0)
        for token in tokens:
            history = self._next_history(history, token)
        return history

    def _next_history(self, history: object, token: int) -> int:
        return self._histories.setdefault((history, token), len(self._histories))

    def _export(self, export: PageExport) -> np.ndarray:
        assert export.stop <= len(export.page_ids) * self.page_size
        tokens: list[int] = []
        if export.sequence_id in self.failed_ids:
            return canonical(tokens)
        for position in range(export.start, export.stop):
            entry = self.store[(export.page_ids[position // self.page_size], position % self.page_size)]
            tokens.append(entry.token)
            assert (entry.position, entry.history) == (position, self._history(export.sequence_id, tokens))
        return canonical(tokens)


class Rig:
    """A scheduler and a device, and everything that came out of them. Plans run when they complete."""

    def __init__(
        self,
        *,
        max_streams: int = 4,
        context: int = 64,
        token_budget: int = 16,
        page_size: int = 4,
        num_pages: int = 64,
        policy: Policy | None = None,
        prefix_cache: bool = False,
    ) -> None:
        config = SchedulerConfig(max_streams, context, token_budget)
        cache = CacheConfig(page_size, num_pages, "float32", prefix_cache)
        self.scheduler = Scheduler(config, cache, policy)
        self.device = FakeDevice(config, cache)
        self.plans: list[Plan] = []
        self.in_flight: deque[Plan] = deque()
        self.specs: dict[int, SequenceSpec] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}
        self.exports: dict[int, np.ndarray] = {}
        self.cached: dict[int, int] = {}
        """Known tokens from the prefix cache, as told with the first token."""
        self.now_s = 0.0

    def add(self, *specs: SequenceSpec) -> None:
        for new in specs:
            self.now_s += 1.0
            self.scheduler.add(new, self.now_s)
            self.specs[new.sequence_id] = self.device.specs[new.sequence_id] = new
            self.tokens[new.sequence_id] = []
            self.scheduler.check_integrity()

    def abort(self, sequence_id: int) -> bool:
        aborted = self.scheduler.abort(sequence_id)
        if aborted:
            assert sequence_id not in self.finish
            self.finish[sequence_id] = "aborted"
        self.scheduler.check_integrity()
        return aborted

    def schedule(self) -> Plan | None:
        plan = self.scheduler.schedule(self.now_s)
        self.scheduler.check_integrity()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append(plan)
        assert self.scheduler.num_in_flight == len(self.in_flight)
        return plan

    def plan(self) -> Plan:
        plan = self.schedule()
        assert plan is not None
        return plan

    def complete(self) -> CompletedStep:
        done = self.scheduler.complete(self.device.step(self.in_flight.popleft()))
        self.scheduler.check_integrity()
        for emission in done.emissions:
            self._emit(emission)
        for exported in done.exports:
            self._take_export(exported)
        return done

    def fail(self) -> list[int]:
        plan = self.in_flight.popleft()
        self.device.fail(plan)
        failed = self.scheduler.fail(plan.step_id)
        self.scheduler.check_integrity()
        for sequence_id in failed:
            assert sequence_id not in self.finish
            self.finish[sequence_id] = "failed"
        return failed

    def run(self, depth: int = 1, max_steps: int = 10_000) -> int:
        """Until nothing is left; the number of steps it took."""
        num_steps = 0
        while self.scheduler.has_work:
            while len(self.in_flight) < depth and self.schedule() is not None:
                pass
            assert self.in_flight, "work is left, but no plan comes"
            self.complete()
            num_steps += 1
            assert num_steps <= max_steps, "no end in sight"
        self.check_idle()
        return num_steps

    def check_idle(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_used, stats.waiting_tokens) == (0, 0, 0, 0)
        assert set(self.finish) == set(self.specs)

    def check_tokens(self) -> None:
        """Every sequence got what it gets alone; an aborted or failed one the beginning of it."""
        for sequence_id, new in self.specs.items():
            tokens, finish = alone(new)
            got = self.tokens[sequence_id]
            if self.finish[sequence_id] in ("aborted", "failed"):
                assert got == tokens[: len(got)]
            else:
                assert (got, self.finish[sequence_id]) == (tokens, finish), f"sequence {sequence_id}"
            assert (sequence_id in self.exports) == (self.finish[sequence_id] == "exported")

    def _emit(self, emission: Emission) -> None:
        assert emission.sequence_id not in self.finish, "nothing comes after the end"
        assert emission.sequence_id not in self.device.failed_ids, "computed from what a failed step did not write"
        if not self.tokens[emission.sequence_id]:
            self.cached[emission.sequence_id] = emission.num_cached
        else:
            assert emission.num_cached == 0
        self.tokens[emission.sequence_id].append(emission.token_id)
        if emission.finish:
            self.finish[emission.sequence_id] = emission.finish

    def _take_export(self, exported: Exported) -> None:
        assert exported.start == 0
        assert self.finish[exported.sequence_id] == "exported"
        np.testing.assert_array_equal(exported.kv, canonical(self.specs[exported.sequence_id].token_ids))
        self.exports[exported.sequence_id] = exported.kv
