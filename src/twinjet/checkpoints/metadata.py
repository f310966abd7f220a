"""Typed access to the key-value pairs of a GGUF file.

Owns what counts as an integer, a number or a flag (writers differ in width and sign); knows no key by name.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFValueType, ReaderField

from twinjet.core.errors import CheckpointError

_MAX_INTEGER = 2**31 - 1


class Metadata:
    """The pairs of one file. Every getter raises `CheckpointError` that names the key."""

    def __init__(self, path: Path, fields: Mapping[str, ReaderField]) -> None:
        self._path = path
        self._fields = fields

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
        """An integer of any width; also an array that repeats one integer, as per-layer values may be written."""
        value = self.optional_integer(key)
        if value is None:
            if default is None:
                raise self._missing(key)
            return default
        if not minimum <= value <= maximum:
            raise CheckpointError(f"{self._path}: {key} is {value}, expected {minimum} to {maximum}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """As `integer`, without bounds; None if the file has no such key."""
        if key not in self._fields:
            return None
        values = self._values(key)
        if values.dtype.kind not in "iu" or not len(values):
            raise self._wrong_type(key, "an integer")
        if (values != values[0]).any():
            raise CheckpointError(f"{self._path}: {key} differs from layer to layer, which is not supported")
        return int(values[0])

    def number(self, key: str, default: float | None = None) -> float:
        """A finite float of any width, or an integer."""
        if key not in self._fields:
            if default is None:
                raise self._missing(key)
            return default
        values = self._values(key)
        if values.dtype.kind not in "fiu" or len(values) != 1:
            raise self._wrong_type(key, "a number")
        value = float(values[0])
        if not math.isfinite(value):
            raise CheckpointError(f"{self._path}: {key} is {value}, expected a finite number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        if key not in self._fields:
            return default
        values = self._values(key)
        if values.dtype.kind not in "biu" or len(values) != 1:
            raise self._wrong_type(key, "true or false")
        return bool(values[0])

    def text(self, key: str, default: str | None = None) -> str:
        value = self.optional_text(key)
        if value is None:
            value = default
        if value is None:
            raise self._missing(key)
        return value

    def optional_text(self, key: str) -> str | None:
        field = self._fields.get(key)
        if field is None:
            return None
        if field.types[0] != GGUFValueType.STRING:
            raise self._wrong_type(key, "a string")
        return bytes(field.parts[-1]).decode("utf-8", "replace")

    def is_array(self, key: str) -> bool:
        field = self._fields.get(key)
        return field is not None and field.types[0] == GGUFValueType.ARRAY

    def length(self, key: str) -> int:
        """Number of elements of an array."""
        if not self.is_array(key):
            raise self._wrong_type(key, "an array") if key in self else self._missing(key)
        return int(self._fields[key].parts[-2][0])

    def numbers(self, key: str) -> np.ndarray:
        """An array of numbers or flags, in the file's own dtype."""
        self.length(key)
        return self._values(key)

    def strings(self, key: str) -> tuple[str, ...]:
        """An array of strings. Bytes that are not UTF-8 become U+FFFD."""
        length = self.length(key)
        field = self._fields[key]
        if field.types[1] != GGUFValueType.STRING:
            raise self._wrong_type(key, "an array of strings")
        raw = field.parts[-1].tobytes()
        strings = []
        position = 0
        for _ in range(length):
            start = position + 8
            position = start + int.from_bytes(raw[position:start], "little")
            strings.append(raw[start:position].decode("utf-8", "replace"))
        return tuple(strings)

    def _values(self, key: str) -> np.ndarray:
        field = self._fields[key]
        if GGUFValueType.STRING in field.types:
            raise self._wrong_type(key, "numbers")
        return field.parts[-1]

    def _missing(self, key: str) -> CheckpointError:
        return CheckpointError(f"{self._path} lacks the key {key}")

    def _wrong_type(self, key: str, expected: str) -> CheckpointError:
        found = " of ".join(kind.name for kind in self._fields[key].types)
        return CheckpointError(f"{self._path}: {key} is of type {found}, expected {expected}")
