"""Opens a GGUF file: header, metadata and the place of every tensor, without touching the tensors' bytes.

Owns the file format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); knows nothing of architectures or
tokenizers. Every length and offset is checked against the file's size before use, so a damaged file ends in one
`CheckpointError` and never in a large allocation.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField
from gguf.constants import GGML_QUANT_SIZES

from twinjet.checkpoints.metadata import Metadata
from twinjet.core.errors import CheckpointError

_MAX_TENSORS = 1 << 17
_MAX_KEYS = 1 << 16
_MAX_DIMS = 4
_SUPPORTED_VERSIONS = (2, 3)
_STRING_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in its file."""

    name: str
    shape: tuple[int, ...]
    """Numpy order: the dimension whose elements lie side by side comes last."""
    quant: str
    """Name of the GGML type, or the number of one that nobody here knows."""
    offset_bytes: int
    size_bytes: int | None
    """None: the type is unknown."""
    raw: np.ndarray
    """The whole file, memory-mapped, one byte an element."""
    path: Path


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """One opened file."""

    path: Path
    metadata: Metadata
    tensors: dict[str, TensorPlace]
    size_bytes: int


def open_gguf(path: Path) -> GGUFFile:
    """Map a file and read its header. Raises `CheckpointError`."""
    _check_preamble(path)
    try:
        reader = _BoundedReader(path)
    except CheckpointError:
        raise
    except Exception as error:  # the package raises whatever its parsing runs into
        detail = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{path} is not a valid GGUF file ({detail}); fetch it again") from error
    return GGUFFile(path, Metadata(path, reader.fields), reader.places, int(reader.data.size))


def _check_preamble(path: Path) -> None:
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory; expected a GGUF file")
    try:
        with path.open("rb") as file:
            preamble = file.read(24)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if not preamble:
        raise CheckpointError(f"{path} is empty; expected a GGUF file, fetch it again")
    if preamble[:4] != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {preamble[:4]!r}, expected b'GGUF'")
    if len(preamble) < 24:
        raise CheckpointError(f"{path} is truncated: {len(preamble)} bytes, a GGUF header alone has 24; fetch it again")
    version, num_tensors, num_keys = struct.unpack_from("<IQQ", preamble, 4)
    if version & 0xFFFF == 0:
        raise CheckpointError(f"{path} is a big-endian GGUF file; only little-endian ones are supported")
    if version not in _SUPPORTED_VERSIONS:
        raise CheckpointError(f"{path} is of GGUF version {version}; supported: 2 and 3")
    if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
        raise CheckpointError(f"{path} is corrupt: its header claims {num_tensors} tensors and {num_keys} keys")


class _BoundedReader(GGUFReader):
    """The package's reader, bounded by the file's size and fast on long arrays.

    The original keeps an array object for every element, 26 s for a vocabulary of 262,144 tokens; here an array is
    one part of its field. `places` stands for `tensors`, which the original cannot build from a truncated file.
    """

    places: dict[str, TensorPlace]

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        stop = int(offset) + np.dtype(dtype).itemsize * int(count)
        if stop > self.data.size:
            raise CheckpointError(
                f"{self.data.filename} is truncated or corrupt: its header refers to byte {stop} of a file of "
                f"{self.data.size}; fetch it again"
            )
        return super()._get(int(offset), dtype, int(count), override_order)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, int(raw_type))
        item_type = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        length = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if item_type == GGUFValueType.STRING:
            items = self._get(start, np.uint8, self._measure_strings(start, length))
        elif item_type in self.gguf_scalar_to_np:
            items = self._get(start, self.gguf_scalar_to_np[item_type], length)
        else:
            raise CheckpointError(f"{self.data.filename} holds arrays of {item_type.name}, which are not supported")
        return 12 + items.nbytes, [np.array([length]), items], [1], [GGUFValueType.ARRAY, item_type]

    def _measure_strings(self, start: int, length: int) -> int:
        """Bytes taken by `length` strings, each after its own length."""
        # Even empty strings take eight bytes: bounds the loop by the file's size.
        self._get(start, np.uint64, length)
        view = self.data.data
        position = start
        try:
            for _ in range(length):
                position += 8 + _STRING_LENGTH.unpack_from(view, position)[0]
        except (struct.error, OverflowError):
            self._get(position, np.uint64)  # says where the file ends
            raise
        return position - start

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        self.places = {}
        for field in fields:
            _, name_bytes, _, dims, raw_type, offset = field.parts
            name = bytes(name_bytes).decode("utf-8", "replace")
            if not name.isprintable() or not 0 < len(name) <= 256:
                raise CheckpointError(f"{self.data.filename} is corrupt: it names a tensor {name[:64]!r}")
            if name in self.places:
                raise CheckpointError(f"{self.data.filename} is corrupt: it holds {name} twice")
            if not 0 < len(dims) <= _MAX_DIMS:
                raise CheckpointError(f"{self.data.filename} is corrupt: {name} has {len(dims)} dimensions")
            self.places[name] = self._place(name, dims.tolist(), int(raw_type[0]), start_offs + int(offset[0]))

    def _place(self, name: str, dims: list[int], raw_type: int, offset: int) -> TensorPlace:
        shape = tuple(reversed(dims))
        try:
            kind = GGMLQuantizationType(raw_type)
        except ValueError:
            quant, size_bytes = str(raw_type), None
        else:
            block_size, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block_size:
                raise CheckpointError(
                    f"{self.data.filename} is corrupt: {name} is of type {kind.name} and has rows of {shape[-1]}, "
                    f"which must be a multiple of {block_size}"
                )
            size_bytes = block_bytes
            for size in (*shape[:-1], shape[-1] // block_size):
                size_bytes *= size
            quant = kind.name
        return TensorPlace(name, shape, quant, offset, size_bytes, self.data, Path(str(self.data.filename)))
