"""The ops in plain jnp, in float32: the oracle of every backend, and what `--exact` runs.

Right and bounded in memory first. No array here grows with rows times context: attention walks the KV
in pieces with a running softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from twinjet.core.rope import RopeConfig
from twinjet.ops.attention import NO_WINDOW, Pool, attend_singles, attend_tiles
from twinjet.ops.batch import Batch, StepLayout
from twinjet.ops.ops import Block
from twinjet.ops.params import KVCache, Layer, Params, PoolShape, RawLayer, RawModel, WeightTensor, as_stored
from twinjet.ops.sampling import sample
from twinjet.ops.specs import AttendSpec, EmbedSpec, HeadSpec, MLPSpec, ProjectSpec, QKVSpec

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


@dataclass(frozen=True, slots=True)
class ReferenceOps:
    """Plain arrays. Layers are scanned: unrolled, thirty layers compile for half a minute a bucket."""

    page_size: int

    @property
    def name(self) -> str:
        return f"reference ({jax.default_backend()})"

    def pack(self, raw: RawModel, on_progress: Callable[[str, int, int], None]) -> Params:
        total = len(raw.layers) + 2

        def told(layers: Sequence[RawLayer]) -> Iterable[RawLayer]:
            for index, layer in enumerate(layers):
                yield layer
                on_progress("load", index + 2, total)

        embedding = self.pack_matrix(raw.embedding)
        on_progress("load", 1, total)
        layers = self.pack_layers(told(raw.layers), len(raw.layers))
        head = None if raw.head is None else self.pack_matrix(raw.head)
        on_progress("load", total, total)
        return Params(embedding, layers, self.pack_matrix(raw.final_norm), head)

    def finish(self, tag: int, result: Array) -> tuple[np.ndarray, None]:
        """XLA's own programs read no clock."""
        return np.asarray(result), None

    def create_cache(self, shape: PoolShape) -> KVCache:
        rows = (shape.num_layers, shape.num_pages * shape.page_size, shape.num_kv_heads, shape.head_dim)
        return KVCache(jnp.zeros(rows, shape.dtype), jnp.zeros(rows, shape.dtype))

    def gather(self, cache: KVCache, rows: Int[Array, " M"]) -> Float[Array, "L 2 M K H"]:
        take = partial(jnp.take, indices=rows, axis=1, mode="clip")
        return jnp.stack([take(cache.keys), take(cache.values)], axis=1)

    def scatter(self, cache: KVCache, rows: Int[Array, " M"], kv: Float[Array, "L 2 M K H"]) -> KVCache:
        return KVCache(
            cache.keys.at[:, rows].set(as_stored(kv[:, 0], cache.keys.dtype), mode="drop"),
            cache.values.at[:, rows].set(as_stored(kv[:, 1], cache.values.dtype), mode="drop"),
        )

    def read_batch(self, layout: StepLayout, packed: Int[Array, " X"], last_token: Int[Array, " B"]) -> Batch:
        return layout.unpack(packed, last_token)

    def pack_layers(self, layers: Iterable[RawLayer], num_layers: int) -> dict[str, Array]:
        stacks: dict[str, np.ndarray] = {}
        for index, raw in enumerate(layers):
            for part, tensors in raw.items():
                matrix = np.concatenate([tensor.dequantize() for tensor in tensors], axis=0)
                stack = stacks.setdefault(part, np.empty((num_layers, *matrix.shape), np.float32))
                stack[index] = matrix
        # One part at a time, so that the copy on the device never doubles the whole model.
        return {part: jax.device_put(stacks.pop(part)) for part in list(stacks)}

    def pack_matrix(self, tensor: WeightTensor) -> Array:
        return jax.device_put(np.ascontiguousarray(tensor.dequantize(), np.float32))

    def run_layers(
        self, block: Block, params: Params, x: Float[Array, "T D"], cache: KVCache
    ) -> tuple[Float[Array, "T D"], KVCache]:
        def body(carry, layer):
            index, weights = layer
            return block(Layer(index, weights), *carry), None

        num_layers = cache.keys.shape[0]
        (x, cache), _ = lax.scan(body, (x, cache), (jnp.arange(num_layers), params.layers))
        return x, cache

    def embed(self, params: Params, batch: Batch, spec: EmbedSpec) -> Float[Array, "T D"]:
        with jax.named_scope("embed"):
            return params.embedding[batch.token_ids] * spec.scale

    def qkv(
        self, layer: Layer, x: Float[Array, "T D"], cache: KVCache, batch: Batch, spec: QKVSpec
    ) -> tuple[Float[Array, "T N H"], KVCache]:
        N, K, H = spec.num_heads, spec.num_kv_heads, spec.head_dim
        with jax.named_scope("qkv"):
            h = rms_norm(x, layer.weights["attn_norm"], spec.norm_eps)
            heads = matmul(h, layer.weights["qkv"]).reshape(-1, N + 2 * K, H)  # [T, N + 2K, H]
            q, k, v = heads[:, :N], heads[:, N : N + K], heads[:, N + K :]
            if spec.qk_norm:
                q = rms_norm(q, layer.weights["q_norm"], spec.norm_eps)
                k = rms_norm(k, layer.weights["k_norm"], spec.norm_eps)
            cos, sin = rope_angles(batch.position, spec.rope, layer.index)
            q, k = rotate(q, cos, sin, spec.rope[0]), rotate(k, cos, sin, spec.rope[0])
            rows = self._cache_rows(batch)
            return q, KVCache(
                cache.keys.at[layer.index, rows].set(as_stored(k, cache.keys.dtype), mode="drop"),
                cache.values.at[layer.index, rows].set(as_stored(v, cache.values.dtype), mode="drop"),
            )

    def attend(
        self, layer: Layer, q: Float[Array, "T N H"], cache: KVCache, batch: Batch, spec: AttendSpec
    ) -> Float[Array, "T N*H"]:
        with jax.named_scope("attend"):
            pool = Pool(cache, layer.index, batch.page_table, self.page_size)
            window = per_layer([window or NO_WINDOW for window in spec.window], layer.index)
            q = q * spec.scale
            out = attend_singles(attend_tiles(q, pool, window, batch), q, pool, window, batch)
            return out.reshape(q.shape[0], -1)

    def project_add(
        self,
        layer: Layer,
        attended: Float[Array, "T N*H"],
        x: Float[Array, "T D"],
        batch: Batch | None,
        spec: ProjectSpec,
    ) -> Float[Array, "T D"]:
        with jax.named_scope("project"):
            y = matmul(attended, layer.weights["out"])
            if spec.post_norm:
                y = rms_norm(y, layer.weights["out_post_norm"], spec.norm_eps)
            return x + y

    def mlp_add(self, layer: Layer, x: Float[Array, "T D"], batch: Batch | None, spec: MLPSpec) -> Float[Array, "T D"]:
        with jax.named_scope("mlp"):
            h = rms_norm(x, layer.weights["mlp_norm"], spec.norm_eps)
            gate, up = jnp.split(matmul(h, layer.weights["gate_up"]), 2, axis=1)  # each [T, F]
            y = matmul(ACTIVATIONS[spec.activation](gate) * up, layer.weights["down"])
            if spec.post_norm:
                y = rms_norm(y, layer.weights["mlp_post_norm"], spec.norm_eps)
            return x + y

    def head(self, params: Params, x: Float[Array, "T D"], batch: Batch, spec: HeadSpec) -> Float[Array, "S V"]:
        with jax.named_scope("head"):
            h = rms_norm(x[batch.samples.row], params.final_norm, spec.norm_eps)
            return matmul(h, params.embedding if params.head is None else params.head)

    def sample(
        self, logits: Float[Array, "S V"], batch: Batch, last_token: Int[Array, " B"]
    ) -> tuple[Int[Array, "S 2+2n"], Int[Array, " B"]]:
        with jax.named_scope("sample"):
            sampled, samples = sample(logits, batch.samples), batch.samples
            live = jnp.arange(logits.shape[0]) < samples.count
            slot = jnp.where(live, samples.slot, last_token.shape[0])
            bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
            ids = [sampled.token_ids[:, None], bits(sampled.logprobs)[:, None], sampled.top_ids]
            result = jnp.concatenate([*ids, bits(sampled.top_logprobs)], axis=1)
            return result, last_token.at[slot].set(sampled.token_ids, mode="drop")

    def _cache_rows(self, batch: Batch) -> Array:
        """Where each row's KV goes; out of range, so dropped, for padding rows."""
        B = batch.page_table.shape[0]
        position = jnp.maximum(batch.position, 0)
        page = batch.page_table[jnp.minimum(batch.slot, B - 1), position // self.page_size]
        row = page * self.page_size + position % self.page_size
        return jnp.where(batch.position < 0, jnp.iinfo(jnp.int32).max, row)


def matmul(x: Float[Array, "T I"], w: Float[Array, "O I"]) -> Float[Array, "T O"]:
    """Full float32 precision wherever it runs."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """x / rms(x) * weight (Zhang and Sennrich, 2019)."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope_frequencies(rope: RopeConfig) -> np.ndarray:
    """Radians per position of each pair: [dims / 2] float32 (Su et al., 2021)."""
    pair = np.arange(0, rope.dims, 2, dtype=np.float32) / np.float32(rope.dims)
    frequency = np.float32(rope.theta) ** -pair / np.float32(rope.scale)
    if rope.factors is not None:
        frequency = frequency / np.asarray(rope.factors, np.float32)
    return frequency.astype(np.float32)


def rope_angles(
    position: Array, rope: tuple[RopeConfig, ...], index: int | Array
) -> tuple[Float[Array, "T 1 R"], Float[Array, "T 1 R"]]:
    """Cosines and sines of every row's pairs in one layer."""
    frequency = per_layer([rope_frequencies(one) for one in rope], index)
    angle = position.astype(jnp.float32)[:, None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "T N H"], cos: Array, sin: Array, rope: RopeConfig) -> Float[Array, "T N H"]:
    turned, rest = x[..., : rope.dims], x[..., rope.dims :]
    if rope.pairing == "halves":
        a, b = jnp.split(turned, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
    return jnp.concatenate([turned, rest], axis=-1)


def per_layer(values: Sequence[np.ndarray | int], index: int | Array) -> Array:
    """One layer's entry of a table that is known when the step is traced."""
    table = np.stack([np.asarray(value) for value in values])
    return jnp.asarray(table[0]) if (table == table[0]).all() else jnp.asarray(table)[index]
