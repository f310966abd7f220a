"""Fetches GGUF files from the Hugging Face hub: `hf:org/repo` or `hf:org/repo:file.gguf`.

Files lie under models/hf/org/repo as the repository has them. A model that is there already is used without asking
the hub. Knows nothing of named models.
"""

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from twinjet.checkpoints.gguf import model_stem, part_names
from twinjet.checkpoints.storage import ProgressCallback, largest_file, locked, sha256_of
from twinjet.core.errors import CheckpointError

PREFIX = "hf:"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    size_bytes: int | None
    sha256: str | None


def hub_folder(home: Path) -> Path:
    return home / "models" / "hf"


def local_models(folder: Path) -> list[Path]:
    """Every whole model under `folder`, as the path of its only or first part."""
    models = []
    for path in sorted(folder.rglob("*.gguf")):
        parts = [path.with_name(name) for name in part_names(path.name)]
        is_first = model_stem(path.name) == path.stem or len(parts) > 1
        if is_first and ".cache" not in path.relative_to(folder).parts and all(part.is_file() for part in parts):
            models.append(path)
    return models


def fetch_from_hub(spec: str, home: Path, on_progress: ProgressCallback, *, verify: bool) -> Path:
    """Path of the model's only or first part. `verify`: ask the hub, and compare the hash, also if it is here."""
    repository, file_name = _parse(spec)
    folder = hub_folder(home) / repository
    if not verify and (path := _find_local(folder, file_name)):
        return path
    with locked(folder, on_progress):
        if not verify and (path := _find_local(folder, file_name)):
            return path
        remote = _list_remote(repository)
        file_name = file_name or _only_model(repository, remote)
        names = [str(Path(file_name).with_name(name)) for name in part_names(Path(file_name).name)]
        for name in names:
            if name not in remote:
                raise CheckpointError(f"{PREFIX}{repository} has no file {name}; it has: {_listing(remote)}")
        _download(repository, names, remote, folder, on_progress)
        return folder / names[0]


def _parse(spec: str) -> tuple[str, str | None]:
    repository, colon, file_name = spec.removeprefix(PREFIX).partition(":")
    if not _REPOSITORY.fullmatch(repository) or (colon and not file_name):
        raise CheckpointError(f"{spec!r} is not of the form hf:org/repo or hf:org/repo:file.gguf")
    if file_name and (not file_name.endswith(".gguf") or ".." in file_name.split("/") or file_name.startswith("/")):
        raise CheckpointError(f"{spec!r} must name a .gguf file of the repository, as hf:org/repo:file.gguf")
    return repository, file_name or None


def _find_local(folder: Path, file_name: str | None) -> Path | None:
    here = local_models(folder)
    if file_name is not None:
        return folder / file_name if folder / file_name in here else None
    return here[0] if len(here) == 1 else None


def _list_remote(repository: str) -> dict[str, _RemoteFile]:
    # Imported here: it takes a second, which only this kind of model should cost.
    from huggingface_hub import HfApi

    with _explained(repository):
        siblings = HfApi().model_info(repository, files_metadata=True).siblings or []
    remote = {}
    for sibling in siblings:
        if sibling.rfilename.endswith(".gguf"):
            remote[sibling.rfilename] = _RemoteFile(sibling.size, sibling.lfs.sha256 if sibling.lfs else None)
    return remote


def _only_model(repository: str, remote: Iterable[str]) -> str:
    """The one model of a repository; vision towers (mmproj) are none."""
    first_parts = {}
    for name in sorted(remote):
        if not Path(name).name.startswith("mmproj"):
            first_parts.setdefault(str(Path(name).with_name(model_stem(Path(name).name))), name)
    if len(first_parts) == 1:
        return next(iter(first_parts.values()))
    if not first_parts:
        raise CheckpointError(f"{PREFIX}{repository} holds no .gguf file; look for a repository with GGUF in its name")
    raise CheckpointError(
        f"{PREFIX}{repository} holds {len(first_parts)} models; say which as {PREFIX}{repository}:FILE, one of: "
        f"{_listing(first_parts.values())}"
    )


def _listing(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "no .gguf file"


def _download(
    repository: str, names: list[str], remote: dict[str, _RemoteFile], folder: Path, on_progress: ProgressCallback
) -> None:
    from huggingface_hub import hf_hub_download

    sizes = [remote[name].size_bytes for name in names]
    total = sum(size for size in sizes if size is not None) if None not in sizes else None
    done = 0
    for name in names:
        with _explained(repository), _without_bars(), _watching(folder, done, total, on_progress):
            hf_hub_download(repository, name, local_dir=folder)
        path = folder / name
        done += path.stat().st_size
        on_progress("download", done, total)
        expected = remote[name].sha256
        if expected is not None and (found := sha256_of(path, on_progress)) != expected:
            path.unlink()
            raise CheckpointError(
                f"{name} of {PREFIX}{repository} has arrived damaged: expected sha256 {expected}, got {found}; "
                f"it was deleted, pull again"
            )


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Whatever the hub's client raises, as one line that says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{PREFIX}{repository} needs its licence accepted on its page, and a login: run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{PREFIX}{repository} does not exist or is private; check the name, or run `hf auth login`"
        ) from error
    except Exception as error:  # network libraries differ between versions of the client
        detail = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(
            f"cannot fetch {PREFIX}{repository} from the Hugging Face hub ({detail}); check the network and proxy "
            f"settings, or download the file yourself and give its path"
        ) from error


@contextmanager
def _without_bars() -> Iterator[None]:
    """Progress is reported by the caller, so the client's own bars stay off."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _watching(folder: Path, done: int, total: int | None, on_progress: ProgressCallback) -> Iterator[None]:
    """Report how the client's unfinished file grows."""
    stop = threading.Event()

    def watch() -> None:
        unfinished = folder / ".cache" / "huggingface" / "download"
        while not stop.wait(_POLL_S):
            on_progress("download", done + largest_file(unfinished, ".incomplete"), total)

    watcher = threading.Thread(target=watch, name="hub-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
