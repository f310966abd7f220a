"""Models in several files."""

from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from tests.tiny_models import write_tiny_llama
from twinjet.checkpoints.gguf import model_stem, part_names, read_checkpoint
from twinjet.core.errors import CheckpointError


def write_parts(folder: Path, max_tensors: int = 9) -> list[Path]:
    """A tiny model as llama.cpp's splitter lays it out: metadata in the first part, tensors in all."""
    source = GGUFReader(write_tiny_llama(folder / "whole.gguf", quant="Q8_0"))
    writer = GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=max_tensors)
    for key, field in source.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("model-*.gguf"))


def test_all_parts_together_are_the_model(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    assert [part.name for part in parts] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    whole = read_checkpoint(tmp_path / "whole.gguf")
    split = read_checkpoint(parts[0])
    assert split.config == whole.config
    assert split.vocab == whole.vocab
    assert split.size_bytes == sum(part.stat().st_size for part in parts)
    assert split.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        assert (split.tensors[name].dequantize() == tensor.dequantize()).all()


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf does not exist"):
        read_checkpoint(parts[0])


def test_a_truncated_part_is_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    parts[2].write_bytes(parts[2].read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match=r"blk\.1\..* ends at byte .*model-00003-of-00003\.gguf ends at"):
        read_checkpoint(parts[0])


def test_only_the_first_part_can_be_given(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    with pytest.raises(CheckpointError, match=r"one of 3 parts .* give the first one, .*model-00001-of-00003\.gguf"):
        read_checkpoint(parts[1])
    renamed = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"one of 3 parts of a model; give the first one, named like"):
        read_checkpoint(renamed)


def test_parts_of_different_models_are_not_joined(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf is not part 2 of 3"):
        read_checkpoint(parts[0])


def test_part_names() -> None:
    assert part_names("a-00001-of-00002.gguf") == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    assert part_names("a-00002-of-00002.gguf") == ["a-00002-of-00002.gguf"]
    assert part_names("a.Q4_1.gguf") == ["a.Q4_1.gguf"]
    assert (model_stem("a-00001-of-00002.gguf"), model_stem("a.Q4_1.gguf")) == ("a", "a.Q4_1")
