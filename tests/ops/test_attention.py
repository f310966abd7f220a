"""Paged attention against the definition, over ragged batches of every shape that a step may have."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.ragged import Paged, PoolShape, Rows, batch_of, garbage, naive_attention, page_in, table_width
from twinjet.ops.attention import NO_WINDOW, PIECE_TOKENS, Pool, attend_singles, attend_tiles
from twinjet.ops.batch import Batch, StepLayout
from twinjet.ops.params import KVCache, Layer
from twinjet.ops.reference import ReferenceOps
from twinjet.ops.specs import AttendSpec

CONTEXT = 3 * PIECE_TOKENS + 10
WINDOWS = (None, 1, 3, 512, 100)
"""One for each layer; 512 is over every length here, 100 starts inside pieces."""

EDGES = [0, 1, PIECE_TOKENS - 2, PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, 2 * PIECE_TOKENS - 1, 256, 300, 383]
"""First positions worth trying: round where pieces of attention begin."""

# Rows T, slots B, heads N, KV heads K, head dim H, page size, dtype: GQA, MHA, MQA; T under, at and over a tile.
SHAPES = [
    (1, 3, 4, 2, 16, 16, "float32"),
    (7, 3, 3, 3, 32, 1, "float32"),
    (64, 8, 4, 2, 16, 4, "float32"),
    (128, 6, 2, 1, 256, 64, "float16"),
    (300, 6, 6, 3, 16, 128, "float32"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_every_row_attends_over_its_own_sequence(shape) -> None:
    T, B, N, K, H, page_size, dtype = shape
    rng = np.random.default_rng(T * 1000 + H)
    layout = StepLayout(T, B, table_width(CONTEXT, page_size))
    pool_shape = PoolShape(len(WINDOWS), K, H, page_size, dtype)
    attend = _jitted_attend(N, K, H, page_size)
    for _ in range(3):
        sequences = _random_sequences(rng, T, B)
        paged = page_in(rng, sequences, layout, pool_shape)
        batch = batch_of(layout, sequences, paged.page_table)
        q = rng.normal(0, 1.5, (T, N, H)).astype(np.float32)
        for layer, window in enumerate(WINDOWS):
            out = np.asarray(attend(layer, q, paged.cache, batch)).reshape(T, N, H)
            row = 0
            for rows in sequences:
                mine = slice(row, row + rows.num_rows)
                keys, values = paged.keys[rows.slot][layer], paged.values[rows.slot][layer]
                expected = naive_attention(q[mine], keys, values, rows.start, 1.3 * H**-0.5, window)
                np.testing.assert_allclose(out[mine], expected, atol=2e-5, rtol=0, err_msg=f"{rows}, window {window}")
                row += rows.num_rows


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_no_row_may_see_never_changes_a_bit(dtype: str) -> None:
    T, B, N, K, H, page_size = 40, 6, 4, 2, 16, 8
    rng = np.random.default_rng(7)
    layout = StepLayout(T, B, table_width(CONTEXT, page_size))
    sequences = [Rows(4, 130, 1), Rows(0, 0, 20), Rows(2, 127, 3), Rows(1, 0, 1)]
    paged = page_in(rng, sequences, layout, PoolShape(len(WINDOWS), K, H, page_size, dtype))
    batch = batch_of(layout, sequences, paged.page_table)
    attend = _jitted_attend(N, K, H, page_size)
    q = rng.normal(0, 1, (T, N, H)).astype(np.float32)
    size = paged.cache.keys.shape
    other = _replace_unowned(paged, garbage(rng, size, dtype), garbage(rng, size, dtype))
    nothing = np.zeros(paged.cache.keys.shape, dtype)
    zeros = _replace_unowned(paged, nothing, nothing)
    for layer in range(len(WINDOWS)):
        out = np.asarray(attend(layer, q, paged.cache, batch))[:25]
        assert np.isfinite(out).all()
        np.testing.assert_array_equal(np.asarray(attend(layer, q, other, batch))[:25], out)
        np.testing.assert_array_equal(np.asarray(attend(layer, q, zeros, batch))[:25], out)


def test_a_row_comes_out_the_same_bits_in_any_company() -> None:
    T, B, N, K, H, page_size = 40, 6, 4, 2, 16, 8
    rng = np.random.default_rng(8)
    layout = StepLayout(T, B, table_width(CONTEXT, page_size))
    decoding, chunk, others = Rows(3, 200, 1), Rows(0, 120, 20), [Rows(2, 383, 1), Rows(1, 5, 1), Rows(5, 300, 9)]
    paged = page_in(rng, [decoding, chunk, *others], layout, PoolShape(len(WINDOWS), K, H, page_size, "float32"))
    attend = _jitted_attend(N, K, H, page_size)
    q = {rows: rng.normal(0, 1, (rows.num_rows, N, H)).astype(np.float32) for rows in (decoding, chunk, *others)}

    def run(sequences: list[Rows], layer: int) -> dict[Rows, np.ndarray]:
        stacked = np.zeros((T, N, H), np.float32)
        first, row = {}, 0
        for rows in sequences:
            stacked[row : row + rows.num_rows], first[rows] = q[rows], row
            row += rows.num_rows
        out = np.asarray(attend(layer, stacked, paged.cache, batch_of(layout, sequences, paged.page_table)))
        return {rows: out[first[rows] : first[rows] + rows.num_rows] for rows in sequences}

    for layer in range(len(WINDOWS)):
        alone = run([decoding], layer) | run([chunk], layer)
        for company in ([decoding, chunk, *others], [*others[::-1], chunk, decoding]):
            together = run(company, layer)
            np.testing.assert_array_equal(together[decoding], alone[decoding])
            np.testing.assert_array_equal(together[chunk], alone[chunk])


def test_singles_and_tiles_write_their_own_rows_only() -> None:
    T, B, N, K, H, page_size = 12, 4, 2, 1, 16, 16
    rng = np.random.default_rng(9)
    layout = StepLayout(T, B, table_width(CONTEXT, page_size))
    sequences = [Rows(1, 10, 1), Rows(0, 3, 4), Rows(3, 130, 1)]
    paged = page_in(rng, sequences, layout, PoolShape(1, K, H, page_size, "float32"))
    batch = batch_of(layout, sequences, paged.page_table)
    pool = Pool(paged.cache, 0, batch.page_table, page_size)
    q = jnp.asarray(rng.normal(0, 1, (T, N, H)), jnp.float32)
    window = jnp.asarray(np.int32(NO_WINDOW))
    tiles = np.asarray(jax.jit(lambda q: attend_tiles(q, pool, window, batch))(q))
    assert (np.abs(tiles).max(axis=(1, 2)) > 0).tolist() == [False, *[True] * 4, *[False] * 7]
    marked = np.full((T, N, H), 9.0, np.float32)
    singles = np.asarray(jax.jit(lambda q: attend_singles(jnp.asarray(marked), q, pool, window, batch))(q))
    assert (singles == 9.0).all(axis=(1, 2)).tolist() == [False, *[True] * 4, False, *[True] * 6]


def test_a_step_of_padding_alone_gives_zeros() -> None:
    T, B, N, K, H, page_size = 40, 6, 4, 2, 16, 8
    rng = np.random.default_rng(10)
    layout = StepLayout(T, B, table_width(CONTEXT, page_size))
    paged = page_in(rng, [], layout, PoolShape(len(WINDOWS), K, H, page_size, "float32"))
    batch = batch_of(layout, [], paged.page_table)
    q = rng.normal(0, 1, (T, N, H)).astype(np.float32)
    out = np.asarray(_jitted_attend(N, K, H, page_size)(0, q, paged.cache, batch))
    np.testing.assert_array_equal(out, np.zeros((T, N * H), np.float32))


def _jitted_attend(N: int, K: int, H: int, page_size: int):
    ops, spec = ReferenceOps(page_size), AttendSpec(N, K, H, 1.3 * H**-0.5, WINDOWS)

    def attend(layer: int, q: np.ndarray, cache: KVCache, batch: Batch) -> jax.Array:
        return _attend(ops, spec, np.int32(layer), q, cache, batch)

    return attend


@partial(jax.jit, static_argnums=(0, 1))
def _attend(ops: ReferenceOps, spec: AttendSpec, layer: np.int32, q: np.ndarray, cache: KVCache, batch: Batch):
    return ops.attend(Layer(jnp.asarray(layer), {}), jnp.asarray(q), cache, batch, spec)


def _random_sequences(rng: np.random.Generator, T: int, B: int) -> list[Rows]:
    """Sequences of one row, of two, and of as many as fit, in any order, with or without padding behind."""
    sequences, left = [], T - int(rng.integers(0, 1 + T // 4))
    for slot in rng.permutation(B):
        if left == 0:
            break
        wanted = int(rng.choice([1, 1, 2, PIECE_TOKENS - 1, PIECE_TOKENS + 1, int(rng.integers(1, T + 1))]))
        num_rows = min(wanted, left)
        start = min(int(rng.choice(EDGES)), CONTEXT - num_rows)
        sequences.append(Rows(int(slot), start, num_rows))
        left -= num_rows
    return sequences


def _replace_unowned(paged: Paged, keys: np.ndarray, values: np.ndarray) -> KVCache:
    mine = paged.owned_rows[None, :, None, None]
    return KVCache(
        jnp.asarray(np.where(mine, np.asarray(paged.cache.keys), keys)),
        jnp.asarray(np.where(mine, np.asarray(paged.cache.values), values)),
    )
