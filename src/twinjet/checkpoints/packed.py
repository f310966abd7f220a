"""Packed weights between starts: one file for each model and layout, which every engine process maps and none copies.

Owns the file format and a file's life: written whole or not at all by one process while others wait, checked before
use, removed when another takes its place. What lies in a blob is the business of the backend that packs it.

A file is a header of `HEADER_BYTES`, then the blob to the file's end. The header holds magic, container version, length
of the text, blob size (little-endian), SHA-256 of the text, then the text: JSON, and zeros.
"""

import hashlib
import json
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from twinjet.checkpoints.content_hash import hash_contents
from twinjet.checkpoints.storage import sync_folder

HEADER_BYTES = 2 << 20
"""A huge page, nearly all of it a hole: where the blob starts so, Linux can map it in huge pages."""

SUFFIX = ".packed"
_UNFINISHED = ".part"
_HASHES = "hashes"
_PREFIX = struct.Struct("<16sIIQ32s")
_MAGIC = b"twinjet packed\r\n"
_CONTAINER_VERSION = 1
_WAIT_S = 5.0
"""Between two signs of life from a process that waits."""
_MAP_BYTES = 64 << 20
_POPULATE_READ = 22  # madvise(2), since Linux 5.14; not in Python's mmap yet

OnProgress = Callable[[str, int, int], None]
"""Called as (stage, done bytes, total bytes). Stages: hash, pack, map; and wait_packed, whose total is 1."""
Put = Callable[[int, np.ndarray], None]
"""Writes bytes at an offset of the blob. Offsets never given are zeros."""


