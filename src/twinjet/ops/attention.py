"""Ragged paged attention in plain jnp: each row over its own sequence, walking the KV in pieces of fixed size.

Pieces start at multiples of `PIECE_TOKENS` from position 0, whatever the chunk, so that a row's sum is
taken in the same order in any company. Rows of decoding sequences go together, one piece of each at a
time; chunks go tile by tile.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from twinjet.ops.batch import MAX_TILE_ROWS, Batch
from twinjet.ops.params import KVCache

PIECE_TOKENS = 128
"""KV tokens per piece; a multiple of any page size up to it, and table widths are padded to it."""

NEGATIVE = -1e30
"""Stands for minus infinity: it survives the subtraction of itself."""

NO_WINDOW = 1 << 30
"""A window that hides nothing."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One layer's KV, read a piece at a time."""

    cache: KVCache
    layer: int | Array
    page_table: Int[Array, "B MP"]
    page_size: int

    def piece(
        self, slot: Int[Array, "..."], index: Array
    ) -> tuple[Float[Array, "... t K H"], Float[Array, "... t K H"]]:
        """Keys and values of tokens [index * t, (index + 1) * t) of some slots, t = PIECE_TOKENS."""
        pages_per_piece = PIECE_TOKENS // self.page_size
        column = index * pages_per_piece + jnp.arange(pages_per_piece)
        pages = self.page_table[slot[..., None], column]
        rows = (pages[..., None] * self.page_size + jnp.arange(self.page_size)).reshape(*slot.shape, PIECE_TOKENS)
        keys, values = self.cache.keys[self.layer, rows], self.cache.values[self.layer, rows]
        return keys.astype(jnp.float32), values.astype(jnp.float32)


def attend_singles(
    out: Float[Array, "T N H"], q: Float[Array, "T N H"], pool: Pool, window: Array, batch: Batch
) -> Float[Array, "T N H"]:
    """`out` with the rows of one-row sequences filled in; `q` already scaled."""
    T, N, H = q.shape
    K = pool.cache.keys.shape[2]
    S = batch.single_rows.shape[0]
    row = jnp.minimum(batch.single_rows, T - 1)
    slot = jnp.minimum(batch.slot[row], batch.page_table.shape[0] - 1)
    live = jnp.arange(S) < batch.num_singles
    position = jnp.where(live, batch.position[row], -1)  # [S]
    first = jnp.maximum(position - (window - 1), 0)
    queries = q[row].reshape(S, K, N // K, H)

    def piece(index, carry):
        k, v = pool.piece(slot, index)  # [S, t, K, H]
        scores = jnp.einsum("skrh,stkh->skrt", queries, k, precision=lax.Precision.HIGHEST)
        at = index * PIECE_TOKENS + jnp.arange(PIECE_TOKENS)
        visible = (at <= position[:, None]) & (at >= first[:, None])  # [S, t]
        return _accumulate(
            carry,
            jnp.where(visible[:, None, None, :], scores, NEGATIVE),
            lambda p: jnp.einsum("skrt,stkh->skrh", p, v, precision=lax.Precision.HIGHEST),
        )

    start = jnp.min(jnp.where(live, first, jnp.iinfo(jnp.int32).max)) // PIECE_TOKENS
    stop = jnp.max(position) // PIECE_TOKENS + 1
    carry = lax.fori_loop(jnp.minimum(start, stop), stop, piece, _empty_carry((S, K, N // K), H))
    return out.at[batch.single_rows].set(_finish(carry).reshape(S, N, H), mode="drop")


def attend_tiles(q: Float[Array, "T N H"], pool: Pool, window: Array, batch: Batch) -> Float[Array, "T N H"]:
    """Rows of sequences with several rows; zeros elsewhere. `q` already scaled."""
    T, N, H = q.shape
    K = pool.cache.keys.shape[2]
    M = min(T, MAX_TILE_ROWS)
    padded = jnp.pad(q, ((0, M), (0, 0), (0, 0)))  # a tile's slice never runs over the end

    def tile(index, out):
        slot, row0, num_rows, position0 = batch.tiles[index]
        queries = lax.dynamic_slice(padded, (row0, 0, 0), (M, N, H)).reshape(M, K, N // K, H).transpose(1, 2, 0, 3)
        position = position0 + jnp.arange(M)
        first = jnp.maximum(position - (window - 1), 0)

        def piece(at_piece, carry):
            k, v = pool.piece(slot, at_piece)  # [t, K, H]
            scores = jnp.einsum("krmh,tkh->krmt", queries, k, precision=lax.Precision.HIGHEST)
            at = at_piece * PIECE_TOKENS + jnp.arange(PIECE_TOKENS)
            visible = (at <= position[:, None]) & (at >= first[:, None])  # [M, t]
            return _accumulate(
                carry,
                jnp.where(visible, scores, NEGATIVE),
                lambda p: jnp.einsum("krmt,tkh->krmh", p, v, precision=lax.Precision.HIGHEST),
            )

        start = first[0] // PIECE_TOKENS
        stop = (position0 + num_rows - 1) // PIECE_TOKENS + 1
        carry = lax.fori_loop(start, stop, piece, _empty_carry((K, N // K, M), H))
        done = _finish(carry).transpose(2, 0, 1, 3).reshape(M, N, H)
        before = lax.dynamic_slice(out, (row0, 0, 0), (M, N, H))
        mine = (jnp.arange(M) < num_rows)[:, None, None]
        return lax.dynamic_update_slice(out, jnp.where(mine, done, before), (row0, 0, 0))

    return lax.fori_loop(0, batch.num_tiles, tile, jnp.zeros_like(padded))[:T]


def _empty_carry(shape: tuple[int, ...], H: int) -> tuple[Array, Array, Array]:
    """Running maximum, sum of exponentials, weighted sum of values."""
    return (
        jnp.full(shape, NEGATIVE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, H), jnp.float32),
    )


def _accumulate(carry, scores, weigh):
    maximum, total, acc = carry
    new_maximum = jnp.maximum(maximum, scores.max(axis=-1))
    # Rows whose pieces so far are all hidden keep a total of zero, not of exp(0).
    p = jnp.where(scores <= NEGATIVE, 0.0, jnp.exp(scores - new_maximum[..., None]))
    shrink = jnp.exp(maximum - new_maximum)
    return new_maximum, total * shrink + p.sum(axis=-1), acc * shrink[..., None] + weigh(p)


def _finish(carry) -> Array:
    _, total, acc = carry
    return acc / jnp.maximum(total, 1e-30)[..., None]
