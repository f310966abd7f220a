"""Runs sequences through the real scheduler and engine in this process, without sockets or threads."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from twinjet.core.config import CacheConfig, EngineConfig, KVDtype, PolicyName, SchedulerConfig
from twinjet.core.types import SamplingParams, TokenLogprobs
from twinjet.engine.engine import Engine, load_engine
from twinjet.engine.interface import run_plan
from twinjet.scheduler.cost_model import CostModel
from twinjet.scheduler.pace import make_pace
from twinjet.scheduler.scheduler import Scheduler
from twinjet.scheduler.sequence import ImportedPages, SequenceSpec

GREEDY = SamplingParams(temperature=0.0)

COSTS = CostModel((1, 512), (4.0, 515.0), sample_ms=0.3, single_ms=0.002, chunk_ms=0.0004)


def build_engine(
    path: str,
    *,
    context: int,
    num_pages: int,
    token_budget: int = 512,
    exact: bool = True,
    kv_dtype: KVDtype | None = None,
) -> Engine:
    """A warm engine with 16 slots; KV in float32 if exact, float16 if not, where nothing else is said."""
    dtype = kv_dtype or ("float32" if exact else "float16")
    config = EngineConfig(
        model_path=path,
        cache=CacheConfig(page_size=16, num_pages=num_pages, dtype=dtype),
        scheduler=SchedulerConfig(max_streams=16, context=context, token_budget=token_budget),
        exact=exact,
        threads=2,
    )
    engine = load_engine(config, lambda stage, done, total: None)
    engine.warm_up(lambda done, total: None)
    return engine


def sequence(sequence_id: int, token_ids: Sequence[int], max_new_tokens: int, **changes) -> SequenceSpec:
    spec = SequenceSpec(sequence_id, tuple(token_ids), max_new_tokens, GREEDY)
    return replace(spec, **changes)


@dataclass
class Drive:
    """One run: `arrivals` maps a step number to the sequences that are added before it.

    Each has its own scheduler, so nothing of an earlier run is in the prefix cache.
    """

    engine: Engine
    arrivals: Mapping[int, Sequence[SequenceSpec]]
    context: int
    num_pages: int
    token_budget: int = 512
    max_streams: int = 16
    pipeline_depth: int = 2
    prefix_cache: bool = True
    policy: PolicyName = "balanced"
    itl_target_ms: float | None = None
    """With one, steps are bounded by it, as a made-up cost model predicts them."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    exported: dict[int, ImportedPages] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    """How many of each sequence's known tokens came from the prefix cache."""
    logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    preemptions: int = 0
    largest_step: int = 0
    most_chunks: int = 0
    """Most prompts that had rows in one step beside decoding ones."""

    def run(self) -> "Drive":
        limits = SchedulerConfig(self.max_streams, self.context, self.token_budget, self.policy, self.itl_target_ms)
        cache = CacheConfig(16, self.num_pages, "float32", self.prefix_cache)
        scheduler = Scheduler(limits, cache)
        if self.itl_target_ms is not None:
            scheduler.keep_pace(make_pace(COSTS, limits, cache))
        waiting = dict(self.arrivals)
        in_flight = deque()
        step = 0
        while waiting or scheduler.has_work:
            for spec in waiting.pop(step, ()):
                scheduler.add(spec, float(step))
            while len(in_flight) < self.pipeline_depth and (plan := scheduler.schedule(float(step))):
                self.largest_step = max(self.largest_step, plan.num_rows)
                self.most_chunks = max(self.most_chunks, sum(work.token_ids is not None for work in plan.work))
                # Run at once, taken in later: as on a device, the next plan is made before these tokens are read.
                in_flight.append(run_plan(self.engine, plan))
            if in_flight:
                self._take_in(scheduler, in_flight.popleft())
            scheduler.check_integrity()
            step += 1
        self.preemptions = scheduler.stats().preemptions_total
        if scheduler.stats().pages_used:
            raise AssertionError(f"{scheduler.stats().pages_used} pages are still in use")
        return self

    def _take_in(self, scheduler: Scheduler, output) -> None:
        done = scheduler.complete(output)
        for emission in done.emissions:
            self.tokens.setdefault(emission.sequence_id, []).append(emission.token_id)
            self.logprobs.setdefault(emission.sequence_id, []).append(emission.logprobs)
            self.cached.setdefault(emission.sequence_id, emission.num_cached)
        for pages in done.exports:
            self.exported[pages.sequence_id] = ImportedPages(pages.start, pages.kv)
