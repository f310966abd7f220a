"""Tokenizer metadata as a `VocabSpec`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFValueType, GGUFWriter

from tests.checkpoints.test_model_config import drop_key, set_key
from tests.tiny_models import CHATML, CONTROL, NORMAL, bpe_vocab, spm_vocab, write_tiny_gemma3, write_tiny_llama
from twinjet.checkpoints.gguf import read_checkpoint, read_vocab
from twinjet.core.errors import CheckpointError
from twinjet.core.vocab import TokenType


def test_byte_level_bpe(tmp_path: Path) -> None:
    given = bpe_vocab()
    vocab = read_checkpoint(write_tiny_llama(tmp_path / "m.gguf")).vocab
    assert (vocab.kind, vocab.pre) == ("bpe", "smollm")
    assert list(vocab.tokens) == given.tokens
    assert list(vocab.merges) == given.merges
    assert list(vocab.token_types) == given.types
    assert vocab.scores == ()
    assert (vocab.bos_id, vocab.eos_id, vocab.unknown_id) == (1, 2, 0)
    assert vocab.end_ids == (2, 0)
    assert (vocab.add_bos, vocab.add_eos, vocab.add_space_prefix) == (False, False, False)
    assert vocab.chat_template == CHATML


def test_sentencepiece_style(tmp_path: Path) -> None:
    given = spm_vocab()
    vocab = read_checkpoint(write_tiny_gemma3(tmp_path / "m.gguf")).vocab
    assert (vocab.kind, vocab.pre, vocab.merges) == ("spm", None, ())
    assert list(vocab.tokens) == given.tokens
    assert list(vocab.scores) == given.scores
    assert (vocab.bos_id, vocab.eos_id, vocab.unknown_id) == (2, 1, 3)
    assert [vocab.tokens[end] for end in vocab.end_ids] == ["<eos>", "<end_of_turn>"]
    assert (vocab.add_bos, vocab.add_eos, vocab.add_space_prefix) == (True, False, False)
    assert vocab.chat_template is None


def test_any_text_survives(tmp_path: Path) -> None:
    """Long, empty and multi-byte tokens; the file's strings are cut by their own lengths."""
    texts = ["", "é", "日本語", "🦀" * 100, "a" * 70_000, "\n", "\0"]
    vocab = bpe_vocab()
    vocab = replace(vocab, tokens=[*vocab.tokens, *texts], types=[*vocab.types, *[NORMAL] * len(texts)])
    read = read_checkpoint(write_tiny_llama(tmp_path / "m.gguf", vocab=vocab)).vocab
    assert list(read.tokens[-len(texts) :]) == texts


