"""Engines on a tiny model, and plans for them made by hand, without a scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from twinjet.core.config import CacheConfig, EngineConfig, KVDtype, SchedulerConfig
from twinjet.core.plan import PageExport, PageGrant, PageImport, Plan, SequenceWork, StepOutput
from twinjet.core.types import SamplingParams
from twinjet.engine.engine import Engine, load_engine
from twinjet.engine.interface import run_plan

GREEDY = SamplingParams(temperature=0.0)


def engine_config(
    path: Path,
    page_size: int,
    dtype: KVDtype,
    token_budget: int,
    *,
    exact: bool = True,
    max_streams: int = 4,
    context: int = 1024,
) -> EngineConfig:
    """With a pool of 3,072 tokens."""
    return EngineConfig(
        model_path=str(path),
        cache=CacheConfig(page_size, 3072 // page_size, dtype),
        scheduler=SchedulerConfig(max_streams=max_streams, context=context, token_budget=token_budget),
        exact=exact,
        threads=2,
    )


@dataclass
class Told:
    """What an engine told while it started."""

    loaded: list[tuple[str, int, int]] = field(default_factory=list)
    warmed: list[tuple[int, int]] = field(default_factory=list)


def warm_engine(config: EngineConfig, told: Told | None = None) -> Engine:
    told = told or Told()
    engine = load_engine(config, lambda stage, done, total: told.loaded.append((stage, done, total)))
    engine.warm_up(lambda done, total: told.warmed.append((done, total)))
    return engine


@dataclass
class Sequenced:
    """One sequence on one engine: its slot, its pages, and how far it is computed."""

    slot: int
    page_ids: tuple[int, ...]
    page_size: int
    sampling: SamplingParams = GREEDY
    num_logprobs: int | None = None
    num_computed: int = 0
    num_granted: int = 0
    tokens: list[int] = field(default_factory=list)
    """Generated ones."""

    def grant(self, stop: int) -> tuple[PageGrant, ...]:
        """Pages for positions up to `stop`, granted only when they are needed."""
        needed = -(-stop // self.page_size)
        if needed <= self.num_granted:
            return ()
        granted = PageGrant(self.slot, self.num_granted, self.page_ids[self.num_granted : needed])
        self.num_granted = needed
        return (granted,)

    def work(self, token_ids: Sequence[int] | None, *, samples: bool = True) -> SequenceWork:
        """The next rows; None: one decoding row from the device's own last token."""
        num_tokens = 1 if token_ids is None else len(token_ids)
        ids = None if token_ids is None else tuple(token_ids)
        work = SequenceWork(
            self.slot + 50, self.slot, self.num_computed, num_tokens, ids, samples, self.sampling, self.num_logprobs
        )
        self.num_computed += num_tokens
        return work


def pages(rng: np.random.Generator, engine_pages: int, page_size: int, *num_tokens: int) -> list[tuple[int, ...]]:
    """Disjoint pages at random places, enough for each number of tokens."""
    free = rng.permutation(engine_pages).tolist()
    return [tuple(free.pop() for _ in range(-(-each // page_size))) for each in num_tokens]


def step(engine: Engine, work: Sequence[tuple[Sequenced, Sequence[int] | None, bool]]) -> StepOutput:
    """Run some rows of some sequences: (sequence, token ids, samples). Sampled tokens are noted."""
    planned, grants = [], []
    for sequence, token_ids, samples in work:
        planned.append(sequence.work(token_ids, samples=samples))
        grants += sequence.grant(sequence.num_computed)
    output = run_plan(engine, Plan(7, tuple(planned), tuple(grants)))
    sampling = [sequence for sequence, _, samples in work if samples]
    for sequence, token in zip(sampling, output.token_ids.tolist(), strict=True):
        sequence.tokens.append(token)
    return output


def prefill(engine: Engine, sequence: Sequenced, token_ids: Sequence[int], chunks: Sequence[int]) -> StepOutput:
    """The whole prompt in chunks of these sizes, alone; the last one samples."""
    output, done = None, 0
    for size in chunks:
        last = done + size >= len(token_ids)
        output = step(engine, [(sequence, token_ids[done : done + size], last)])
        done += size
    if output is None or done < len(token_ids):
        raise ValueError(f"chunks {chunks} are too few for {len(token_ids)} tokens")
    return output


def decode(engine: Engine, sequences: Sequence[Sequenced], num_steps: int) -> None:
    for _ in range(num_steps):
        step(engine, [(sequence, None, True) for sequence in sequences])


def export_kv(engine: Engine, page_ids: tuple[int, ...], start: int, stop: int) -> np.ndarray:
    return run_plan(engine, Plan(8, exports=(PageExport(1, page_ids, start, stop),))).exports[0]


def import_kv(engine: Engine, page_ids: tuple[int, ...], start: int, kv: np.ndarray) -> None:
    run_plan(engine, Plan(9, imports=(PageImport(1, page_ids, start, kv),)))


def random_kv(rng: np.random.Generator, engine: Engine, num_tokens: int, dtype: str = "float32") -> np.ndarray:
    L, K, H = engine.kv_shape
    return rng.normal(0, 1, (L, 2, num_tokens, K, H)).astype(dtype)


def pool_addresses(engine: Engine) -> list[int]:
    """Where the device keeps each part of the pool."""
    return [part.unsafe_buffer_pointer() for part in jax.tree.leaves(engine._cache)]


def pool_bytes(engine: Engine) -> int:
    return sum(part.nbytes for part in jax.tree.leaves(engine._cache))
