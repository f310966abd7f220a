"""The CPU backend: the ops as calls of C++ kernels (kernels/cpu), four to a layer, each fused inside one op.

A row's results are the same bits whatever the other rows, their number, the chunking, the pages or the threads.
Products of integer weights take activations in 8 bits, a head of 8-bit weights in 16, with a scale for each 32.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from twinjet.core.config import kv_row_elements
from twinjet.core.rope import RopeConfig
from twinjet.core.types import MAX_LOGPROBS
from twinjet.ops.batch import StepLayout
from twinjet.ops.cpu_library import CpuLibrary
from twinjet.ops.cpu_pack import BlobStore, load_packed
from twinjet.ops.cpu_weights import CpuLayer, CpuParams
from twinjet.ops.ops import Block, StepClock
from twinjet.ops.params import PoolShape, RawModel, as_stored
from twinjet.ops.reference import rope_frequencies
from twinjet.ops.specs import AttendSpec, EmbedSpec, HeadSpec, MLPSpec, ProjectSpec, QKVSpec

KV_TOKENS = 16
"""Tokens of the pool's smallest unit (kernels/cpu/kv.h); pages hold a whole number of them."""


LOOK_S = 0.05
"""Between two looks at whether a step that has not ended has failed."""


@dataclass(frozen=True, eq=False)
class CpuBatch:
    """One step, as kernels take it: the packed array itself."""

    layout: StepLayout
    packed: Int[Array, " X"]
    last_token: Int[Array, " B"]
    rotations: dict[RopeConfig, Float[Array, "T 2 R"]] = field(default_factory=dict)
    """Cosines and sines of the rows, computed once for all layers that turn alike."""

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "T": np.int64(self.layout.num_rows),
            "B": np.int64(self.layout.num_slots),
            "MP": np.int64(self.layout.table_width),
        }


