"""A model's logits for chosen rows of a chunk of text, on either backend, as one step computes them."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels.step_calls import pack
from tests.ops.ragged import Rows, batch_of, table_width
from twinjet.checkpoints.gguf import read_checkpoint
from twinjet.core.config import CacheConfig
from twinjet.engine.kv_cache import pool_shape
from twinjet.models.registry import forward_of, load_params
from twinjet.ops.batch import StepLayout
from twinjet.ops.cpu import CpuOps
from twinjet.ops.cpu_library import load_library
from twinjet.ops.reference import ReferenceOps

CONTEXT = 512
"""Tokens of a chunk."""
PAGE_SIZE = 16


class ChunkLogits:
    """A model, loaded once. A chunk is a prompt in an empty pool; where a model wants BOS, it is the first token."""

    def __init__(self, path: Path, exact: bool, threads: int) -> None:
        checkpoint = read_checkpoint(path)
        config, vocab = checkpoint.config, checkpoint.vocab
        self._bos_id = vocab.bos_id if vocab.add_bos else None
        if exact:
            ops = ReferenceOps(PAGE_SIZE)
        else:
            library = load_library()
            library.set_threads(threads)
            ops = CpuOps(library, PAGE_SIZE)
        self._params = load_params(ops, config, checkpoint.tensors, lambda stage, done, total: None)
        layout = StepLayout(CONTEXT, CONTEXT // 2, table_width(CONTEXT, PAGE_SIZE))
        num_pages = CONTEXT // PAGE_SIZE
        table = np.zeros((layout.num_slots, layout.table_width), np.int32)
        table[0, :num_pages] = np.arange(num_pages)
        self._layout, self._batch = layout, batch_of(layout, [Rows(0, 0, CONTEXT)], table)
        cache = CacheConfig(PAGE_SIZE, num_pages, "float32" if exact else "float16")
        self._new_cache = lambda: ops.create_cache(pool_shape(config, cache))

        def forward(params, cache, packed):
            batch = ops.read_batch(layout, packed, jnp.zeros(layout.num_slots, jnp.int32))
            return forward_of(config)(ops, config, params, cache, batch)

        self._forward = jax.jit(forward, donate_argnums=1)

    def __call__(self, token_ids: np.ndarray, rows: slice) -> np.ndarray:
        """[rows, V] float32 of a chunk [CONTEXT]; at most half of its rows."""
        tokens = self.starting_with_bos(token_ids)
        chosen = np.arange(CONTEXT, dtype=np.int32)[rows]
        padded = np.zeros(self._layout.max_samples, np.int32)
        padded[: len(chosen)] = chosen
        samples = dataclasses.replace(self._batch.samples, count=jnp.asarray(len(chosen)), row=jnp.asarray(padded))
        batch = dataclasses.replace(self._batch, token_ids=jnp.asarray(tokens), samples=samples)
        logits, _ = self._forward(self._params, self._new_cache(), pack(self._layout, batch))
        return np.asarray(logits)[: len(chosen)]

    def starting_with_bos(self, token_ids: np.ndarray) -> np.ndarray:
        """[CONTEXT] int32: the chunk as it is computed."""
        tokens = token_ids.astype(np.int32)
        if self._bos_id is not None:
            tokens[0] = self._bos_id
        return tokens
