"""A model's weights as one array of bytes, in the panels that CPU kernels read (kernels/cpu/weights.h).

Knows which format keeps which GGUF type, integers, scales and minima alike; knows nothing of steps.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Array, UInt8

from twinjet.core.errors import CheckpointError
from twinjet.ops.cpu_library import CpuLibrary
from twinjet.ops.params import RawModel, WeightTensor

PANEL_COLUMNS = 16
GROUP_INPUTS = 32
ALIGNMENT = 64
"""Of every part of the blob, in bytes: a cache line, and what XLA takes without copying."""

HUGE_PAGE_BYTES = 2 << 20


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
    """Of the super-scales before every eight groups."""


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


def pack_model(library: CpuLibrary, raw: RawModel, on_progress: Callable[[int, int], None]) -> CpuParams:
    """All weights, packed by the kernel threads. `on_progress(done, total)` counts layers and the two matrices.

    Raises: CheckpointError, naming a tensor that is not finite.
    """
    placing = _Placing()
    embedding = placing.matrix([raw.embedding])
    layers = tuple(tuple((part, placing.part(tensors)) for part, tensors in layer.items()) for layer in raw.layers)
    final_norm = placing.vector(raw.final_norm)
    head = embedding if raw.head is None else placing.matrix([raw.head])
    blob = _zeroed_bytes(placing.size)
    total = len(raw.layers) + 2
    _fill(library, blob, [raw.embedding], embedding)
    on_progress(1, total)
    for index, (tensors, places) in enumerate(zip(raw.layers, layers, strict=True)):
        for part, place in places:
            _fill(library, blob, tensors[part], place)
        on_progress(index + 2, total)
    _fill(library, blob, [raw.final_norm], final_norm)
    if raw.head is not None:
        _fill(library, blob, [raw.head], head)
    on_progress(total, total)
    # Not copied: it is aligned as XLA wants it, and nobody else holds it.
    return CpuParams(jax.device_put(blob), WeightMap(embedding, layers, final_norm, head))


class _Placing:
    """Gives parts their offsets, one after the other."""

    def __init__(self) -> None:
        self.size = 0

    def part(self, tensors: Sequence[WeightTensor]) -> Place:
        return self.vector(tensors[0]) if len(tensors[0].shape) == 1 else self.matrix(tensors)

    def vector(self, tensor: WeightTensor) -> int:
        return self._take(4 * tensor.shape[0])

    def matrix(self, tensors: Sequence[WeightTensor]) -> MatrixPlace:
        segments = tuple(
            (FORMATS[tensor.quant].number, tensor.shape[0], self._take(_packed_bytes(tensor))) for tensor in tensors
        )
        return MatrixPlace(tensors[0].shape[1], segments)

    def _take(self, size: int) -> int:
        offset = self.size
        self.size += -(-size // ALIGNMENT) * ALIGNMENT
        return offset


def _packed_bytes(tensor: WeightTensor) -> int:
    columns, inputs = tensor.shape
    groups = -(-inputs // GROUP_INPUTS)
    layout = FORMATS[tensor.quant]
    return -(-columns // PANEL_COLUMNS) * (groups * layout.group_bytes + groups // 8 * layout.super_bytes)


def _fill(library: CpuLibrary, blob: np.ndarray, tensors: Sequence[WeightTensor], place: Place) -> None:
    for tensor, offset in zip(tensors, _offsets(place), strict=True):
        if len(tensor.shape) == 1:
            values = np.ascontiguousarray(tensor.dequantize(), np.float32)
            blob[offset : offset + values.nbytes] = values.view(np.uint8)
            finite = bool(np.isfinite(values).all())
        else:
            columns, inputs = tensor.shape
            layout = FORMATS[tensor.quant]
            data = np.ascontiguousarray(tensor.data)
            finite = library.pack(layout.number, layout.quant_type, data, (columns, inputs), blob[offset:])
        if not finite:
            raise CheckpointError(f"{tensor.name} holds numbers that are not finite; fetch the model anew")


def _offsets(place: Place) -> Iterator[int]:
    if isinstance(place, MatrixPlace):
        yield from (offset for _, _, offset in place.segments)
    else:
        yield place


def _zeroed_bytes(size: int) -> np.ndarray:
    """Zeros at the start of a huge page, which the system is asked to use."""
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[start : start + size]
