"""The paged KV pool on the device, and moving canonical pages in and out of it.

No host view of a donated buffer ever exists: it would silently copy the pool. Export gathers into a
fresh array between steps; import scatters with the pool donated.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from twinjet.core.config import CacheConfig
from twinjet.models.config import ModelConfig
from twinjet.ops.params import KVCache, as_stored

MOVE_TOKENS = 512
"""Tokens moved by one run of the export or import program; longer ranges take several runs."""

NOWHERE = np.iinfo(np.int32).max
"""A pool row out of range: gathers are clamped and cut off, scatters are dropped."""


def create_cache(config: ModelConfig, cache: CacheConfig) -> KVCache:
    """A pool of zeros."""
    shape = (config.num_layers, cache.num_pages * cache.page_size, config.num_kv_heads, config.head_dim)
    return KVCache(jnp.zeros(shape, cache.dtype), jnp.zeros(shape, cache.dtype))


def pool_rows(page_ids: tuple[int, ...], start: int, stop: int, page_size: int) -> np.ndarray:
    """Pool rows of positions [start, stop) of a sequence whose pages are `page_ids`, padded to whole moves."""
    position = np.arange(start, stop)
    rows = np.asarray(page_ids, np.int32)[position // page_size] * page_size + position % page_size
    padded = np.full(math.ceil((stop - start) / MOVE_TOKENS) * MOVE_TOKENS, NOWHERE, np.int32)
    padded[: stop - start] = rows
    return padded.reshape(-1, MOVE_TOKENS)


@jax.jit
def gather_pages(cache: KVCache, rows: Int[Array, " M"]) -> Float[Array, "L 2 M K H"]:
    """Canonical pages of some pool rows, in a fresh array."""
    take = partial(jnp.take, indices=rows, axis=1, mode="clip")
    return jnp.stack([take(cache.keys), take(cache.values)], axis=1)


@partial(jax.jit, donate_argnums=0)
def scatter_pages(cache: KVCache, rows: Int[Array, " M"], kv: Float[Array, "L 2 M K H"]) -> KVCache:
    """The pool, which is consumed, with canonical pages written to some rows."""
    return KVCache(
        cache.keys.at[:, rows].set(as_stored(kv[:, 0], cache.keys.dtype), mode="drop"),
        cache.values.at[:, rows].set(as_stored(kv[:, 1], cache.values.dtype), mode="drop"),
    )


def export_range(cache: KVCache, page_ids: tuple[int, ...], start: int, stop: int, page_size: int) -> np.ndarray:
    """Canonical pages [L, 2, stop - start, K, H] on the host."""
    moves = [np.asarray(gather_pages(cache, rows)) for rows in pool_rows(page_ids, start, stop, page_size)]
    return np.concatenate(moves, axis=2)[:, :, : stop - start]


def import_range(cache: KVCache, page_ids: tuple[int, ...], start: int, kv: np.ndarray, page_size: int) -> KVCache:
    """The pool, which is consumed, with `kv` [L, 2, tokens, K, H] at positions from `start`."""
    num_tokens = kv.shape[2]
    # One scatter program, whatever comes. Too large a number becomes infinite here, and the largest there.
    with np.errstate(over="ignore"):
        kv = kv.astype(cache.keys.dtype, copy=False)
    for move, rows in enumerate(pool_rows(page_ids, start, start + num_tokens, page_size)):
        part = kv[:, :, move * MOVE_TOKENS : (move + 1) * MOVE_TOKENS]
        padding = MOVE_TOKENS - part.shape[2]
        cache = scatter_pages(cache, rows, np.pad(part, ((0, 0), (0, 0), (0, padding), (0, 0), (0, 0))))
    return cache
