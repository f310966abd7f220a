"""Weights and KV state as pytrees, for backends that keep plain arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class WeightTensor(Protocol):
    """A tensor of a checkpoint, still quantised."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def quant(self) -> str:
        """Its GGUF type, as "Q4_1" or "F32"."""
        ...

    @property
    def data(self) -> np.ndarray:
        """As the file has it."""
        ...

    def dequantize(self) -> np.ndarray:
        """float32 array of `shape`."""
        ...


RawLayer = Mapping[str, Sequence[WeightTensor]]
"""Part -> tensors to be stacked along the output axis.

Parts: attn_norm, qkv, q_norm, k_norm, out, out_post_norm, mlp_norm, gate_up, down, mlp_post_norm.
"""


@dataclass(frozen=True, slots=True)
class RawModel:
    """All weights of a checkpoint."""

    embedding: WeightTensor
    layers: Sequence[RawLayer]
    final_norm: WeightTensor
    head: WeightTensor | None
    """None: tied, the embedding is the head."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Size and type of a KV pool."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Params:
    """All weights of a model. Matrices are [out, in], as checkpoints store them."""

    embedding: Float[Array, "V D"]
    layers: dict[str, Array]
    """Part -> all layers' weights, stacked: [L, ...]."""
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | None
    """None: tied, the embedding is the head."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class KVCache:
    """The paged pool: token i of page p at row p * G + i. Keys after RoPE.

    Never holds anything but finite numbers, also where nothing was written yet: what a mask hides is
    still multiplied by zero.
    """

    keys: Float[Array, "L P*G K H"]
    values: Float[Array, "L P*G K H"]


def as_stored(kv: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Keys or values as a pool of `dtype` keeps them: what is too large for the type becomes its largest number."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(kv, -largest, largest).astype(dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, and which layer it is."""

    index: int | Int[Array, ""]
    """Traced where layers are scanned."""
    weights: dict[str, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Sampled:
    """What `sample` chose, one entry for each entry of the batch's samples."""

    token_ids: Int[Array, " S"]
    logprobs: Float[Array, " S"]
    """Zero unless log-probabilities were asked for; likewise below."""
    top_ids: Int[Array, "S n"]
    top_logprobs: Float[Array, "S n"]