@dataclass(frozen=True, slots=True)
class ListedPacked:
    """A packed file, for people."""

    source: str
    """Path of the model file that it was packed from."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Where the packed weights of one model are kept."""

    folder: Path
    sources: tuple[Path, ...]
    """The model's files, all parts."""
    warn: Callable[[str], None]
    """Told in one line why nothing can be kept."""

    def fetch(
        self,
        instruction_set: str,
        version: int,
        layout: str,
        size_bytes: int,
        is_current: Callable[[np.ndarray], bool],
        pack: Callable[[Put, Callable[[int, int], None]], None],
        on_progress: OnProgress,
    ) -> np.ndarray | None:
        """[size_bytes] uint8, read-only and mapped; `pack` is called only if there is no file of exactly this kind.

        `layout` says in full what lies where; `is_current` has a last look at a file that says the same. None: it
        cannot be kept here, which `warn` was told; the caller packs into its own memory. Raises what `pack` raises,
        other than OSError, and leaves nothing behind then.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            sha256 = hash_contents(self.sources, self.folder / _HASHES, on_progress)
            path = self.folder / f"{sha256}.{instruction_set}.{version}{SUFFIX}"
            facts = {"sha256": sha256, "instruction_set": instruction_set, "version": version, "layout": layout}

            def mapped() -> np.ndarray | None:
                blob = _map_file(path, facts, size_bytes, on_progress)
                return blob if blob is not None and is_current(blob) else None

            if (blob := mapped()) is not None:
                return blob
            with _locked(path, on_progress):
                # Another process may have packed it while this one waited.
                if (blob := mapped()) is None:
                    path.unlink(missing_ok=True)
                    self._make_room(path, facts, size_bytes)
                    header = _header({**facts, "source": str(self.sources[0])}, size_bytes)
                    _write(path, header, size_bytes, lambda put: pack(put, _staged(on_progress, "pack")))
                    blob = mapped()
            if blob is None:
                raise OSError(f"what was written to {path} reads differently")
            return blob
        except (OSError, NotImplementedError) as error:  # the second: locks that the file system lacks
            reason = getattr(error, "strerror", None) or error
            self.warn(
                f"packed weights cannot be kept in {self.folder} ({reason}); this engine packs into its own memory, at "
                "every start anew"
            )
            return None

    def _make_room(self, path: Path, mine: dict[str, Any], size_bytes: int) -> None:
        """Remove what `path` takes the place of, and what dead processes left.

        That is older layouts of the same model, and what was packed from the same model file when it held something
        else. Raises OSError if there is no space.
        """
        for other, facts in _headers(self.folder):
            same_model = facts["sha256"] == mine["sha256"]
            older = facts["instruction_set"] == mine["instruction_set"] and facts["version"] < mine["version"]
            altered = not same_model and facts["source"] == str(self.sources[0])
            if (same_model and older) or altered:
                other.unlink(missing_ok=True)
        for unfinished in self.folder.glob(f"*{_UNFINISHED}"):
            if unfinished.name.startswith(f"{path.stem}."):
                unfinished.unlink(missing_ok=True)  # whoever wrote it had the lock that is held here
            else:
                _remove_if_dead(unfinished)
        space = os.statvfs(self.folder)
        free_bytes = space.f_bavail * space.f_frsize
        if free_bytes < size_bytes + HEADER_BYTES:
            raise OSError(f"it needs {size_bytes / 1e9:.2f} GB of disk space, and {free_bytes / 1e9:.2f} GB are free")


def list_packed(folder: Path) -> list[ListedPacked]:
    """What is kept in a folder; files that cannot be read as packed weights are left out."""
    return [ListedPacked(facts["source"], path.stat().st_size) for path, facts in _headers(folder)]


def _staged(on_progress: OnProgress, stage: str) -> Callable[[int, int], None]:
    return lambda done, total: on_progress(stage, done, total)


def _headers(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            with path.open("rb") as file:
                found = _read_header(file.read(HEADER_BYTES))
        except OSError:
            continue
        if found is not None:
            yield path, found[0]


def _header(facts: dict[str, Any], size_bytes: int) -> bytes:
    text = json.dumps(facts, sort_keys=True).encode()
    header = _PREFIX.pack(_MAGIC, _CONTAINER_VERSION, len(text), size_bytes, hashlib.sha256(text).digest()) + text
    if len(header) > HEADER_BYTES:
        raise OSError(f"the layout takes {len(header)} bytes, and a header has {HEADER_BYTES}")
    return header


def _read_header(raw: bytes) -> tuple[dict[str, Any], int] | None:
    """(facts, blob size); None if it is no header of ours."""
    if len(raw) < _PREFIX.size:
        return None
    magic, container, length, size_bytes, digest = _PREFIX.unpack_from(raw)
    text = raw[_PREFIX.size : _PREFIX.size + length]
    if magic != _MAGIC or container != _CONTAINER_VERSION or hashlib.sha256(text).digest() != digest:
        return None
    facts = json.loads(text)
    return (facts, size_bytes) if isinstance(facts, dict) else None


def _map_file(path: Path, facts: dict[str, Any], size_bytes: int, on_progress: OnProgress) -> np.ndarray | None:
    """The blob, all of it in memory; None if there is no such file, or it is not whole, or says other facts."""
    try:
        with path.open("rb") as file:
            header = _read_header(file.read(HEADER_BYTES))
            whole = os.fstat(file.fileno()).st_size == HEADER_BYTES + size_bytes
            if header is None or not whole or header[1] != size_bytes:
                return None
            if any(header[0].get(name) != value for name, value in facts.items()):
                return None
            mapped = mmap.mmap(
                file.fileno(), size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=HEADER_BYTES
            )
    except OSError:
        return None
    advise(mapped, mmap.MADV_HUGEPAGE, 0, size_bytes)
    for start in range(0, size_bytes, _MAP_BYTES):
        stop = min(start + _MAP_BYTES, size_bytes)
        # Read in order, and entered into this process's page table: not a fault at a time by the first steps.
        advise(mapped, _POPULATE_READ, start, stop - start)
        on_progress("map", stop, size_bytes)
    return np.frombuffer(mapped, np.uint8)


def advise(mapped: mmap.mmap, advice: int, start: int, size: int) -> None:
    """madvise(2), where the system knows this advice."""
    with suppress(OSError):
        mapped.madvise(advice, start, size)


def _write(path: Path, header: bytes, size_bytes: int, pack: Callable[[Put], None]) -> None:
    """Write a file beside `path`, and rename it once all of it is on disk. The caller holds the lock."""
    # No two have one name, even if somebody deletes the lock's file: a rename can then only fail.
    unfinished = path.with_suffix(f".{secrets.token_hex(4)}{_UNFINISHED}")
    try:
        with unfinished.open("wb", buffering=0) as file:
            descriptor = file.fileno()
            pack(lambda offset, data: _write_at(descriptor, data.data, HEADER_BYTES + offset))
            os.truncate(descriptor, HEADER_BYTES + size_bytes)
            _write_at(descriptor, memoryview(header), 0)
            os.fsync(descriptor)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _lock_of(path: Path) -> filelock.FileLock:
    """The system drops it when its holder dies, however that happens."""
    return filelock.FileLock(path.with_suffix(".lock"))


@contextmanager
def _locked(path: Path, on_progress: OnProgress) -> Iterator[None]:
    """Be the only process that writes `path`."""
    lock = _lock_of(path)
    waiting = False
    while True:
        try:
            lock.acquire(timeout=_WAIT_S if waiting else 0, poll_interval=0.1)
            break
        except filelock.Timeout:
            waiting = True
            on_progress("wait_packed", 0, 1)
    if waiting:
        on_progress("wait_packed", 1, 1)
    try:
        yield
    finally:
        lock.release()


def _remove_if_dead(unfinished: Path) -> None:
    lock = _lock_of(unfinished.with_suffix(""))
    try:
        with lock.acquire(timeout=0):
            unfinished.unlink(missing_ok=True)
    except filelock.Timeout:
        pass  # its writer lives
