"""The attention kernel against its definition and the reference op, and a row's bits whatever is round it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.step_calls import attend, call, pack, pool_attributes, step_attributes, threads, to_pool
from tests.ops.ragged import Paged, PoolShape, Rows, batch_of, naive_attention, page_in, table_width
from twinjet.ops.batch import Batch, StepLayout
from twinjet.ops.params import KVCache, Layer, as_stored
from twinjet.ops.reference import ReferenceOps
from twinjet.ops.specs import AttendSpec

CONTEXT = 700
"""Over five segments of 128 tokens."""

WINDOWS = (None, 1, 100, 300, 4096)
"""100 and 300 start inside blocks, the last is over every length here."""

L, LAYER = 2, 1
"""Layers of a pool, and the one that is used."""

EDGES = [0, 1, 15, 16, 17, 62, 63, 64, 65, 127, 128, 254, 255, 256, 257, 319, 320, 511, 512, 513, 600]
"""First positions worth trying: round where parts, blocks and segments of the walk begin."""

# Rows T, slots B, heads N, KV heads K, head dim H, page size, dtype: MHA, GQA of one to twelve heads, MQA.
SHAPES = [
    (1, 3, 9, 3, 64, 16, "float16"),
    (7, 3, 3, 3, 32, 16, "float32"),
    (64, 8, 9, 3, 64, 32, "float16"),
    (64, 6, 7, 1, 80, 64, "float32"),
    (128, 5, 4, 1, 256, 16, "float16"),
    (128, 5, 24, 2, 128, 128, "float16"),
    (300, 6, 8, 2, 16, 16, "float16"),
    (300, 6, 50, 1, 96, 16, "float32"),
    (1, 3, 9, 3, 64, 16, "int8"),
    (64, 8, 9, 3, 64, 32, "int8"),
    (128, 5, 4, 1, 256, 16, "int8"),
    (300, 6, 50, 1, 96, 16, "int8"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_every_row_attends_over_its_own_sequence(shape) -> None:
    T, B, N, K, H, page_size, dtype = shape
    rng = np.random.default_rng(T * 1000 + H)
    layout = StepLayout(T, B, table_width(CONTEXT, page_size))
    for _ in range(2):
        sequences = _random_sequences(rng, T, B)
        paged = page_in(rng, sequences, layout, PoolShape(L, K, H, page_size, dtype))
        packed = pack(layout, batch_of(layout, sequences, paged.page_table))
        pool = jnp.asarray(to_pool(paged.cache, page_size, dtype))
        q = rng.normal(0, 1.5, (T, N, H)).astype(np.float32)
        for window in WINDOWS:
            out = attend(layout, packed, q, pool, LAYER, 1.3 * H**-0.5, window)
            row = 0
            for rows in sequences:
                keys, values = paged.keys[rows.slot][LAYER], paged.values[rows.slot][LAYER]
                # The first, the last, and some between: the definition is slow.
                for at in {0, rows.num_rows - 1, *rng.integers(0, rows.num_rows, 4).tolist()}:
                    position = rows.start + at
                    expected = naive_attention(q[row + at][None], keys, values, position, 1.3 * H**-0.5, window)[0]
                    np.testing.assert_allclose(
                        out[row + at], expected, atol=1e-5, rtol=0, err_msg=f"{rows}, {at}, {window}"
                    )
                row += rows.num_rows
            assert not out[row:].any()


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_it_agrees_with_the_reference_op(dtype: str) -> None:
    T, B, N, K, H, page_size = 64, 6, 9, 3, 64, 16
    rng = np.random.default_rng(3)
    layout = StepLayout(T, B, table_width(CONTEXT, page_size))
    sequences = [Rows(0, 300, 1), Rows(3, 10, 40), Rows(2, 640, 2), Rows(5, 63, 1), Rows(1, 0, 3)]
    paged = page_in(rng, sequences, layout, PoolShape(L, K, H, page_size, dtype))
    batch = batch_of(layout, sequences, paged.page_table)
    q = rng.normal(0, 1, (T, N, H)).astype(np.float32)
    ops, packed = ReferenceOps(page_size), pack(layout, batch)
    pool = jnp.asarray(to_pool(paged.cache, page_size, dtype))
    for window in (None, 100):
        spec = AttendSpec(N, K, H, H**-0.5, (window,) * L)
        expected = _reference_attend(ops, spec, q, paged.cache, batch)
        out = attend(layout, packed, q, pool, LAYER, H**-0.5, window)
        np.testing.assert_allclose(out, np.asarray(expected).reshape(T, N, H), atol=5e-6, rtol=0)


def test_a_soft_cap_bends_the_scores() -> None:
    T, B, N, K, H, page_size = 40, 4, 4, 2, 32, 16
    rng = np.random.default_rng(4)
    layout = StepLayout(T, B, table_width(CONTEXT, page_size))
    sequences = [Rows(0, 300, 1), Rows(1, 70, 20)]
    paged = page_in(rng, sequences, layout, PoolShape(L, K, H, page_size, "float32"))
    packed = pack(layout, batch_of(layout, sequences, paged.page_table))
    q = rng.normal(0, 3, (T, N, H)).astype(np.float32)
    out = attend(layout, packed, q, to_pool(paged.cache, page_size), LAYER, 1.0, soft_cap=5.0)
    row = 0
    for rows in sequences:
        for at in range(rows.num_rows):
            keys, values = paged.keys[rows.slot][LAYER], paged.values[rows.slot][LAYER]
            seen = slice(0, rows.start + at + 1)
            for head in range(N):
                scores = keys[seen, head // 2].astype(np.float64) @ q[row + at, head]
                weights = np.exp(5.0 * np.tanh(scores / 5.0))
                expected = weights @ values[seen, head // 2] / weights.sum()
                np.testing.assert_allclose(out[row + at, head], expected, atol=1e-5, rtol=0)
        row += rows.num_rows


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_what_no_row_may_see_never_changes_a_bit(dtype: str) -> None:
    """Not even where it is no number: a page keeps what a former sequence left in it."""
    T, B, N, K, H, page_size = 40, 6, 4, 2, 64, 16
    rng = np.random.default_rng(7)
    layout = StepLayout(T, B, table_width(CONTEXT, page_size))
    sequences = [Rows(4, 130, 1), Rows(0, 0, 20), Rows(2, 255, 3), Rows(1, 0, 1), Rows(3, 520, 1)]
    paged = page_in(rng, sequences, layout, PoolShape(L, K, H, page_size, dtype))
    packed = pack(layout, batch_of(layout, sequences, paged.page_table))
    q = rng.normal(0, 1, (T, N, H)).astype(np.float32)
    pool, poisoned = (to_pool(kv, page_size, dtype) for kv in (paged.cache, _fill_unowned(paged, np.nan)))
    assert np.isnan(poisoned.view(np.float32) if dtype == "int8" else poisoned).any()
    for window in WINDOWS:
        out = attend(layout, packed, q, pool, LAYER, 0.125, window)
        assert np.isfinite(out).all()
        np.testing.assert_array_equal(_bits(attend(layout, packed, q, poisoned, LAYER, 0.125, window)), _bits(out))


@pytest.mark.parametrize(
    ("N", "K", "H", "dtype"),
    [
        (9, 3, 64, "float16"),
        (4, 1, 256, "float16"),
        (8, 1, 64, "float16"),
        (2, 2, 128, "float32"),
        (50, 1, 16, "float32"),
        (9, 3, 64, "int8"),
    ],
)
def test_a_row_comes_out_the_same_bits_alone_in_chunks_in_company_on_other_pages_and_threads(N, K, H, dtype) -> None:
    T, B, page_size = 160, 6, 16
    rng = np.random.default_rng(N * H)
    shape = PoolShape(L, K, H, page_size, dtype)
    layout = StepLayout(T, B, table_width(CONTEXT, page_size))
    ends = {0: 139, 1: 258, 2: 520, 3: 690, 4: 1, 5: 321}  # slot -> tokens known
    whole = [Rows(slot, 0, stop) for slot, stop in ends.items()]
    first = page_in(rng, whole, layout, shape)
    moved = _move_pages(rng, first, page_size)
    pools = [(jnp.asarray(to_pool(p.cache, page_size, dtype)), p.page_table) for p in (first, moved)]
    queries = {slot: rng.normal(0, 2, (stop, N, H)).astype(np.float32) for slot, stop in ends.items()}
    scale = H**-0.5

    def run(
        sequences: list[Rows], window: int | None, placement: int, num_threads: int
    ) -> dict[tuple[int, int], np.ndarray]:
        """(slot, position) -> bits of the row."""
        pool, page_table = pools[placement]
        stacked = np.full((T, N, H), np.nan, np.float32)
        where = {}
        for rows in sequences:
            for position in range(rows.start, rows.stop):
                stacked[len(where)] = queries[rows.slot][position]
                where[rows.slot, position] = len(where)
        packed = pack(layout, batch_of(layout, sequences, page_table))
        with threads(num_threads):
            out = _bits(attend(layout, packed, stacked, pool, LAYER, scale, window))
        return {key: out[row] for key, row in where.items()}

    for window in (None, 100, 300):
        expected: dict[tuple[int, int], np.ndarray] = {}
        for trial in range(8):
            sequences = _random_parts(rng, ends, T)
            got = run(sequences, window, placement=trial % 2, num_threads=int(rng.choice([1, 2, 3])))
            for index in rng.integers(0, len(got), 4):
                slot, position = list(got)[index]
                expected |= run([Rows(slot, position, 1)], window, placement=0, num_threads=1)
            for key, bits in got.items():
                np.testing.assert_array_equal(bits, expected.setdefault(key, bits), err_msg=f"{key} in {sequences}")
        assert len(expected) > 100


def test_a_step_of_padding_alone_gives_zeros() -> None:
    T, B, N, K, H, page_size = 40, 6, 4, 2, 16, 16
    rng = np.random.default_rng(10)
    layout = StepLayout(T, B, table_width(CONTEXT, page_size))
    paged = page_in(rng, [], layout, PoolShape(L, K, H, page_size, "float32"))
    packed = pack(layout, batch_of(layout, [], paged.page_table))
    q = rng.normal(0, 1, (T, N, H)).astype(np.float32)
    assert not attend(layout, packed, q, to_pool(paged.cache, page_size), LAYER, 0.25).any()


@pytest.mark.parametrize(("page_size", "head_dim"), [(8, 64), (24, 64), (16, 72)])
def test_pools_that_it_cannot_read_are_refused(page_size: int, head_dim: int) -> None:
    layout = StepLayout(4, 2, 8)
    pool = np.zeros((1, 4, 1, 1, 2, 16 * 64), np.float32)
    arguments = [np.zeros((4, head_dim), np.float32), pool, np.zeros(layout.size, np.int32)]
    attributes: dict[str, Any] = pool_attributes(pool) | {"page_size": page_size, "head_dim": head_dim}
    with pytest.raises(jax.errors.JaxRuntimeError, match="multiple of 16"):
        call(
            "twinjet_attend", [jax.ShapeDtypeStruct((4, head_dim), np.float32)], arguments, **step_attributes(layout),
            **attributes, layer=0, num_heads=1, window=0, scale=1.0, soft_cap=0.0,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("K", "H", "page_size"), [(3, 64, 16), (1, 80, 64)])
def test_appended_rows_are_found_by_gather_and_nothing_else_moves(dtype: str, K: int, H: int, page_size: int) -> None:
    T, B = 40, 4
    rng = np.random.default_rng(11)
    layout = StepLayout(T, B, table_width(CONTEXT, page_size))
    sequences = [Rows(3, 300, 1), Rows(0, 60, 30), Rows(1, 15, 2)]
    paged = page_in(rng, sequences, layout, PoolShape(L, K, H, page_size, dtype))
    pool = to_pool(paged.cache, page_size)
    keys, values = (rng.normal(0, 1, (T, K, H)).astype(np.float32) for _ in range(2))
    keys[0, 0, :6] = [1e6, -1e6, 65519.9, np.inf, -np.inf, 1e-7]
    values[1, 0, :6] = [1e6, -1e6, 65519.9, np.inf, -np.inf, 6e-8]
    packed = pack(layout, batch_of(layout, sequences, paged.page_table))
    (after,) = call(
        "twinjet_append_kv", [jax.ShapeDtypeStruct(pool.shape, pool.dtype)], [keys, values, pool, packed], {2: 0},
        **step_attributes(layout), **pool_attributes(pool), layer=LAYER,
    )  # fmt: skip
    expected_keys, expected_values = np.array(paged.cache.keys), np.array(paged.cache.values)
    row = 0
    for rows in sequences:
        for position in range(rows.start, rows.stop):
            at = paged.page_table[rows.slot, position // page_size] * page_size + position % page_size
            expected_keys[LAYER, at] = as_stored(jnp.asarray(keys[row]), np.dtype(dtype))
            expected_values[LAYER, at] = as_stored(jnp.asarray(values[row]), np.dtype(dtype))
            row += 1
    cache = KVCache(jnp.asarray(expected_keys), jnp.asarray(expected_values))
    np.testing.assert_array_equal(_bits(after), _bits(to_pool(cache, page_size)))

    pool_rows = np.concatenate([rng.permutation(expected_keys.shape[1])[:45], [-1, 1 << 30]]).astype(np.int32)
    kv = _gather(after, pool_rows)
    np.testing.assert_array_equal(kv[:, 0, :45], expected_keys[:, pool_rows[:45]])
    np.testing.assert_array_equal(kv[:, 1, :45], expected_values[:, pool_rows[:45]])
    assert not kv[:, :, 45:].any()


def test_what_is_no_number_is_not_let_into_the_pool() -> None:
    layout = StepLayout(1, 1, 8)
    pool = np.zeros((1, 8, 1, 1, 2, 16 * 16), np.float16)
    for dtype in (np.float16, np.float32):
        packed = pack(layout, batch_of(layout, [Rows(0, 5, 1)], np.zeros((1, 8), np.int32)))
        rows = np.full((1, 1, 16), np.nan, np.float32)
        (after,) = call(
            "twinjet_append_kv", [jax.ShapeDtypeStruct(pool.shape, dtype)], [rows, rows, pool.astype(dtype), packed],
            {2: 0}, **step_attributes(layout), **pool_attributes(pool), layer=0,
        )  # fmt: skip
        assert np.isfinite(after).all()
        assert (after != 0).sum() == 32


def test_int8_rows_are_rounded_to_their_largest_and_stay_finite() -> None:
    T, B, K, H, page_size = 40, 4, 3, 64, 16
    rng = np.random.default_rng(13)
    layout = StepLayout(T, B, table_width(CONTEXT, page_size))
    sequences = [Rows(3, 300, 1), Rows(0, 60, 30), Rows(1, 15, 2)]
    paged = page_in(rng, sequences, layout, PoolShape(L, K, H, page_size, "int8"))
    pool = to_pool(paged.cache, page_size, "int8")
    keys, values = (rng.normal(0, 1, (T, K, H)).astype(np.float32) for _ in range(2))
    keys[0, 0] = 0.0
    keys[1, 0, 0], keys[2, 1, 5], values[3, 2, 7] = np.inf, -np.inf, np.nan
    packed = pack(layout, batch_of(layout, sequences, paged.page_table))
    (after,) = call(
        "twinjet_append_kv", [jax.ShapeDtypeStruct(pool.shape, pool.dtype)], [keys, values, pool, packed], {2: 0},
        **step_attributes(layout), **pool_attributes(pool), layer=LAYER,
    )  # fmt: skip
    expected = [np.array(paged.cache.keys), np.array(paged.cache.values)]
    row = 0
    for rows in sequences:
        for position in range(rows.start, rows.stop):
            at = paged.page_table[rows.slot, position // page_size] * page_size + position % page_size
            expected[0][LAYER, at], expected[1][LAYER, at] = keys[row], values[row]
            row += 1
    largest = float(np.finfo(np.float32).max)
    finite = [np.nan_to_num(part, nan=largest, posinf=largest, neginf=-largest) for part in expected]
    cache = KVCache(jnp.asarray(finite[0]), jnp.asarray(finite[1]))
    np.testing.assert_array_equal(after, to_pool(cache, page_size, "int8"))

    pool_rows = rng.permutation(finite[0].shape[1])[:45].astype(np.int32)
    kv = _gather(after, pool_rows)
    integers, scales = kv[..., :H], np.ascontiguousarray(kv[..., H:]).view(np.float32)
    assert np.isfinite(scales).all()
    stored = np.stack([part[:, pool_rows] for part in finite], axis=1)
    error = np.abs(integers * scales.astype(np.float64) - stored)
    assert (error <= 0.5001 * scales + 1e-30).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_scatter_undoes_gather(dtype: str) -> None:
    rng = np.random.default_rng(12)
    pool = rng.normal(0, 20, (2, 9, 2, 3, 2, 16 * (68 if dtype == "int8" else 64))).astype(dtype)
    num_rows = 9 * 32
    rows = np.concatenate([rng.permutation(num_rows), [num_rows, -5, 1 << 30]]).astype(np.int32)
    kv = _gather(pool, rows)
    (back,) = call(
        "twinjet_scatter_kv", [jax.ShapeDtypeStruct(pool.shape, pool.dtype)], [np.zeros_like(pool), rows, kv], {0: 0},
        **pool_attributes(pool),
    )  # fmt: skip
    np.testing.assert_array_equal(back, pool)
    some = rows[:100]
    (partly,) = call(
        "twinjet_scatter_kv", [jax.ShapeDtypeStruct(pool.shape, pool.dtype)], [pool, some, 2 * kv[:, :, :100]], {0: 0},
        **pool_attributes(pool),
    )  # fmt: skip
    again = _gather(partly, rows)
    np.testing.assert_array_equal(again[:, :, :100], 2 * kv[:, :, :100])
    np.testing.assert_array_equal(again[:, :, 100:], kv[:, :, 100:])


@partial(jax.jit, static_argnums=(0, 1))
def _reference_attend(ops: ReferenceOps, spec: AttendSpec, q: np.ndarray, cache: KVCache, batch: Batch) -> jax.Array:
    return ops.attend(Layer(LAYER, {}), jnp.asarray(q), cache, batch, spec)


def _gather(pool: np.ndarray, rows: np.ndarray) -> np.ndarray:
    shape = (pool.shape[0], 2, len(rows), pool.shape[3], pool.shape[5] // 16)
    result = [jax.ShapeDtypeStruct(shape, pool.dtype)]
    return call("twinjet_gather_kv", result, [pool, rows], **pool_attributes(pool))[0]


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"int{8 * x.dtype.itemsize}")


def _random_sequences(rng: np.random.Generator, T: int, B: int) -> list[Rows]:
    """Sequences of one row, of two, and of as many as fit, in any order, with or without padding behind."""
    sequences, left = [], T - int(rng.integers(0, 1 + T // 4))
    for slot in rng.permutation(B):
        if left == 0:
            break
        num_rows = min(int(rng.choice([1, 1, 2, 5, 129, int(rng.integers(1, T + 1))])), left)
        start = min(int(rng.choice(EDGES)), CONTEXT - num_rows)
        sequences.append(Rows(int(slot), start, num_rows))
        left -= num_rows
    return sequences


def _random_parts(rng: np.random.Generator, ends: dict[int, int], T: int) -> list[Rows]:
    """Some rows of known sequences, in any order, as chunks of any size."""
    parts, left = [], T
    for slot in rng.permutation(list(ends)):
        if left == 0:
            break
        stop = ends[int(slot)]
        num_rows = min(int(rng.choice([1, 2, 7, 16, 17, 60, 129])), stop, left)
        # From a coarse grid of positions, so that trials have many rows in common.
        start = min(int(rng.integers(0, stop // 50 + 1)) * 50, stop - num_rows)
        parts.append(Rows(int(slot), start, num_rows))
        left -= num_rows
    return parts


def _fill_unowned(paged: Paged, value: float) -> KVCache:
    mine = paged.owned_rows[None, :, None, None]
    keys, values = np.asarray(paged.cache.keys), np.asarray(paged.cache.values)
    fill = np.asarray(value, keys.dtype)
    return KVCache(jnp.asarray(np.where(mine, keys, fill)), jnp.asarray(np.where(mine, values, fill)))


def _move_pages(rng: np.random.Generator, paged: Paged, page_size: int) -> Paged:
    """The same sequences with every page elsewhere."""
    keys, values = np.asarray(paged.cache.keys), np.asarray(paged.cache.values)
    L, num_rows, K, H = keys.shape
    num_pages = num_rows // page_size
    to = rng.permutation(num_pages).astype(np.int32)  # old page -> new page
    moved = []
    for old in (keys, values):
        new = np.empty((L, num_pages, page_size, K, H), old.dtype)
        new[:, to] = old.reshape(new.shape)
        moved.append(jnp.asarray(new.reshape(old.shape)))
    return Paged(paged.keys, paged.values, KVCache(*moved), to[paged.page_table], paged.owned_rows)
