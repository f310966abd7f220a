"""A model's logits for every row of a whole prompt, through the ops, in one step."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tests.ops.ragged import Rows, batch_of, table_width
from twinjet.checkpoints.gguf import read_checkpoint
from twinjet.core.config import CacheConfig
from twinjet.engine.kv_cache import pool_shape
from twinjet.models.config import ModelConfig
from twinjet.models.registry import forward_of, load_params
from twinjet.ops.batch import Batch, StepLayout
from twinjet.ops.params import KVCache, Params
from twinjet.ops.reference import ReferenceOps

PAGE_SIZE = 16


def whole_prompt_logits(path: Path, token_ids: list[int]) -> np.ndarray:
    """[T, V] float32."""
    checkpoint = read_checkpoint(str(path))
    config, T = checkpoint.config, len(token_ids)
    params = load_params(ReferenceOps(PAGE_SIZE), config, checkpoint.tensors, lambda stage, done, total: None)
    layout = StepLayout(T, T, table_width(T, PAGE_SIZE))  # as many slots as rows, so that every row may sample
    num_pages = layout.table_width + 1
    page_table = np.zeros((T, layout.table_width), np.int32)
    page_table[1] = np.arange(num_pages - 1, 0, -1)
    batch = batch_of(layout, [Rows(1, 0, T)], page_table)
    samples = dataclasses.replace(batch.samples, row=jnp.asarray(np.arange(T, dtype=np.int32)))
    batch = dataclasses.replace(batch, token_ids=jnp.asarray(np.array(token_ids, np.int32)), samples=samples)
    cache = ReferenceOps(PAGE_SIZE).create_cache(pool_shape(config, CacheConfig(PAGE_SIZE, num_pages, "float32")))
    return np.asarray(_forward(config, params, cache, batch))


@partial(jax.jit, static_argnums=0)
def _forward(config: ModelConfig, params: Params, cache: KVCache, batch: Batch) -> jax.Array:
    logits, _ = forward_of(config)(ReferenceOps(PAGE_SIZE), config, params, cache, batch)
    return logits
