"""Canonical KV pages between the engine processes of one host, in shared memory.

Owns the segments: files on a memory file system, their names, locks and checks. What pages mean, and when they may
go, is known to the engines and the orchestrator.

Life of a segment: the exporter writes it and tells its handle; the importer copies it out and checks it; the exporter
is told to free it. The exporter holds a lock on it meanwhile, which the kernel drops when the process dies, however it
dies: so `sweep` knows leftovers from segments in use, and anybody who may remove them may sweep at any time.

Plain files instead of `multiprocessing.shared_memory`, whose resource tracker (Python 3.11) unlinks segments that
others still use.
"""

import contextlib
import fcntl
import hashlib
import math
import os
import re
import secrets
import stat
import tempfile
import zlib
from pathlib import Path
from typing import get_args

import numpy as np

from twinjet.core.config import KVDtype
from twinjet.core.errors import TransferFailed
from twinjet.wire.messages import PagesHandle

_NAME = re.compile(r"twinjet-[0-9a-f]{12}-[0-9]{1,9}\.[0-9]{1,9}-[0-9a-f]{16}", re.ASCII)

_READ_BYTES = 1 << 20
"""Read and checked at a time, so that the checksum finds the bytes still in the cache."""


def pages_prefix(endpoint: str, engine_id: int | None = None, incarnation: int | None = None) -> str:
    """What the names of all segments of a server's engines, or of one of its engine processes, begin with."""
    prefix = f"twinjet-{hashlib.sha256(endpoint.encode()).hexdigest()[:12]}-"
    if engine_id is None or incarnation is None:
        return prefix
    return f"{prefix}{engine_id}.{incarnation}-"


class PageStore:
    """The segments that one engine process has exported and not freed. Not thread-safe."""

    def __init__(self, prefix: str) -> None:
        """`prefix` from `pages_prefix`, of this very process."""
        self._prefix = prefix
        self._files: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._files)

    def write(self, pages: np.ndarray, start: int) -> PagesHandle:
        """Copy `pages` [L, 2, tokens, K, H], of positions from `start` on, into a new segment.

        Raises: TransferFailed, if there is no room.
        """
        name = f"{self._prefix}{secrets.token_hex(8)}"
        content = np.ascontiguousarray(pages).data.cast("B")
        path = _directory() / name
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TransferFailed(f"cannot export KV pages to {path.parent}: {error.strerror}") from None
        self._files[name] = file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done = 0
            while done < len(content):
                done += os.write(file, content[done:])
        except OSError as error:
            self.free(name)
            raise TransferFailed(
                f"cannot export {len(content)} bytes of KV pages to {path.parent}: {error.strerror}; "
                "give shared memory more room (containers: --shm-size)"
            ) from None
        a, b, c, d, e = pages.shape
        return PagesHandle(name, start, (a, b, c, d, e), pages.dtype.name, zlib.crc32(content))

    def free(self, name: str) -> bool:
        """Remove a segment; who has it open reads on. False if it is not, or no longer, in this store."""
        file = self._files.pop(name, None)
        if file is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            (_directory() / name).unlink()
        os.close(file)
        return True

    def close(self) -> None:
        for name in list(self._files):
            self.free(name)


def read_pages(handle: PagesHandle) -> np.ndarray:
    """A private copy of the pages behind `handle`, [L, 2, tokens, K, H].

    Raises: TransferFailed, if they are gone, not as described, or damaged.
    """
    if handle.dtype not in get_args(KVDtype):
        raise TransferFailed(f"KV pages are of type {' or '.join(get_args(KVDtype))}, got {handle.dtype!r}")
    if min(handle.shape) < 1 or handle.shape[1] != 2 or handle.start < 0:
        raise TransferFailed(
            f"KV pages are [L, 2, tokens, K, H] from a position on, got {handle.shape}, {handle.start}"
        )
    if not _NAME.fullmatch(handle.name):
        raise TransferFailed(f"{handle.name!r} is no name of KV pages")
    dtype = np.dtype(handle.dtype)
    size_bytes = math.prod(handle.shape) * dtype.itemsize
    try:
        file = os.open(_directory() / handle.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TransferFailed(f"KV pages {handle.name} cannot be opened: {error.strerror}") from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise TransferFailed(f"KV pages {handle.name} are not a file of this user")
        # Before any memory is taken: a wrong handle may ask for any amount.
        if found.st_size != size_bytes:
            raise TransferFailed(
                f"KV pages {handle.name} of shape {handle.shape} and type {dtype} need {size_bytes} bytes, "
                f"the segment has {found.st_size}"
            )
        pages = np.empty(handle.shape, dtype)
        checksum = _read_into(file, pages.data.cast("B"), handle.name)
    finally:
        os.close(file)
    if checksum != handle.checksum:
        raise TransferFailed(
            f"KV pages {handle.name} are damaged: expected CRC-32 {handle.checksum:08x}, got {checksum:08x}"
        )
    return pages


def _read_into(file: int, content: memoryview, name: str) -> int:
    """Fill `content`; returns its CRC-32."""
    checksum = 0
    done = 0
    while done < len(content):
        part = content[done : done + _READ_BYTES]
        num_read = os.readv(file, [part])
        if num_read == 0:
            raise TransferFailed(f"KV pages {name} shrank while they were read")
        checksum = zlib.crc32(part[:num_read], checksum)
        done += num_read
    return checksum


def sweep(prefix: str) -> int:
    """Remove segments of dead processes whose names begin with `prefix`, one of `pages_prefix`; returns how many."""
    num_removed = 0
    for path in _directory().glob("twinjet-*"):
        if not path.name.startswith(prefix) or not _NAME.fullmatch(path.name):
            continue
        # Somebody else's, or gone meanwhile: not ours to remove.
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                num_removed += 1
            finally:
                os.close(file)
    return num_removed


def _directory() -> Path:
    shared_memory = Path("/dev/shm")
    return shared_memory if shared_memory.is_dir() else Path(tempfile.gettempdir())