@dataclass(frozen=True, slots=True)
class CpuOps:
    """Layers are unrolled: their calls differ in static offsets into one array of weights."""

    library: CpuLibrary
    page_size: int
    store: BlobStore | None = None
    """Keeps packed weights between starts; None: they are packed at every one."""

    @property
    def name(self) -> str:
        return f"cpu kernels ({self.library.instructions})"

    def pack(self, raw: RawModel, on_progress: Callable[[str, int, int], None]) -> CpuParams:
        return load_packed(self.library, raw, self.store, on_progress)

    def finish(self, tag: int, result: Array) -> tuple[np.ndarray, StepClock]:
        """Told by the kernel that samples: XLA's own news may come after the next step (kernels/cpu/steps.h)."""
        failed = False
        while (ended := self.library.wait_step(tag, LOOK_S, result.size)) is None:
            if failed:
                raise RuntimeError(f"the step of tag {tag} ended without its last kernel")
            if result.is_ready():  # pyright: ignore[reportAttributeAccessIssue]  # jax declares it on its own class alone
                result.block_until_ready()  # raises what a kernel did
                failed = True
        table, clock = ended
        return table.reshape(-1, result.shape[1]), clock

    def create_cache(self, shape: PoolShape) -> Shaped[Array, "L P g K 2 16*W"]:
        units, row = shape.page_size // KV_TOKENS, kv_row_elements(shape.head_dim, shape.dtype)
        return jnp.zeros(
            (shape.num_layers, shape.num_pages, units, shape.num_kv_heads, 2, KV_TOKENS * row), shape.dtype
        )

    def gather(self, cache: Array, rows: Int[Array, " M"]) -> Shaped[Array, "L 2 M K W"]:
        L, _, _, K, _, unit = cache.shape
        result = jax.ShapeDtypeStruct((L, 2, rows.shape[0], K, unit // KV_TOKENS), cache.dtype)
        return _call("twinjet_gather_kv", result, cache, rows, **self._pool_sizes(cache))

    def scatter(self, cache: Array, rows: Int[Array, " M"], kv: Shaped[Array, "L 2 M K W"]) -> Array:
        if cache.dtype != jnp.int8:
            kv = as_stored(kv, cache.dtype)
        result = jax.typeof(cache)
        return _call("twinjet_scatter_kv", result, cache, rows, kv, aliases={0: 0}, **self._pool_sizes(cache))

    def read_batch(self, layout: StepLayout, packed: Int[Array, " X"], last_token: Int[Array, " B"]) -> CpuBatch:
        return CpuBatch(layout, packed, last_token)

    def run_layers(self, block: Block, params: CpuParams, x: Float[Array, "T D"], cache: Array) -> tuple[Any, Any]:
        for index, parts in enumerate(params.places.layers):
            x, cache = block(CpuLayer(index, params.blob, dict(parts)), x, cache)
        return x, cache

    def embed(self, params: CpuParams, batch: CpuBatch, spec: EmbedSpec) -> Float[Array, "T D"]:
        place = params.places.embedding
        return _call(
            "twinjet_embed",
            _floats(batch.layout.num_rows, place.num_inputs),
            params.blob,
            batch.packed,
            batch.last_token,
            weights=place.numbers,
            scale=np.float32(spec.scale),
            **batch.sizes,
        )

    def qkv(
        self, layer: CpuLayer, x: Float[Array, "T D"], cache: Array, batch: CpuBatch, spec: QKVSpec
    ) -> tuple[Float[Array, "T N H"], Array]:
        rope = spec.rope[layer.index]
        return _call(
            "twinjet_qkv",
            (_floats(x.shape[0], spec.num_heads, spec.head_dim), jax.typeof(cache)),
            x,
            layer.blob,
            cache,
            batch.packed,
            self._rotations(batch, rope),
            aliases={2: 1},
            layer=np.int64(layer.index),
            num_heads=np.int64(spec.num_heads),
            weights=layer.matrix("qkv"),
            norm=layer.vector("attn_norm"),
            q_norm=layer.vector("q_norm" if spec.qk_norm else None),
            k_norm=layer.vector("k_norm" if spec.qk_norm else None),
            adjacent=rope.pairing == "adjacent",
            eps=np.float32(spec.norm_eps),
            **self._pool_sizes(cache),
            **batch.sizes,
        )

    def attend(
        self, layer: CpuLayer, q: Float[Array, "T N H"], cache: Array, batch: CpuBatch, spec: AttendSpec
    ) -> Float[Array, "T N*H"]:
        return _call(
            "twinjet_attend",
            _floats(q.shape[0], spec.num_heads * spec.head_dim),
            q,
            cache,
            batch.packed,
            layer=np.int64(layer.index),
            num_heads=np.int64(spec.num_heads),
            window=np.int64(spec.window[layer.index] or 0),
            scale=np.float32(spec.scale),
            soft_cap=np.float32(0.0),
            **self._pool_sizes(cache),
            **batch.sizes,
        )

    def project_add(
        self,
        layer: CpuLayer,
        attended: Float[Array, "T N*H"],
        x: Float[Array, "T D"],
        batch: CpuBatch,
        spec: ProjectSpec,
    ) -> Float[Array, "T D"]:
        return _call(
            "twinjet_project",
            _floats(*x.shape),
            attended,
            x,
            layer.blob,
            batch.packed,
            weights=layer.matrix("out"),
            post_norm=layer.vector("out_post_norm" if spec.post_norm else None),
            eps=np.float32(spec.norm_eps),
            **batch.sizes,
        )

    def mlp_add(self, layer: CpuLayer, x: Float[Array, "T D"], batch: CpuBatch, spec: MLPSpec) -> Float[Array, "T D"]:
        return _call(
            "twinjet_mlp",
            _floats(*x.shape),
            x,
            layer.blob,
            batch.packed,
            gate_up=layer.matrix("gate_up"),
            down=layer.matrix("down"),
            norm=layer.vector("mlp_norm"),
            post_norm=layer.vector("mlp_post_norm" if spec.post_norm else None),
            gelu=spec.activation == "gelu_tanh",
            eps=np.float32(spec.norm_eps),
            **batch.sizes,
        )

    def head(self, params: CpuParams, x: Float[Array, "T D"], batch: CpuBatch, spec: HeadSpec) -> Float[Array, "S V"]:
        place = params.places.head
        return _call(
            "twinjet_head",
            _floats(batch.layout.max_samples, place.num_columns),
            x,
            params.blob,
            batch.packed,
            weights=place.numbers,
            norm=np.int64(params.places.final_norm),
            eps=np.float32(spec.norm_eps),
            **batch.sizes,
        )

    def sample(
        self, logits: Float[Array, "S V"], batch: CpuBatch, last_token: Int[Array, " B"]
    ) -> tuple[Int[Array, "S 2+2n"], Int[Array, " B"]]:
        S, V = logits.shape
        result = jax.ShapeDtypeStruct((S, 2 + 2 * min(MAX_LOGPROBS, V)), jnp.int32)
        return _call(
            "twinjet_sample",
            (result, jax.typeof(last_token)),
            logits,
            batch.packed,
            last_token,
            aliases={2: 1},
            **batch.sizes,
        )

    def _rotations(self, batch: CpuBatch, rope: RopeConfig) -> Float[Array, "T 2 R"]:
        if rope not in batch.rotations:
            batch.rotations[rope] = _call(
                "twinjet_rope",
                _floats(batch.layout.num_rows, 2, rope.dims),
                batch.packed,
                frequencies=rope_frequencies(rope),
                adjacent=rope.pairing == "adjacent",
                **batch.sizes,
            )
        return batch.rotations[rope]

    def _pool_sizes(self, cache: Array) -> dict[str, Any]:
        _, pages, units, heads, _, unit = cache.shape
        scale = kv_row_elements(0, cache.dtype.name)
        return {
            "num_pages": np.int64(pages),
            "page_size": np.int64(units * KV_TOKENS),
            "num_kv_heads": np.int64(heads),
            "head_dim": np.int64(unit // KV_TOKENS - scale),
        }


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _call(target: str, results: Any, *arrays: Array, aliases: dict[int, int] | None = None, **attributes: Any) -> Any:
    """One kernel. `aliases`: argument -> the result that takes its place."""
    return jax.ffi.ffi_call(target, results, input_output_aliases=aliases)(*arrays, **attributes)
