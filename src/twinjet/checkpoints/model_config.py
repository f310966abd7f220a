"""Turns the metadata of a GGUF file into a `ModelConfig`.

Owns the keys of each supported architecture, their defaults and which settings cannot be honoured. Facts and
defaults follow llama.cpp (src/llama-model.cpp, src/models/llama.cpp, src/models/gemma3.cpp). Whatever would change
the arithmetic and is not supported is refused by name, never ignored.
"""

import math
from collections.abc import Mapping

import numpy as np

from twinjet.checkpoints.metadata import Metadata
from twinjet.checkpoints.reader import GGUFFile, TensorPlace
from twinjet.checkpoints.tensors import view_tensor
from twinjet.core.errors import CheckpointError
from twinjet.models.config import ModelConfig, RopeConfig

SUPPORTED_ARCHITECTURES = ("gemma3", "llama")

_NEUTRAL_NUMBERS = {
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "expert_count": 0.0,
}
"""Settings of other architectures that some writers add, and the value at which they do nothing."""
_GEMMA3_27B_LAYERS = 62
_GEMMA3_WINDOW_PERIOD = 6
_GEMMA3_LOCAL_THETA = 10_000.0
_DEFAULT_THETA = 10_000.0


def read_model_config(file: GGUFFile) -> ModelConfig:
    """The shape and arithmetic of the model. Raises `CheckpointError`."""
    architecture = file.metadata.text("general.architecture")
    if architecture == "llama":
        return _read_llama(file)
    if architecture == "gemma3":
        return _read_gemma3(file)
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    raise CheckpointError(
        f"{file.path} is of architecture {architecture!r}, which is not supported; supported: {supported}"
    )


