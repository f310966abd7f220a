"""Fills the blob of packed weights, piece by piece, in memory or on its way to a file that later starts map.

Knows what goes where (`cpu_weights`); knows nothing of where the file is and how long it lives.
"""

import dataclasses
import json
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from twinjet.core.errors import CheckpointError
from twinjet.ops.cpu_library import PACKED_FOR, CpuLibrary
from twinjet.ops.cpu_weights import (
    ALIGNMENT,
    FORMATS,
    HEAD_FORMATS,
    LAYOUT_VERSION,
    PANEL_COLUMNS,
    CpuParams,
    MatrixPlace,
    Place,
    WeightFormat,
    WeightMap,
)
from twinjet.ops.params import RawModel, WeightTensor

PIECE_BYTES = 4 << 20
"""Packed at once: enough panels for all threads, few enough pages of the model file to hold."""
STAGE_BYTES = 16 << 20
"""Written at once, of two that take turns. Whole huge pages: a write that covers one makes Linux cache the file in
huge pages, which mapped weights are then read through."""
HUGE_PAGE_BYTES = 2 << 20

Put = Callable[[int, np.ndarray], None]
"""Stores bytes at an offset of the blob."""


class BlobStore(Protocol):
    """Keeps blobs between starts; `checkpoints.packed` has one."""

    def fetch(
        self,
        instruction_set: str,
        version: int,
        layout: str,
        size_bytes: int,
        is_current: Callable[[np.ndarray], bool],
        pack: Callable[[Put, Callable[[int, int], None]], None],
        on_progress: Callable[[str, int, int], None],
    ) -> np.ndarray | None:
        """The blob, read-only; `pack(put, on_progress)` is called if it is not kept yet. None: it cannot be kept."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor's share of the blob."""

    tensor: WeightTensor
    layout: WeightFormat | None
    """None: a vector of float32."""
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Some panels of a part, or all of a vector."""

    part: Part
    columns: slice
    offset: int
    """In the blob."""
    size_bytes: int


def load_packed(
    library: CpuLibrary, raw: RawModel, store: BlobStore | None, on_progress: Callable[[str, int, int], None]
) -> CpuParams:
    """All weights: mapped from what `store` keeps, where there is one that can; else packed into memory.

    Raises: CheckpointError, naming a tensor that is not finite.
    """
    if store is not None:
        places, parts, size = place_model(raw)
        blob = store.fetch(
            PACKED_FOR,
            LAYOUT_VERSION,
            json.dumps(dataclasses.asdict(places), separators=(",", ":")),
            size,
            lambda blob: is_current(library, parts, blob),
            lambda put, report: write_parts(library, parts, put, report),
            on_progress,
        )
        if blob is not None:
            return CpuParams(_as_device_array(blob), places)
    return pack_model(library, raw, lambda done, total: on_progress("pack", done, total))


def pack_model(library: CpuLibrary, raw: RawModel, on_progress: Callable[[int, int], None]) -> CpuParams:
    """All weights, packed by the kernel threads into memory. `on_progress(done, total)` counts bytes.

    Raises: CheckpointError, naming a tensor that is not finite.
    """
    places, parts, size = place_model(raw)
    blob = zeroed_bytes(size)
    for part in parts:
        for piece in _pieces(part, PIECE_BYTES):
            _fill(library, piece, blob[piece.offset : piece.offset + piece.size_bytes])
            on_progress(_end(piece), _packed_bytes(parts))
    return CpuParams(_as_device_array(blob), places)


def write_parts(library: CpuLibrary, parts: Sequence[Part], put: Put, on_progress: Callable[[int, int], None]) -> None:
    """Pack all parts, in the order of their offsets, and `put` them in runs of whole huge pages (but the last).

    One run is written, from a thread of its own, while the next is packed. What lies between parts is zeros.
    Raises what `put` raises, and CheckpointError.
    """
    largest = max(piece.size_bytes for part in parts for piece in _pieces(part, PIECE_BYTES))
    stage_size = max(STAGE_BYTES, -(-largest // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + HUGE_PAGE_BYTES)
    stage, spare = zeroed_bytes(stage_size), zeroed_bytes(stage_size)
    base = used = 0  # offset of the stage in the blob, and bytes in it
    with ThreadPoolExecutor(1, "write-weights") as writer:
        writing: Future[None] | None = None
        for part in parts:
            for piece in _pieces(part, PIECE_BYTES):
                if _end(piece) - base > stage_size:
                    whole = used // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
                    if writing is not None:
                        writing.result()
                    spare[: used - whole] = stage[whole:used]
                    spare[used - whole :] = 0
                    writing = writer.submit(put, base, stage[:whole])
                    stage, spare, base = spare, stage, base + whole
                _fill(library, piece, stage[piece.offset - base : _end(piece) - base])
                used = _end(piece) - base
                on_progress(_end(piece), _packed_bytes(parts))
        if writing is not None:
            writing.result()
        put(base, stage[:used])


def is_current(library: CpuLibrary, parts: Sequence[Part], blob: np.ndarray) -> bool:
    """Whether packing would give this blob, by the first panel of every tensor.

    Catches a layout that changed while `LAYOUT_VERSION` did not.
    """
    for part in parts:
        piece = next(_pieces(part, 1))
        expected = np.zeros(piece.size_bytes, np.uint8)
        _fill(library, piece, expected)
        if not np.array_equal(expected, blob[piece.offset : _end(piece)]):
            return False
    return True


def place_model(raw: RawModel) -> tuple[WeightMap, list[Part], int]:
    """Where everything goes, the parts in the order of their offsets, and the blob's size in bytes."""
    placing = _Placing()
    embedding = placing.matrix([raw.embedding], HEAD_FORMATS)
    layers = tuple(tuple((part, placing.part(tensors)) for part, tensors in layer.items()) for layer in raw.layers)
    final_norm = placing.vector(raw.final_norm)
    head = embedding if raw.head is None else placing.matrix([raw.head], HEAD_FORMATS)
    return WeightMap(embedding, layers, final_norm, head), placing.parts, placing.size


