"""Reads a GGUF checkpoint, in one file or several parts: configuration, vocabulary, tensors.

Reading maps the file and checks the header; tensors stay on disk until somebody asks for their values, and the
vocabulary is built when first asked for, so the server and the engine process each pay for what they use only.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from twinjet.checkpoints.model_config import read_model_config
from twinjet.checkpoints.reader import GGUFFile, open_gguf
from twinjet.checkpoints.tensors import QuantTensor, check_tensors
from twinjet.checkpoints.vocabulary import read_vocab_spec
from twinjet.core.errors import CheckpointError
from twinjet.core.vocab import VocabSpec
from twinjet.models.config import ModelConfig

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class Checkpoint:
    """A readable model. Holds its files mapped for as long as it or one of its tensors lives."""

    path: Path
    config: ModelConfig
    tensors: dict[str, QuantTensor]
    """Exactly the tensors that the architecture computes with, under their GGUF names."""
    paths: tuple[Path, ...]
    """Of all parts, the first one first."""
    size_bytes: int
    """Of all parts together."""
    _first_part: GGUFFile

    @cached_property
    def vocab(self) -> VocabSpec:
        """Built on first use. Raises `CheckpointError` if the tokenizer is of an unsupported kind."""
        return read_vocab_spec(self._first_part)


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Open and check a model: every tensor present, of the right shape and a supported type, and whole.

    Raises `CheckpointError` with one line that says what is wrong. Of a model in parts, `path` is the first.
    """
    path = Path(path)
    first = open_gguf(path)
    parts = [first, *_open_other_parts(first)]
    places = {}
    for part in parts:
        for name, place in part.tensors.items():
            if name in places:
                raise CheckpointError(f"{part.path} holds {name}, which {places[name].path} holds already")
            places[name] = place
    whole = GGUFFile(path, first.metadata, places, sum(part.size_bytes for part in parts))
    config = read_model_config(whole)
    tensors = check_tensors(config, path, places)
    return Checkpoint(path, config, tensors, tuple(part.path for part in parts), whole.size_bytes, first)


def read_vocab(path: Path | str) -> VocabSpec:
    """Only the vocabulary, of a model of any architecture, or of a file without tensors."""
    return read_vocab_spec(open_gguf(Path(path)))


def part_names(file_name: str) -> list[str]:
    """Names of all parts of a model, given the first one's; of a model in one file, just that."""
    match = _PART_NAME.fullmatch(file_name)
    if match is None or int(match["number"]) != 1 or int(match["count"]) < 1:
        return [file_name]
    return [f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in range(1, int(match["count"]) + 1)]


def model_stem(file_name: str) -> str:
    """A model's name as its file gives it, without suffix and part number."""
    match = _PART_NAME.fullmatch(file_name)
    return match["stem"] if match else file_name.removesuffix(".gguf")


def _open_other_parts(first: GGUFFile) -> list[GGUFFile]:
    count = first.metadata.integer("split.count", 1, minimum=0, maximum=99_999)
    if count <= 1:
        return []
    names = part_names(first.path.name)
    if first.metadata.integer("split.no", 0, minimum=0) != 0 or len(names) != count:
        match = _PART_NAME.fullmatch(first.path.name)
        example = f"{match['stem'] if match else 'model'}-00001-of-{count:05}.gguf"
        raise CheckpointError(
            f"{first.path} is one of {count} parts of a model; give the first one, named like {example}"
        )
    others = []
    for number, name in enumerate(names[1:], start=1):
        part = open_gguf(first.path.with_name(name))
        if part.metadata.integer("split.no", minimum=0) != number or part.metadata.integer("split.count") != count:
            raise CheckpointError(f"{part.path} is not part {number + 1} of {count} of the same model; fetch it again")
        others.append(part)
    return others
