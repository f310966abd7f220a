"""What each op does in a given model: frozen, hashable, known when a step program is traced.

`weights` name entries of a layer's parameters; None says that the model has no such part.
"""

from dataclasses import dataclass
from typing import Literal

from twinjet.core.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class EmbedSpec:
    """Rows of the embedding matrix, multiplied by `scale`."""

    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class QKVSpec:
    """norm, product, optional q/k norm over the head dim, rope, KV append."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: tuple[RopeConfig, ...]
    """One for each layer."""
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class AttendSpec:
    """Causal attention of each row over its own sequence."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies the dot products."""
    window: tuple[int | None, ...]
    """For each layer: a row at position p sees positions (p - window, p]; None: [0, p]."""


@dataclass(frozen=True, slots=True)
class ProjectSpec:
    """Product, optional norm of its result, residual add."""

    norm_eps: float
    post_norm: bool = False


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """norm, gated product, down product, optional norm of the result, residual add."""

    activation: Literal["silu", "gelu_tanh"]
    norm_eps: float
    post_norm: bool = False


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """norm and product with the head matrix, for the rows that need logits."""

    norm_eps: float
