"""Rotary position embedding parameters, shared by checkpoints (which read them) and ops (which apply them)."""

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
