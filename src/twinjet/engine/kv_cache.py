"""The paged KV pool on the device, and moving canonical pages in and out of it.

No host view of a donated buffer ever exists: it would silently copy the pool. Export gathers into a
fresh array between steps; import scatters with the pool donated.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from twinjet.core.config import CacheConfig
from twinjet.core.errors import TransferFailed
from twinjet.models.config import ModelConfig
from twinjet.ops.ops import Ops
from twinjet.ops.params import PoolShape

MOVE_TOKENS = 512
"""Tokens moved by one run of the export or import program; longer ranges take several runs."""

NOWHERE = np.iinfo(np.int32).max
"""A pool row out of range: gathers are clamped and cut off, scatters are dropped."""


def pool_shape(config: ModelConfig, cache: CacheConfig) -> PoolShape:
    """The pool that a model needs."""
    return PoolShape(
        config.num_layers, cache.num_pages, cache.page_size, config.num_kv_heads, config.head_dim, cache.dtype
    )


def pool_rows(page_ids: tuple[int, ...], start: int, stop: int, page_size: int) -> np.ndarray:
    """Pool rows of positions [start, stop) of a sequence whose pages are `page_ids`, padded to whole moves."""
    position = np.arange(start, stop)
    rows = np.asarray(page_ids, np.int32)[position // page_size] * page_size + position % page_size
    padded = np.full(math.ceil((stop - start) / MOVE_TOKENS) * MOVE_TOKENS, NOWHERE, np.int32)
    padded[: stop - start] = rows
    return padded.reshape(-1, MOVE_TOKENS)


@partial(jax.jit, static_argnums=0)
def gather_pages(ops: Ops, cache: Any, rows: Int[Array, " M"]) -> Float[Array, "L 2 M K H"]:
    """Canonical pages of some pool rows, in a fresh array."""
    return ops.gather(cache, rows)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def scatter_pages(ops: Ops, cache: Any, rows: Int[Array, " M"], kv: Float[Array, "L 2 M K H"]) -> Any:
    """The pool, which is consumed, with canonical pages written to some rows."""
    return ops.scatter(cache, rows, kv)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Canonical pages of a range of positions, in arrays of their own on the device."""

    moves: list[jax.Array]
    """[L, 2, MOVE_TOKENS, K, H] each, the last one padded."""
    num_tokens: int

    def wait(self) -> None:
        for move in self.moves:
            move.block_until_ready()

    def to_host(self) -> np.ndarray:
        """[L, 2, num_tokens, K, H]."""
        return np.concatenate([np.asarray(move) for move in self.moves], axis=2)[:, :, : self.num_tokens]


def export_range(ops: Ops, cache: Any, page_ids: tuple[int, ...], start: int, stop: int, page_size: int) -> Gathered:
    """Canonical pages of positions [start, stop), as they are when all that was dispatched before has run."""
    moves = [gather_pages(ops, cache, rows) for rows in pool_rows(page_ids, start, stop, page_size)]
    return Gathered(moves, stop - start)


def import_range(ops: Ops, cache: Any, page_ids: tuple[int, ...], start: int, kv: np.ndarray, page_size: int) -> Any:
    """The pool, which is consumed, with `kv` [L, 2, tokens, K, H] at positions from `start`.

    Raises: TransferFailed, where one is int8 and the other is not.
    """
    num_tokens = kv.shape[2]
    dtype = jax.tree.leaves(cache)[0].dtype
    if "int8" in (kv.dtype.name, dtype.name) and kv.dtype != dtype:
        raise TransferFailed(f"KV pages of {kv.dtype} cannot go into a pool of {dtype}: int8 has scales of its own")
    # One scatter program, whatever comes. Too large a number becomes infinite here, and the largest there.
    with np.errstate(over="ignore"):
        kv = kv.astype(dtype, copy=False)
    for move, rows in enumerate(pool_rows(page_ids, start, start + num_tokens, page_size)):
        part = kv[:, :, move * MOVE_TOKENS : (move + 1) * MOVE_TOKENS]
        padding = MOVE_TOKENS - part.shape[2]
        cache = scatter_pages(ops, cache, rows, np.pad(part, ((0, 0), (0, 0), (0, padding), (0, 0), (0, 0))))
    return cache