def test_bytes_that_are_not_utf8_become_replacement_characters(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    raw = path.read_bytes()
    assert raw.count(b"\xc4\xa0world") == 1
    path.write_bytes(raw.replace(b"\xc4\xa0world", b"\xff\xfeworld"))
    assert "��world" in read_checkpoint(path).vocab.tokens


@pytest.mark.parametrize(
    ("pre", "add_bos"), [("llama-bpe", True), ("tekken", True), ("smollm", False), ("gpt-2", False)]
)
def test_whether_to_add_bos_when_a_bpe_file_does_not_say(tmp_path: Path, pre: str, add_bos: bool) -> None:
    vocab = replace(bpe_vocab(pre=pre), add_bos=None)
    assert read_checkpoint(write_tiny_llama(tmp_path / "m.gguf", vocab=vocab)).vocab.add_bos is add_bos
    said = replace(vocab, add_bos=not add_bos)
    assert read_checkpoint(write_tiny_llama(tmp_path / "n.gguf", vocab=said)).vocab.add_bos is not add_bos


def test_defaults_of_a_sentencepiece_file_that_says_little(tmp_path: Path) -> None:
    names = ["bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token", "add_space_prefix", "token_type"]
    edit = drop_key(*(f"tokenizer.ggml.{name}" for name in names))
    vocab = read_checkpoint(write_tiny_gemma3(tmp_path / "m.gguf", edit=edit)).vocab
    assert (vocab.bos_id, vocab.eos_id, vocab.unknown_id) == (1, 2, 0)
    assert (vocab.add_bos, vocab.add_space_prefix) == (True, True)
    # Tokens that end a turn are control tokens whatever the file says.
    assert vocab.token_types[spm_vocab().tokens.index("<end_of_turn>")] == TokenType.CONTROL
    assert vocab.token_types[0] == TokenType.NORMAL


def test_ends_by_id_and_by_name(tmp_path: Path) -> None:
    names = ["<|eot_id|>", "<|eom_id|>", "</s>", "anything"]
    vocab = bpe_vocab()
    vocab = replace(vocab, tokens=[*vocab.tokens, *names], types=[*vocab.types, CONTROL, NORMAL, CONTROL, CONTROL])

    def edit(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(len(vocab.tokens) - 1)

    read = read_checkpoint(write_tiny_llama(tmp_path / "m.gguf", vocab=vocab, edit=edit)).vocab
    assert [read.tokens[end] for end in read.end_ids] == [
        "<|im_end|>",
        "anything",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
    ]
    assert read.token_types[read.tokens.index("<|eom_id|>")] == TokenType.CONTROL


@pytest.mark.parametrize("given", [281, 2**32 - 1])
def test_a_special_id_outside_the_vocabulary_counts_as_not_given(tmp_path: Path, given: int) -> None:
    edit = set_key("tokenizer.ggml.bos_token_id", given, GGUFValueType.UINT32)
    assert read_checkpoint(write_tiny_llama(tmp_path / "m.gguf", edit=edit)).vocab.bos_id is None


def test_vocabulary_of_a_file_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "vocab.gguf"
    writer = GGUFWriter(path, "falcon")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("falcon")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    vocab = read_vocab(path)
    assert (vocab.tokens, vocab.merges, vocab.pre, vocab.eos_id) == (("a", "b", "ab"), ("a b",), "falcon", None)
    assert vocab.token_types == (TokenType.NORMAL,) * 3


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (set_key("tokenizer.ggml.model", "bert", GGUFValueType.STRING), r"model is 'bert', which is not supported"),
        (drop_key("tokenizer.ggml.model"), r"lacks the key tokenizer\.ggml\.model"),
        (drop_key("tokenizer.ggml.merges"), r"lacks the key tokenizer\.ggml\.merges"),
        (
            set_key("tokenizer.ggml.merges", [1, 2], GGUFValueType.ARRAY, GGUFValueType.INT32),
            r"merges is of type ARRAY of INT32, expected an array of strings",
        ),
        (
            set_key("tokenizer.ggml.token_type", [1, 2], GGUFValueType.ARRAY, GGUFValueType.INT32),
            r"token_type has 2 entries for 281 tokens",
        ),
        (
            set_key("tokenizer.ggml.token_type", 5, GGUFValueType.INT32),
            r"token_type is of type INT32, expected an array",
        ),
        (set_key("tokenizer.ggml.add_bos_token", "yes", GGUFValueType.STRING), r"add_bos_token is of type STRING"),
        (
            set_key("tokenizer.chat_template", 1, GGUFValueType.UINT8),
            r"chat_template is of type UINT8, expected a string",
        ),
    ],
)
def test_broken_vocabularies_are_refused_by_key(
    tmp_path: Path, edit: Callable[[GGUFWriter], None], message: str
) -> None:
    checkpoint = read_checkpoint(write_tiny_llama(tmp_path / "m.gguf", edit=edit))
    with pytest.raises(CheckpointError, match=message):
        _ = checkpoint.vocab


def test_scores_are_needed_by_sentencepiece(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_tiny_gemma3(tmp_path / "m.gguf", edit=drop_key("tokenizer.ggml.scores")))
    with pytest.raises(CheckpointError, match=r"lacks the key tokenizer\.ggml\.scores"):
        _ = checkpoint.vocab
