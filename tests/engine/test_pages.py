"""Canonical pages out of one engine and into another."""

import numpy as np
import pytest

from tests.engine.drive import Sequenced, decode, export_kv, import_kv, pages, prefill, random_kv, step
from tests.models.naive import NaiveModel
from twinjet.core.plan import PageExport, PageImport, Plan
from twinjet.engine.engine import Engine
from twinjet.engine.interface import run_plan
from twinjet.engine.kv_cache import MOVE_TOKENS


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 1), (0, 16), (5, 23), (31, 32), (0, MOVE_TOKENS), (0, MOVE_TOKENS + 1), (37, 2 * MOVE_TOKENS - 1)],
)
def test_what_was_imported_is_exported(engine: Engine, rng: np.random.Generator, start: int, stop: int) -> None:
    mine, other = pages(rng, 192, 16, 1024, 1024)
    background = random_kv(rng, engine, 1024)
    for page_ids in (mine, other):
        import_kv(engine, page_ids, 0, background)
    kv = random_kv(rng, engine, stop - start)
    import_kv(engine, mine, start, kv)
    np.testing.assert_array_equal(export_kv(engine, mine, start, stop), kv)
    # Nothing around it was touched, in its own pages or in others.
    whole = export_kv(engine, mine, 0, 1024)
    np.testing.assert_array_equal(whole[:, :, :start], background[:, :, :start])
    np.testing.assert_array_equal(whole[:, :, stop:], background[:, :, stop:])
    np.testing.assert_array_equal(export_kv(engine, other, 0, 1024), background)


def test_pages_of_another_size_and_type(
    engine: Engine, small_engine: Engine, naive: NaiveModel, rng: np.random.Generator
) -> None:
    """A prompt computed on one engine is continued on the other, both ways."""
    token_ids = rng.integers(3, 270, 150).tolist()
    expected = naive.greedy(token_ids, 6)
    for source, source_size, target, target_size in ((engine, 16, small_engine, 64), (small_engine, 64, engine, 16)):
        (there,), (here,) = (pages(rng, 3072 // size, size, 192) for size in (source_size, target_size))
        first = Sequenced(0, there, source_size)
        size = 32 if source is engine else 1
        prefill(source, first, token_ids, [size] * -(-len(token_ids) // size))
        kv = export_kv(source, there, 0, len(token_ids))
        assert kv.dtype == (np.float32 if source is engine else np.float16)
        second = Sequenced(0, here, target_size, num_computed=len(token_ids), tokens=list(first.tokens))
        import_kv(target, here, 0, kv)
        kept = export_kv(target, here, 0, len(token_ids))
        np.testing.assert_array_equal(kept, kv.astype(kept.dtype))
        step(target, [(second, second.tokens, True)])
        decode(target, [second], 4)
        # Half precision moves a logit of this model by less than its tokens are apart.
        assert second.tokens == expected


def test_imports_come_before_rows_and_exports_after(
    engine: Engine, naive: NaiveModel, rng: np.random.Generator
) -> None:
    token_ids = rng.integers(3, 270, 40).tolist()
    (there, here) = pages(rng, 192, 16, 64, 64)
    first = Sequenced(0, there, 16)
    prefill(engine, first, token_ids, [32, 8])
    kv = export_kv(engine, there, 0, 40)
    second = Sequenced(1, here, 16, num_computed=40)
    work = second.work(first.tokens)
    moves = (PageImport(1, here, 0, kv[:, :, :25]), PageImport(1, here, 25, kv[:, :, 25:]))
    plan = Plan(1, (work,), second.grant(41), moves, (PageExport(1, here, 0, 41), PageExport(1, here, 40, 41)))
    output = run_plan(engine, plan)
    assert [*first.tokens, *output.token_ids.tolist()] == naive.greedy(token_ids, 2)
    np.testing.assert_array_equal(output.exports[0][:, :, :40], kv)
    np.testing.assert_array_equal(output.exports[0][:, :, 40:], output.exports[1])
    decode(engine, [first], 1)
    np.testing.assert_allclose(output.exports[1], export_kv(engine, there, 40, 41), atol=1e-5)


def test_what_was_exported_is_the_receivers_own(engine: Engine, rng: np.random.Generator) -> None:
    """A view of the pool would change under it, or keep the pool from being updated in place."""
    (page_ids,) = pages(rng, 192, 16, 64)
    kv = random_kv(rng, engine, 64)
    import_kv(engine, page_ids, 0, kv)
    exported = export_kv(engine, page_ids, 0, 64)
    import_kv(engine, page_ids, 0, random_kv(rng, engine, 64))
    np.testing.assert_array_equal(exported, kv)


def test_too_large_numbers_become_the_largest_of_the_type(small_engine: Engine, rng: np.random.Generator) -> None:
    kv = random_kv(rng, small_engine, 64) * np.float32(1e6)
    import_kv(small_engine, (3,), 0, kv)
    largest = float(np.finfo(np.float16).max)
    exported = export_kv(small_engine, (3,), 0, 64)
    np.testing.assert_array_equal(exported, np.clip(kv, -largest, largest).astype(np.float16))


def test_a_view_may_be_imported(engine: Engine, rng: np.random.Generator) -> None:
    (page_ids,) = pages(rng, 192, 16, 64)
    kv = random_kv(rng, engine, 128)[:, :, ::2]
    kv.flags.writeable = False
    import_kv(engine, page_ids, 0, kv)
    np.testing.assert_array_equal(export_kv(engine, page_ids, 0, 64), kv)
