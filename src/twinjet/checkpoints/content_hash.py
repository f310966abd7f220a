"""What a model file holds, by its SHA-256, without reading gigabytes at every start.

A hash is remembered for a file that has not changed since: the same device, inode, size and times. Change times cannot
be set by programs, so a file that was edited and given its old modification time back is hashed again.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from twinjet.checkpoints.storage import sha256_of

SETTLED_S = 2.0
"""Age of a change, at least, before a hash is remembered: as coarse as file systems' clocks are. What changes again in
the same tick cannot be told by its time."""

_REPORT_BYTES = 32 << 20


def hash_contents(paths: Sequence[Path], memory: Path, on_progress: Callable[[str, int, int], None]) -> str:
    """SHA-256 of a file, or of the hashes of several, in hexadecimal. `memory` is the folder that remembers.

    Reports the stage "hash" in bytes of each file that is read. Raises OSError if a file cannot be read; that a hash
    cannot be remembered is no error.
    """
    hashes = [_hash_file(path, memory, on_progress) for path in paths]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _hash_file(path: Path, memory: Path, on_progress: Callable[[str, int, int], None]) -> str:
    before = _identity(path)
    note = memory / f"{before['device']:x}-{before['inode']:x}.json"
    if (noted := _recall(note, before)) is not None:
        return noted
    settled = time.time_ns() - before["ctime_ns"] > SETTLED_S * 1e9
    reported = 0

    def report(stage: str, done: int, total: int | None) -> None:
        nonlocal reported
        if done - reported >= _REPORT_BYTES or done == total:
            reported = done
            on_progress("hash", done, total or done)

    sha256 = sha256_of(path, report)
    if settled and _identity(path) == before:
        with suppress(OSError):
            memory.mkdir(parents=True, exist_ok=True)
            scratch = note.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps({**before, "sha256": sha256, "path": str(path)}))
            scratch.replace(note)
    return sha256


def _recall(note: Path, identity: dict[str, Any]) -> str | None:
    """The hash in a note about the file of this identity; None if there is none, or it is damaged."""
    try:
        noted = json.loads(note.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(noted, dict) or any(noted.get(name) != value for name, value in identity.items()):
        return None
    sha256 = noted.get("sha256")
    return sha256 if isinstance(sha256, str) else None


def _identity(path: Path) -> dict[str, Any]:
    found = path.stat()
    return {
        "device": found.st_dev,
        "inode": found.st_ino,
        "size_bytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
    }
