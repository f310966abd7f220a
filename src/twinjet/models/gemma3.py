"""Gemma 3, text: q/k norm, norms after attention and MLP, five windowed layers to each global one
("Gemma 3 Technical Report", 2025). Checkpoints in GGUF hold norm weights with the one already added."""

from jaxtyping import Array, Float

from twinjet.models.config import ModelConfig
from twinjet.ops.batch import Batch
from twinjet.ops.ops import Ops
from twinjet.ops.params import KVCache, Layer, Params
from twinjet.ops.specs import AttendSpec, EmbedSpec, HeadSpec, MLPSpec, ProjectSpec, QKVSpec


def forward(
    ops: Ops, config: ModelConfig, params: Params, cache: KVCache, batch: Batch
) -> tuple[Float[Array, "S V"], KVCache]:
    """Logits of the rows that sample; the cache is consumed and returned with all rows' KV in it."""
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    windowed = [config.is_windowed(layer) for layer in range(config.num_layers)]
    local = config.rope_local or config.rope
    rope = tuple(local if here else config.rope for here in windowed)
    qkv = QKVSpec(*heads, config.norm_eps, rope, qk_norm=True)
    window = tuple(config.sliding_window if here else None for here in windowed)
    attend = AttendSpec(*heads, config.attention_scale, window)
    project = ProjectSpec(config.norm_eps, post_norm=True)
    mlp = MLPSpec(config.activation, config.norm_eps, post_norm=True)

    def block(layer: Layer, x: Float[Array, "T D"], cache: KVCache) -> tuple[Float[Array, "T D"], KVCache]:
        q, cache = ops.qkv(layer, x, cache, batch, qkv)
        attended = ops.attend(layer, q, cache, batch, attend)
        x = ops.project_add(layer, attended, x, batch, project)
        return ops.mlp_add(layer, x, batch, mlp), cache

    x = ops.embed(params, batch, EmbedSpec(config.embedding_scale))
    x, cache = ops.run_layers(block, params, x, cache)
    return ops.head(params, x, batch, HeadSpec(config.norm_eps)), cache
