"""Tensors of a checkpoint: which ones an architecture needs, whether the file holds them whole, and their values.

Names are GGUF's, shapes numpy's. Knows nothing of devices: dequantising is for the engine, one tensor at a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape

from twinjet.checkpoints.reader import TensorPlace
from twinjet.core.errors import CheckpointError
from twinjet.models.config import ModelConfig

SUPPORTED_QUANTS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

_FLOATS: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16}
_DEQUANTIZE_ROW_BYTES = 16_384
_HARMLESS = ("rope_freqs.weight", "attn_rot_embd.weight")
"""Known to be safely left unread: the first is in the model's configuration, the second a relic that nobody reads."""


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """One tensor as the file has it."""

    name: str
    shape: tuple[int, ...]
    """Of the values, in numpy order: [out, in]."""
    quant: str
    data: np.ndarray
    """Memory-mapped and read-only: float32 or float16 of `shape`, else uint8 [..., bytes of a row]."""

    def dequantize(self) -> np.ndarray:
        """The values, float32 of `shape`, read-only where the file holds float32."""
        data = self.data
        if data.dtype == np.uint8 and data.ndim > 1:
            # The package works on 16 rows at a time. Blocks lie one after the other across rows, so joining rows into
            # longer ones changes nothing but the size of a step: twice as fast on a large embedding.
            joined = 1
            while joined * data.shape[-1] < _DEQUANTIZE_ROW_BYTES and data.shape[0] % (2 * joined) == 0:
                joined *= 2
            data = data.reshape(data.shape[0] // joined, -1)
        # A damaged scale may be infinite or NaN; whoever loads the weights checks that they are finite.
        with np.errstate(all="ignore"):
            return dequantize(data, GGMLQuantizationType[self.quant]).reshape(self.shape)


def required_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that the model computes with."""
    d_model, d_mlp, head_dim = config.d_model, config.d_mlp, config.head_dim
    d_query, d_kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    yield "token_embd.weight", (config.vocab_size, d_model)
    yield "output_norm.weight", (d_model,)
    if not config.tied_head:
        yield "output.weight", (config.vocab_size, d_model)
    for layer in range(config.num_layers):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", (d_model,)
        yield block + "attn_q.weight", (d_query, d_model)
        yield block + "attn_k.weight", (d_kv, d_model)
        yield block + "attn_v.weight", (d_kv, d_model)
        yield block + "attn_output.weight", (d_model, d_query)
        yield block + "ffn_norm.weight", (d_model,)
        yield block + "ffn_gate.weight", (d_mlp, d_model)
        yield block + "ffn_up.weight", (d_mlp, d_model)
        yield block + "ffn_down.weight", (d_model, d_mlp)
        if config.architecture == "gemma3":
            yield block + "attn_q_norm.weight", (head_dim,)
            yield block + "attn_k_norm.weight", (head_dim,)
            yield block + "post_attention_norm.weight", (d_model,)
            yield block + "post_ffw_norm.weight", (d_model,)


def check_tensors(config: ModelConfig, path: Path, places: Mapping[str, TensorPlace]) -> dict[str, QuantTensor]:
    """All tensors that the model needs, and no others.

    Raises `CheckpointError` naming the first that is missing, of the wrong shape, of an unsupported type or cut off,
    and for any tensor that the architecture would leave out of its computation.
    """
    tensors: dict[str, QuantTensor] = {}
    for name, shape in required_tensors(config):
        place = places.get(name)
        if place is None:
            raise CheckpointError(f"{path} lacks {name}, which a {config.architecture} model needs")
        tensors[name] = view_tensor(place, shape)
    for name, place in places.items():
        if name not in tensors and not name.endswith(_HARMLESS):
            raise CheckpointError(
                f"{place.path} holds {name} (type {place.quant}), which this {config.architecture} model would leave "
                f"unused; models with such tensors are not supported"
            )
    return tensors


def view_tensor(place: TensorPlace, shape: tuple[int, ...]) -> QuantTensor:
    """The mapped bytes of one tensor, checked against the shape that it must have."""
    name, quant = place.name, place.quant
    if quant not in SUPPORTED_QUANTS or place.size_bytes is None:
        supported = ", ".join(SUPPORTED_QUANTS)
        raise CheckpointError(
            f"{name} of {place.path} is of type {quant}, which is not supported; supported: {supported}"
        )
    if place.shape != shape:
        raise CheckpointError(
            f"{name} of {place.path} has the shape {list(place.shape)}, expected {list(shape)} (type {quant})"
        )
    stop = place.offset_bytes + place.size_bytes
    if stop > place.raw.size:
        raise CheckpointError(
            f"{name} (type {quant}) ends at byte {stop}, but {place.path} ends at byte {place.raw.size}: "
            f"it is truncated, fetch it again"
        )
    kind = GGMLQuantizationType[quant]
    raw = place.raw[place.offset_bytes : stop]
    if quant in _FLOATS:
        return QuantTensor(name, shape, quant, raw.view(_FLOATS[quant]).reshape(shape))
    return QuantTensor(name, shape, quant, raw.reshape(quant_shape_to_byte_shape(shape, kind)))
