"""Which architecture is computed by which file, and which checkpoint tensors it takes."""

from collections.abc import Callable, Mapping
from typing import Any

from twinjet.core.errors import CheckpointError
from twinjet.models import gemma3, llama
from twinjet.models.config import ModelConfig
from twinjet.ops.ops import Ops
from twinjet.ops.params import RawModel, WeightTensor

Forward = Callable[..., tuple[Any, Any]]

_FORWARD: dict[str, Forward] = {"llama": llama.forward, "gemma3": gemma3.forward}

_LAYER_PARTS = {
    "attn_norm": ("attn_norm",),
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "out": ("attn_output",),
    "mlp_norm": ("ffn_norm",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
"""Part of a layer, as ops name it -> GGUF names under `blk.N.`, stacked along the output axis."""

_GEMMA3_PARTS = {
    "q_norm": ("attn_q_norm",),
    "k_norm": ("attn_k_norm",),
    "out_post_norm": ("post_attention_norm",),
    "mlp_post_norm": ("post_ffw_norm",),
}

_PARTS = {"llama": _LAYER_PARTS, "gemma3": _LAYER_PARTS | _GEMMA3_PARTS}


def forward_of(config: ModelConfig) -> Forward:
    """`forward(ops, config, params, cache, batch) -> (logits, cache)` of the model's family."""
    return _FORWARD[config.architecture]


def load_params(
    ops: Ops,
    config: ModelConfig,
    tensors: Mapping[str, WeightTensor],
    on_progress: Callable[[str, int, int], None],
) -> Any:
    """Weights in the backend's form. `on_progress(stage, done, total)` is `Ops.pack`'s.

    Raises: CheckpointError, naming a tensor that is missing.
    """

    def tensor(name: str) -> WeightTensor:
        if name not in tensors:
            raise CheckpointError(f"the model file has no tensor {name}, which {config.architecture} needs")
        return tensors[name]

    parts = _PARTS[config.architecture].items()
    layers = [
        {part: [tensor(f"blk.{index}.{name}.weight") for name in names] for part, names in parts}
        for index in range(config.num_layers)
    ]
    head = None if config.tied_head else tensor("output.weight")
    return ops.pack(RawModel(tensor("token_embd.weight"), layers, tensor("output_norm.weight"), head), on_progress)
