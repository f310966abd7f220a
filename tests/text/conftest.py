"""Tokenizers of the two real models, built once."""

from pathlib import Path

import pytest
from hypothesis import settings

from twinjet.checkpoints.gguf import read_vocab
from twinjet.core.vocab import VocabSpec
from twinjet.text.tokenizer import Tokenizer

# On a busy machine an example may take long for no fault of its own.
settings.register_profile("text", deadline=None)
settings.load_profile("text")


@pytest.fixture(scope="session")
def smollm2_vocab(smollm2_path: Path) -> VocabSpec:
    return read_vocab(smollm2_path)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_vocab: VocabSpec) -> Tokenizer:
    return Tokenizer(smollm2_vocab)


@pytest.fixture(scope="session")
def gemma3_tokenizer(gemma3_path: Path) -> Tokenizer:
    return Tokenizer(read_vocab(gemma3_path))
