"""Compiled once, and the pool updated in place."""

from pathlib import Path

import numpy as np
import pytest

from tests.engine.drive import (
    Sequenced,
    Told,
    decode,
    engine_config,
    export_kv,
    import_kv,
    pages,
    pool_addresses,
    pool_bytes,
    prefill,
    random_kv,
    step,
)
from tests.models.naive import NaiveModel
from twinjet.core.errors import CheckpointError, ConfigError
from twinjet.core.types import SamplingParams
from twinjet.engine.engine import Engine, load_engine


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2)


def test_nothing_compiles_after_warm_up_and_the_pool_stays_where_it_is(
    engine: Engine, rng: np.random.Generator
) -> None:
    """Plans of every kind: bucket, sampling, log-probabilities, moves of either type and any length, none at all."""
    compiles, pool = engine.compiles_total, pool_addresses(engine)
    placed = pages(rng, 192, 16, *[512] * 4)
    sampled = SamplingParams(0.7, top_k=9, top_p=0.9, min_p=0.1, seed=3)
    for kind in (SamplingParams(temperature=0.0), SamplingParams(), sampled):
        for num_logprobs in (None, 0, 20):
            running = [Sequenced(slot, page_ids, 16, kind, num_logprobs) for slot, page_ids in enumerate(placed)]
            for one in running:
                prefill(engine, one, rng.integers(3, 270, 44).tolist(), [32, 1, 2, 9])
            for company in (1, 2, 3, 4):
                decode(engine, running[:company], 2)
            mixed = [(running[0], None, True), *((one, [5] * 9, False) for one in running[1:])]
            step(engine, mixed)
    for num_tokens in (1, 511, 512):
        for dtype in ("float32", "float16"):
            import_kv(engine, placed[0], 0, random_kv(rng, engine, num_tokens, dtype))
        export_kv(engine, placed[0], 0, num_tokens)
    assert engine.compiles_total == compiles
    assert pool_addresses(engine) == pool


def test_a_step_needs_no_memory_of_the_pools_size(engine: Engine) -> None:
    """A copy inside the program would not show in the pool's address."""
    for program in engine._programs.values():
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes >= pool_bytes(engine)
        assert memory.temp_size_in_bytes < pool_bytes(engine) / 2


def test_loading_and_warm_up_count_up_to_their_totals(small_engine: Engine, small_told: Told) -> None:
    assert {stage for stage, _, _ in small_told.loaded} == {"pack" if "kernels" in small_engine.backend else "load"}
    assert small_told.loaded[-1][1] == small_told.loaded[-1][2]
    total = small_told.warmed[-1][1]
    assert small_told.warmed == [(done, total) for done in range(total + 1)]
    assert small_engine.vocab_size == 281
    assert small_engine.kv_shape == (2, 2, 16)


def test_the_smallest_engine_generates(small_engine: Engine, naive: NaiveModel) -> None:
    compiles = small_engine.compiles_total
    one = Sequenced(0, (1, 0), 64)
    prefill(small_engine, one, [3, 4, 5], [1, 1, 1])
    decode(small_engine, [one], 9)
    assert one.tokens == naive.greedy([3, 4, 5], 10)
    assert small_engine.compiles_total == compiles


def test_a_context_over_the_models_own_is_refused(model_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1024 tokens, got --context 1025"):
        load_engine(engine_config(model_path, 16, "float32", 32, context=1025), lambda stage, done, total: None)


def test_a_page_larger_than_a_piece_of_attention_is_refused(model_path: Path) -> None:
    with pytest.raises(ConfigError, match="128 tokens at most, got 256"):
        load_engine(engine_config(model_path, 256, "float32", 32), lambda stage, done, total: None)
