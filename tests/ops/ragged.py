"""Random ragged batches over a paged pool, and attention over them as it is defined.

Builds a `Batch` field by field, without the packer that the engine uses. Whatever no row may see (pages of nobody,
rows of a page not yet written, other layers, stale entries of the page table) holds large finite garbage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from twinjet.ops.attention import PIECE_TOKENS
from twinjet.ops.batch import Batch, Samples, StepLayout
from twinjet.ops.params import KVCache


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's rows in a step: positions [start, start + num_rows)."""

    slot: int
    start: int
    num_rows: int

    @property
    def stop(self) -> int:
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class PoolShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    """int8: the pool is float32 and holds what int8 rows with a scale can."""


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values of every slot's sequence, and the pool that they were scattered into."""

    keys: dict[int, np.ndarray]
    """Slot -> [L, tokens, K, H] float32, as rounded to the pool's dtype."""
    values: dict[int, np.ndarray]
    cache: KVCache
    page_table: np.ndarray
    owned_rows: np.ndarray
    """[P * G] bool: pool rows that hold a token of some sequence."""


def table_width(context: int, page_size: int) -> int:
    """Page table entries for a context, whole pieces of attention."""
    return -(-context // PIECE_TOKENS) * (PIECE_TOKENS // page_size)


def page_in(rng: np.random.Generator, sequences: Sequence[Rows], layout: StepLayout, shape: PoolShape) -> Paged:
    """Random KV for all positions of all sequences, in pages placed at random."""
    G = shape.page_size
    # As many whatever the sequences, so that a program is compiled once for all of them.
    num_pages = layout.num_slots * layout.table_width
    free = list(rng.permutation(num_pages))
    page_table = rng.integers(0, num_pages, (layout.num_slots, layout.table_width)).astype(np.int32)
    size = (shape.num_layers, num_pages * G, shape.num_kv_heads, shape.head_dim)
    dtype = "float32" if shape.dtype == "int8" else shape.dtype
    pool = [garbage(rng, size, dtype), garbage(rng, size, dtype)]
    owned = np.zeros(num_pages * G, bool)
    known: list[dict[int, np.ndarray]] = [{}, {}]
    for rows in sequences:
        for index in range(-(-rows.stop // G)):
            page_table[rows.slot, index] = free.pop()
        position = np.arange(rows.stop)
        where = page_table[rows.slot, position // G] * G + position % G
        owned[where] = True
        for part in (0, 1):
            drawn = rng.normal(0, 1, (shape.num_layers, rows.stop, *size[2:])).astype(dtype)
            if shape.dtype == "int8":
                integers, scales = to_int8(drawn)
                drawn = integers * scales[..., None]
            pool[part][:, where] = drawn
            known[part][rows.slot] = drawn.astype(np.float32)
    return Paged(known[0], known[1], KVCache(jnp.asarray(pool[0]), jnp.asarray(pool[1])), page_table, owned)


def to_int8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers [..., H] and float32 scales [...]: the largest of a row becomes 127."""
    peak = np.abs(rows).max(axis=-1)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak >= 1e-30)
    integers = np.rint(rows * inverse[..., None]).astype(np.int8)
    return integers, np.where(peak >= 1e-30, peak / np.float32(127), 0).astype(np.float32)


def garbage(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Near the largest numbers that the type has, of either sign."""
    return (rng.choice([-1.0, 1.0], shape) * float(np.finfo(dtype).max) * rng.uniform(0.5, 1.0, shape)).astype(dtype)


def batch_of(layout: StepLayout, sequences: Sequence[Rows], page_table: np.ndarray) -> Batch:
    """The rows of a step side by side in the order given, then padding; nobody samples."""
    T, B, S = layout.num_rows, layout.num_slots, layout.max_samples
    slot, position = np.full(T, B, np.int32), np.full(T, -1, np.int32)
    singles, tiles = np.full(S, T, np.int32), np.zeros((layout.max_tiles, 4), np.int32)
    row = num_singles = num_tiles = 0
    for rows in sequences:
        slot[row : row + rows.num_rows] = rows.slot
        position[row : row + rows.num_rows] = np.arange(rows.start, rows.stop)
        if rows.num_rows == 1:
            singles[num_singles] = row
            num_singles += 1
        for first in range(0, rows.num_rows if rows.num_rows > 1 else 0, layout.tile_rows):
            size = min(layout.tile_rows, rows.num_rows - first)
            tiles[num_tiles] = rows.slot, row + first, size, rows.start + first
            num_tiles += 1
        row += rows.num_rows
    assert row <= T
    return Batch(
        token_ids=jnp.asarray(np.zeros(T, np.int32)),
        slot=jnp.asarray(slot),
        position=jnp.asarray(position),
        num_singles=jnp.asarray(np.int32(num_singles)),
        single_rows=jnp.asarray(singles),
        num_tiles=jnp.asarray(np.int32(num_tiles)),
        tiles=jnp.asarray(tiles),
        page_table=jnp.asarray(page_table),
        samples=no_samples(S, B),
    )


def no_samples(S: int, B: int) -> Samples:
    zeros = np.zeros(S, np.int32)
    floats = np.zeros(S, np.float32)
    return Samples(
        count=jnp.asarray(np.int32(0)),
        with_logprobs=jnp.asarray(np.int32(0)),
        row=jnp.asarray(zeros),
        slot=jnp.asarray(np.full(S, B, np.int32)),
        position=jnp.asarray(zeros),
        temperature=jnp.asarray(floats),
        top_k=jnp.asarray(zeros),
        top_p=jnp.asarray(floats),
        min_p=jnp.asarray(floats),
        seed=jnp.asarray(np.zeros((S, 2), np.uint32)),
        choice=jnp.asarray(zeros),
    )


def naive_attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, start: int, scale: float, window: int | None
) -> np.ndarray:
    """[rows, N, H] float64: softmax over what each row sees; `keys`, `values` [tokens, K, H], rows from `start` on."""
    num_rows, num_heads, _ = q.shape
    group = num_heads // keys.shape[1]
    out = np.zeros(q.shape)
    for row in range(num_rows):
        stop = start + row + 1
        seen = slice(0 if window is None else max(0, stop - window), stop)
        k = keys[seen].astype(np.float64).repeat(group, axis=1)  # [s, N, H]
        v = values[seen].astype(np.float64).repeat(group, axis=1)
        scores = np.einsum("snh,nh->ns", k, q[row].astype(np.float64)) * scale
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[row] = np.einsum("ns,snh->nh", weights / weights.sum(axis=1, keepdims=True), v)
    return out