class _Common:
    """What both architectures read alike."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file, self.metadata, self.prefix = file, file.metadata, prefix
        self._refuse_unsupported()
        self.num_layers = self.integer("block_count")
        self.d_model = self.integer("embedding_length")
        self.d_mlp = self.integer("feed_forward_length")
        self.num_heads = self.integer("attention.head_count")
        self.num_kv_heads = self.integer("attention.head_count_kv", self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{file.path}: {self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads"
            )
        self.head_dim = self.integer("attention.key_length", self.d_model // self.num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.integer(key, self.head_dim) != self.head_dim or self.head_dim % 2:
                raise CheckpointError(
                    f"{file.path}: {prefix}.{key} is {self.integer(key, self.head_dim)} with heads of "
                    f"{self.head_dim}; only equal, even sizes are supported"
                )
        self.norm_eps = self.metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon")
        self.rope_scale = self._read_rope_scale()

    def integer(self, key: str, default: int | None = None) -> int:
        return self.metadata.integer(f"{self.prefix}.{key}", default)

    def theta(self, key: str, default: float) -> float:
        theta = self.metadata.number(f"{self.prefix}.{key}", default)
        if theta <= 0.0:
            raise CheckpointError(f"{self.file.path}: {self.prefix}.{key} is {theta}, expected a positive number")
        return theta

    def vocab_size(self) -> int:
        tokens = "tokenizer.ggml.tokens"
        if tokens in self.metadata:
            return self.metadata.length(tokens)
        return self.integer("vocab_size")

    def name(self) -> str:
        return self.metadata.text("general.name", self.file.path.stem)

    def _refuse_unsupported(self) -> None:
        for key, neutral in _NEUTRAL_NUMBERS.items():
            value = self.metadata.number(f"{self.prefix}.{key}", neutral)
            if value not in (neutral, 0.0):
                raise CheckpointError(
                    f"{self.file.path}: {self.prefix}.{key} is {value:g}, which is not supported (only {neutral:g} is)"
                )
        if not self.metadata.flag(f"{self.prefix}.attention.causal", True):
            raise CheckpointError(f"{self.file.path} is not a causal model; only models that generate are supported")

    def _read_rope_scale(self) -> float:
        """Linear position scaling; the type defaults to linear, and a factor of zero means none."""
        kind = self.metadata.text(f"{self.prefix}.rope.scaling.type", "linear")
        if kind == "none":
            return 1.0
        if kind != "linear":
            raise CheckpointError(
                f"{self.file.path}: {self.prefix}.rope.scaling.type is {kind!r}, which is not supported; "
                f"supported: none, linear, and factors in rope_freqs.weight"
            )
        old = self.metadata.number(f"{self.prefix}.rope.scale_linear", 0.0)
        scale = self.metadata.number(f"{self.prefix}.rope.scaling.factor", old)
        if scale < 0.0:
            raise CheckpointError(
                f"{self.file.path}: {self.prefix}.rope.scaling.factor is {scale}, expected no less than 0"
            )
        return scale or 1.0


def _read_llama(file: GGUFFile) -> ModelConfig:
    common = _Common(file, "llama")
    return ModelConfig(
        architecture="llama",
        name=common.name(),
        num_layers=common.num_layers,
        d_model=common.d_model,
        num_heads=common.num_heads,
        num_kv_heads=common.num_kv_heads,
        head_dim=common.head_dim,
        d_mlp=common.d_mlp,
        vocab_size=common.vocab_size(),
        context_length=common.integer("context_length"),
        norm_eps=common.norm_eps,
        rope=RopeConfig(
            theta=common.theta("rope.freq_base", _DEFAULT_THETA),
            dims=common.head_dim,
            pairing="adjacent",
            scale=common.rope_scale,
            factors=_read_rope_factors(file.tensors, common.head_dim),
        ),
        activation="silu",
        tied_head="output.weight" not in file.tensors,
    )


def _read_rope_factors(places: Mapping[str, TensorPlace], head_dim: int) -> tuple[float, ...] | None:
    place = places.get("rope_freqs.weight")
    if place is None:
        return None
    factors = view_tensor(place, (head_dim // 2,)).dequantize()
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(f"rope_freqs.weight of {place.path} must be positive and finite")
    return tuple(factors.tolist())


def _read_gemma3(file: GGUFFile) -> ModelConfig:
    common = _Common(file, "gemma3")
    if "rope_freqs.weight" in file.tensors:
        raise CheckpointError(f"{file.path} holds rope_freqs.weight, which is not supported in a gemma3 model")
    rope = RopeConfig(
        theta=common.theta("rope.freq_base", _DEFAULT_THETA),
        dims=common.head_dim,
        pairing="halves",
        scale=common.rope_scale,
    )
    sliding_window = file.metadata.integer("gemma3.attention.sliding_window", 0, minimum=0) or None
    rope_local = None
    window_period = 0
    if sliding_window is not None:
        window_period = _read_window_period(file.metadata, file, common.num_layers)
        # Windowed layers keep their own base and are never scaled.
        rope_local = RopeConfig(
            theta=common.theta("rope.freq_base_swa", _GEMMA3_LOCAL_THETA), dims=common.head_dim, pairing="halves"
        )
    # The 27B model alone scales by the width per head instead of the head's own size.
    is_27b = common.num_layers == _GEMMA3_27B_LAYERS
    query_width = common.d_model // common.num_heads if is_27b else common.head_dim
    return ModelConfig(
        architecture="gemma3",
        name=common.name(),
        num_layers=common.num_layers,
        d_model=common.d_model,
        num_heads=common.num_heads,
        num_kv_heads=common.num_kv_heads,
        head_dim=common.head_dim,
        d_mlp=common.d_mlp,
        vocab_size=common.vocab_size(),
        context_length=common.integer("context_length"),
        norm_eps=common.norm_eps,
        rope=rope,
        activation="gelu_tanh",
        tied_head="output.weight" not in file.tensors,
        rope_local=rope_local,
        sliding_window=sliding_window,
        window_period=window_period,
        embedding_scale=math.sqrt(common.d_model),
        query_scale=max(query_width, 1) ** -0.5,
    )


def _read_window_period(metadata: Metadata, file: GGUFFile, num_layers: int) -> int:
    """Distance between layers that see everything; the file may give it, or mark each layer as windowed or not."""
    key = "gemma3.attention.sliding_window_pattern"
    if not metadata.is_array(key):
        return metadata.integer(key, _GEMMA3_WINDOW_PERIOD)
    windowed = metadata.numbers(key).astype(bool).tolist()
    if len(windowed) == num_layers:
        for period in range(1, num_layers + 2):
            if windowed == [(layer + 1) % period != 0 for layer in range(num_layers)]:
                return period
    raise CheckpointError(
        f"{file.path}: {key} is not one full layer after every so many windowed ones, which is required"
    )
