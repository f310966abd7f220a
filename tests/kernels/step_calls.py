"""Calling the step kernels as XLA programs do, on packed arrays and pools built field by field."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.ragged import to_int8
from twinjet.kernels import LIBRARY
from twinjet.ops.batch import Batch, StepLayout
from twinjet.ops.params import KVCache

BLOCK = 16
"""Tokens per block of the pool."""

TARGETS = ("twinjet_attend", "twinjet_append_kv", "twinjet_gather_kv", "twinjet_scatter_kv", "twinjet_sample")


@cache
def library() -> ctypes.CDLL:
    """The kernels, with their handlers registered under names of these tests."""
    if not LIBRARY.exists():
        pytest.skip("no CPU kernels here: scripts/build_kernels.sh builds them")
    loaded = ctypes.CDLL(str(LIBRARY))
    for name in TARGETS:
        jax.ffi.register_ffi_target(f"test_{name}", jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
    loaded.twinjet_init(2)
    return loaded


@contextmanager
def threads(count: int) -> Iterator[None]:
    library().twinjet_init(count)
    try:
        yield
    finally:
        library().twinjet_init(2)


def pack(layout: StepLayout, batch: Batch, tag: int = 0) -> np.ndarray:
    """The packed array that `layout.unpack` turns into `batch`."""
    samples = batch.samples
    bits = [np.asarray(column).view(np.int32) for column in (samples.temperature, samples.top_p, samples.min_p)]
    seed = np.asarray(samples.seed).view(np.int32)
    sample_rows = [
        samples.row, samples.slot, samples.position, bits[0], samples.top_k, bits[1], bits[2], seed[:, 1], seed[:, 0],
        samples.choice,
    ]  # fmt: skip
    parts = {
        "counts": [samples.count, batch.num_singles, batch.num_tiles, samples.with_logprobs, tag],
        "rows": [batch.token_ids, batch.slot, batch.position],
        "samples": sample_rows,
        "singles": batch.single_rows,
        "tiles": batch.tiles,
        "page_table": batch.page_table,
    }
    packed = np.empty(layout.size, np.int32)
    for name, (start, stop, shape) in layout.sections().items():
        packed[start:stop] = np.asarray(parts[name]).reshape(shape).ravel()
    return packed


def to_pool(kv: KVCache, page_size: int, dtype: str | None = None) -> np.ndarray:
    """[L, P, G/16, K, 2, 16 * W] of keys and values [L, P * G, K, H]; of their own dtype, or int8."""
    keys, values = np.asarray(kv.keys), np.asarray(kv.values)
    if dtype != "int8":
        return np.stack([_by_block(keys, page_size, True), _by_block(values, page_size, False)], axis=4)
    halves = []
    for rows, transposed in ((keys, True), (values, False)):
        with np.errstate(invalid="ignore"):  # tests put in what is no number
            integers, scales = to_int8(rows)
        block = _by_block(integers, page_size, transposed)
        halves.append(np.concatenate([block, _by_block(scales[..., None], page_size, False).view(np.int8)], axis=-1))
    return np.stack(halves, axis=4)


def _by_block(rows: np.ndarray, page_size: int, transposed: bool) -> np.ndarray:
    """[L, P, G/16, K, 16 * H] of [L, P * G, K, H], tokens first, or last if `transposed`."""
    L, num_rows, K, H = rows.shape
    blocks = rows.reshape(L, num_rows // page_size, page_size // BLOCK, BLOCK, K, H)
    ordered = blocks.transpose(0, 1, 2, 4, 5, 3) if transposed else blocks.transpose(0, 1, 2, 4, 3, 5)
    return np.ascontiguousarray(ordered).reshape(*ordered.shape[:4], BLOCK * H)


def pool_attributes(pool: np.ndarray | jax.Array) -> dict[str, Any]:
    _, num_pages, blocks, num_kv_heads, _, size = pool.shape
    return {
        "num_kv_heads": num_kv_heads, "head_dim": size // BLOCK - (4 if pool.dtype == np.int8 else 0),
        "num_pages": num_pages, "page_size": blocks * BLOCK,
    }  # fmt: skip


def step_attributes(layout: StepLayout) -> dict[str, Any]:
    return {"T": layout.num_rows, "B": layout.num_slots, "MP": layout.table_width}


def call(target: str, results, arguments: list, aliases: dict[int, int] | None = None, **attributes):
    """Results of one kernel, as numpy arrays. Whole numbers go as int64, others as float32."""
    library()
    typed = tuple((n, np.int64(v) if isinstance(v, int) else np.float32(v)) for n, v in attributes.items())
    shapes = tuple((r.shape, str(r.dtype)) for r in results)
    program = _program(target, shapes, typed, tuple((aliases or {}).items()))
    return [np.asarray(r) for r in program(*[jnp.asarray(a) for a in arguments])]


@cache
def _program(target: str, shapes, attributes, aliases):
    results = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)
    kernel = jax.ffi.ffi_call(f"test_{target}", results, input_output_aliases=dict(aliases))
    return jax.jit(lambda *arguments: kernel(*arguments, **dict(attributes)))


def attend(
    layout: StepLayout, packed: np.ndarray, q: np.ndarray, pool: np.ndarray | jax.Array, layer: int, scale: float,
    window: int | None = None, soft_cap: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """[T, N, H] of queries [T, N, H]."""
    T, N, H = q.shape
    (out,) = call(
        "twinjet_attend", [jax.ShapeDtypeStruct((T, N * H), np.float32)], [q.reshape(T, N * H), pool, packed],
        **step_attributes(layout), **pool_attributes(pool), layer=layer, num_heads=N, window=window or 0,
        scale=float(scale), soft_cap=float(soft_cap),
    )  # fmt: skip
    return out.reshape(T, N, H)
