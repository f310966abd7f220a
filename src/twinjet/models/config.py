"""Shape and arithmetic of a model, as its checkpoint states them. No JAX here: the server process reads it too."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Angle of pair i at position p: p / scale / theta**(2 i / dims) / factors[i].
    """

    theta: float
    dims: int
    """Leading dimensions of each head that are rotated; even."""
    pairing: Literal["adjacent", "halves"]
    """Which dimensions form a pair: (2i, 2i + 1), or (i, i + dims / 2)."""
    scale: float = 1.0
    """Linear position scaling: positions are divided by it."""
    factors: tuple[float, ...] | None = None
    """Frequency factors, one for each pair (`rope_freqs.weight`)."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer."""

    architecture: Literal["llama", "gemma3"]
    name: str
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_mlp: int
    vocab_size: int
    context_length: int
    """Longest context the model was trained for."""
    norm_eps: float
    rope: RopeConfig
    activation: Literal["silu", "gelu_tanh"]
    tied_head: bool
    """The head is the embedding matrix."""
    rope_local: RopeConfig | None = None
    """Of sliding-window layers, where it differs."""
    sliding_window: int | None = None
    """A windowed layer's row at position p sees positions (p - sliding_window, p]."""
    window_period: int = 0
    """Every `window_period`-th layer (the last of each group) sees everything; the others are windowed. 0: none is."""
    embedding_scale: float = 1.0
    query_scale: float | None = None
    """Multiplies the dot products; None: head_dim ** -0.5."""

    def is_windowed(self, layer: int) -> bool:
        return self.sliding_window is not None and self.window_period > 0 and (layer + 1) % self.window_period != 0
