"""Shape and arithmetic of a model, as its checkpoint states them. No JAX here: the server process reads it too."""

from dataclasses import dataclass
from typing import Literal

from twinjet.core.rope import RopeConfig


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

    @property
    def attention_scale(self) -> float:
        """Multiplies the dot products of queries and keys."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def is_windowed(self, layer: int) -> bool:
        return self.sliding_window is not None and self.window_period > 0 and (layer + 1) % self.window_period != 0
