"""The engine: device state, step programs, and the one verb that runs a plan. Knows no queues and no requests."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from twinjet.checkpoints.gguf import read_checkpoint
from twinjet.checkpoints.packed import PackedWeights
from twinjet.core.config import EngineConfig, kv_row_elements
from twinjet.core.errors import CheckpointError, ConfigError
from twinjet.core.plan import Plan
from twinjet.engine.backend import choose_ops, warn
from twinjet.engine.buckets import bucket_for, choose_buckets
from twinjet.engine.compiles import CompileCounter
from twinjet.engine.kv_cache import (
    MOVE_TOKENS,
    NOWHERE,
    export_range,
    gather_pages,
    import_range,
    pool_shape,
    scatter_pages,
)
from twinjet.engine.packing import StepPacker
from twinjet.engine.step import EngineStep
from twinjet.models.config import ModelConfig
from twinjet.models.registry import forward_of, load_params
from twinjet.ops.attention import PIECE_TOKENS
from twinjet.ops.batch import StepLayout
from twinjet.ops.ops import Ops


def load_engine(config: EngineConfig, on_progress: Callable[[str, int, int], None]) -> "Engine":
    """An engine with the model's weights on the device, not yet warm.

    Raises: CheckpointError.
    """
    if config.cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", config.cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    checkpoint = read_checkpoint(config.model_path)
    store = None
    if config.packed_dir is not None:
        store = PackedWeights(Path(config.packed_dir), checkpoint.paths, warn)
    ops = choose_ops(config, checkpoint.config, store)
    params = load_params(ops, checkpoint.config, checkpoint.tensors, on_progress)
    return Engine(config, checkpoint.config, ops, params)


class Engine:
    """One model on one device (or mesh). Methods are called from one thread at a time."""

    def __init__(self, config: EngineConfig, model: ModelConfig, ops: Ops, params: Any) -> None:
        limits, cache = config.scheduler, config.cache
        if limits.context > model.context_length:
            raise CheckpointError(
                f"the model was trained for a context of {model.context_length} tokens, got --context {limits.context}"
            )
        if cache.page_size > PIECE_TOKENS:
            raise ConfigError(f"a KV page must hold {PIECE_TOKENS} tokens at most, got {cache.page_size}")
        self._ops = ops
        self._params = params
        self._page_size = cache.page_size
        self._kv_dtype = cache.dtype
        self._cache = ops.create_cache(pool_shape(model, cache))
        self._last_token = jnp.zeros(limits.max_streams, jnp.int32)
        self._buckets = choose_buckets(limits.token_budget)
        pages_per_piece = PIECE_TOKENS // cache.page_size
        pages = -(-limits.context // cache.page_size)
        table_width = -(-pages // pages_per_piece) * pages_per_piece
        self._layouts = {rows: StepLayout(rows, limits.max_streams, table_width) for rows in self._buckets}
        self._packer = StepPacker(limits.max_streams, table_width, self._layouts)
        self._programs: dict[int, Compiled] = {}
        self._threads = config.threads
        self._model = model
        self._compiles = CompileCounter()

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def backend(self) -> str:
        return self._ops.name

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        row = kv_row_elements(self._model.head_dim, self._kv_dtype)
        return self._model.num_layers, self._model.num_kv_heads, row

    @property
    def compiles_total(self) -> int:
        return self._compiles.count

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Compile every program, side by side, and run each once on padding alone, which changes nothing."""
        total = len(self._buckets) + 1
        on_progress(0, total)
        with ThreadPoolExecutor(self._threads, "compile") as pool:
            # XLA compiles one program on one core.
            compiling = {rows: pool.submit(self._compile, rows) for rows in self._buckets}
            for done, rows in enumerate(self._buckets):
                self._programs[rows] = compiling[rows].result()
                self._run(self._packer.pack(Plan(step_id=-1), rows, _new_tag()), rows).block_until_ready()
                on_progress(done + 1, total)
        nowhere = np.full(MOVE_TOKENS, NOWHERE, np.int32)
        kv = np.asarray(gather_pages(self._ops, self._cache, nowhere))
        self._cache = scatter_pages(self._ops, self._cache, nowhere, kv)
        jax.block_until_ready(self._cache)
        on_progress(total, total)
        self._compiles.reset()

    def dispatch(self, plan: Plan) -> EngineStep:
        """Queue a plan on the device. One that raises leaves the engine unusable: its state may have been donated."""
        self._packer.grant(plan.grants)
        dispatched_s = time.monotonic()
        for move in plan.imports:
            self._cache = import_range(self._ops, self._cache, move.page_ids, move.start, move.kv, self._page_size)
        samples, padding, tag = None, 0, _new_tag()
        if num_rows := plan.num_rows:
            bucket = bucket_for(num_rows, self._buckets)
            padding = bucket - num_rows
            samples = self._run(self._packer.pack(plan, bucket, tag), bucket)
        gathered = [
            export_range(self._ops, self._cache, move.page_ids, move.start, move.stop, self._page_size)
            for move in plan.exports
        ]
        return EngineStep(plan, padding, samples, gathered, partial(self._ops.finish, tag), dispatched_s)

    def _compile(self, rows: int) -> Compiled:
        layout = self._layouts[rows]
        step = jax.jit(partial(run_step, self._ops, self._model, layout), donate_argnums=(1, 2))
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        return step.lower(*jax.tree.map(jax.typeof, (self._params, self._cache, self._last_token)), packed).compile()

    def _run(self, packed: np.ndarray, bucket: int) -> jax.Array:
        """[S, 2 + 2 n] int32 of the bucket's samples."""
        self._cache, self._last_token, samples, _ = self._programs[bucket](
            self._params, self._cache, self._last_token, packed
        )
        return samples


_tags = count()


def _new_tag() -> int:
    """No other step of this process has it, whatever its engine, for weeks."""
    return next(_tags) & 0x7FFFFFFF


def run_step(
    ops: Ops,
    model: ModelConfig,
    layout: StepLayout,
    params: Any,
    cache: Any,
    last_token: jax.Array,
    packed: jax.Array,
) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """One forward pass over all rows and the choice of tokens.

    Cache and last tokens [B] are consumed. The result packs, for each sample, the token, its
    log-probability and the most likely ids and theirs: [S, 2 + 2 n] int32, floats as their bits.

    The last result nobody reads. XLA's CPU client runs a program on its caller's thread if it has few arithmetic
    operations (under a thousand, HLO cost analysis), and custom calls count as none; with this sum it queues the
    program, and the caller goes on.
    """
    batch = ops.read_batch(layout, packed, last_token)
    logits, cache = forward_of(model)(ops, model, params, cache, batch)
    result, last_token = ops.sample(logits, batch, last_token)
    return cache, last_token, result, packed.astype(jnp.float32).sum()