class _Placing:
    """Gives parts their offsets, one after the other."""

    def __init__(self) -> None:
        self.size = 0
        self.parts: list[Part] = []

    def part(self, tensors: Sequence[WeightTensor]) -> Place:
        return self.vector(tensors[0]) if len(tensors[0].shape) == 1 else self.matrix(tensors)

    def vector(self, tensor: WeightTensor) -> int:
        return self._take(tensor, None, 4 * tensor.shape[0])

    def matrix(self, tensors: Sequence[WeightTensor], formats: Mapping[str, WeightFormat] = FORMATS) -> MatrixPlace:
        segments = []
        for tensor in tensors:
            columns, inputs = tensor.shape
            layout = formats[tensor.quant]
            size = -(-columns // PANEL_COLUMNS) * layout.panel_bytes(inputs)
            segments.append((layout.number, columns, self._take(tensor, layout, size)))
        return MatrixPlace(tensors[0].shape[1], tuple(segments))

    def _take(self, tensor: WeightTensor, layout: WeightFormat | None, size: int) -> int:
        offset = self.size
        self.parts.append(Part(tensor, layout, offset, size))
        self.size += _aligned(size)
        return offset


def _packed_bytes(parts: Sequence[Part]) -> int:
    """Where the last part ends."""
    return parts[-1].offset + parts[-1].size_bytes


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _end(piece: Piece) -> int:
    return piece.offset + piece.size_bytes


def _pieces(part: Part, most_bytes: int) -> Iterator[Piece]:
    """The part in order, in pieces of whole panels, as many as `most_bytes` holds, but one at least."""
    shape = part.tensor.shape
    if part.layout is None:
        yield Piece(part, slice(0, shape[0]), part.offset, part.size_bytes)
        return
    panel_bytes = part.layout.panel_bytes(shape[1])
    at_once = max(1, most_bytes // panel_bytes)
    num_panels = part.size_bytes // panel_bytes
    for start in range(0, num_panels, at_once):
        stop = min(start + at_once, num_panels)
        columns = slice(start * PANEL_COLUMNS, min(stop * PANEL_COLUMNS, shape[0]))
        yield Piece(part, columns, part.offset + start * panel_bytes, (stop - start) * panel_bytes)


def _fill(library: CpuLibrary, piece: Piece, out: np.ndarray) -> None:
    """Pack a piece into `out`, zeroed bytes of its size, and let the model file's pages go."""
    tensor, layout = piece.part.tensor, piece.part.layout
    if layout is None:
        values = np.ascontiguousarray(tensor.dequantize(), np.float32)
        out[:] = values.view(np.uint8)
        finite = bool(np.isfinite(values).all())
    else:
        rows = tensor.data[piece.columns]
        data = np.ascontiguousarray(rows)
        finite = library.pack(layout.number, layout.quant_type, data, (len(rows), tensor.shape[1]), out)
        release_pages(rows)
    if not finite:
        raise CheckpointError(f"{tensor.name} holds numbers that are not finite; fetch the model anew")


def release_pages(data: np.ndarray) -> None:
    """Take a file's mapped pages out of this process's memory; they are read again if somebody asks for them."""
    root = data
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or root.mode != "r" or not isinstance(root.base, mmap.mmap):
        return
    start = data.ctypes.data - root.ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    root.base.madvise(mmap.MADV_DONTNEED, first, start + data.nbytes - first)


def zeroed_bytes(size: int) -> np.ndarray:
    """Zeros at the start of a huge page, which the system is asked to use."""
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[start : start + size]


def _as_device_array(blob: np.ndarray) -> jax.Array:
    """Not copied: it is aligned as XLA wants it, and nobody writes to it any more."""
    return jax.device_put(blob)
