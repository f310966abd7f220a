"""A model's weights as one array of bytes, in the panels that CPU kernels read (kernels/cpu/weights.h).

Knows which format keeps which GGUF type, integers, scales and minima alike; `cpu_pack` fills it, steps read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Array, UInt8

PANEL_COLUMNS = 16
GROUP_INPUTS = 32
SUPER_GROUPS = 8
ALIGNMENT = 64
"""Of every part of the blob, in bytes: a cache line, and what XLA takes without copying."""

LAYOUT_VERSION = 3
"""Of all that a blob's bytes depend on: raise it with every change of kernels/cpu/weights.h, what packs into it, or
`FORMATS`. Packed files of an older version are packed anew."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How one GGUF type is packed."""

    number: int
    """`Format` of kernels/cpu/weights.h."""
    quant_type: int
    """GGUF's own number."""
    group_bytes: int
    """Of 16 columns by 32 inputs."""
    super_bytes: int = 0
    """Of the super-scales before every `SUPER_GROUPS` groups."""

    def panel_bytes(self, num_inputs: int) -> int:
        """Of 16 columns by all inputs."""
        groups = -(-num_inputs // GROUP_INPUTS)
        return groups * self.group_bytes + groups // SUPER_GROUPS * self.super_bytes


FORMATS = {
    "F32": WeightFormat(0, 0, 2048),
    "F16": WeightFormat(1, 1, 1024),
    "BF16": WeightFormat(2, 30, 1024),
    "Q4_0": WeightFormat(3, 2, 256 + 32),
    "Q4_1": WeightFormat(4, 3, 256 + 64),
    "Q4_K": WeightFormat(5, 12, 256 + 32, 64),
    "Q5_0": WeightFormat(6, 6, 320 + 32),
    "Q5_1": WeightFormat(7, 7, 320 + 64),
    "Q5_K": WeightFormat(8, 13, 320 + 32, 64),
    "Q6_K": WeightFormat(9, 14, 384 + 32, 32),
    "Q8_0": WeightFormat(10, 8, 512 + 32),
}

HEAD_FORMATS = FORMATS | {"Q8_0": WeightFormat(11, 8, 512 + 32)}
"""Of the head, and of the embedding, which may be the head. Its errors go straight into the logits, so where its
weights have 8 bits its inputs have 16 (docs/decisions.md)."""


@dataclass(frozen=True, slots=True)
class MatrixPlace:
    """Tensors side by side over the same inputs: their formats, columns and byte offsets."""

    num_inputs: int
    segments: tuple[tuple[int, int, int], ...]
    """(format, columns, offset) of each."""

    @property
    def num_columns(self) -> int:
        return sum(columns for _, columns, _ in self.segments)

    @property
    def numbers(self) -> np.ndarray:
        """As kernels take it."""
        return np.array([self.num_inputs, *(number for segment in self.segments for number in segment)], np.int64)


Place = MatrixPlace | int
"""Of a matrix, or the byte offset of a vector of float32."""


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Where everything lies in the blob. Static: a change of it is another program."""

    embedding: MatrixPlace
    layers: tuple[tuple[tuple[str, Place], ...], ...]
    """For each layer, its parts by name."""
    final_norm: int
    head: MatrixPlace


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class CpuParams:
    """All weights of a model."""

    blob: UInt8[Array, " bytes"]
    places: WeightMap = field(metadata={"static": True})


@dataclass(frozen=True, slots=True)
class CpuLayer:
    """One layer, as ops see it."""

    index: int
    blob: UInt8[Array, " bytes"]
    parts: Mapping[str, Place]

    def matrix(self, part: str) -> np.ndarray:
        place = self.parts[part]
        if not isinstance(place, MatrixPlace):
            raise TypeError(f"{part} is a vector")
        return place.numbers

    def vector(self, part: str | None) -> np.int64:
        """Byte offset; -1: there is none."""
        place = -1 if part is None else self.parts[part]
        if isinstance(place, MatrixPlace):
            raise TypeError(f"{part} is a matrix")
        return np.int64(place)
