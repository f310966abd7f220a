"""Plain text to token ids, by the two algorithms that GGUF vocabularies use. Special tokens are not known here.

Both run outside Python with the GIL released, in time about linear in the text, also when it is a single word.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import models, pre_tokenizers

from twinjet.core.errors import CheckpointError, InvalidRequest
from twinjet.core.vocab import TokenType, VocabSpec
from twinjet.text.pre_tokenizers import pre_tokenizer_named

SPACE = "▁"
"""What SentencePiece writes for a space."""


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
"""How byte-level BPE writes bytes, from GPT-2: one that prints stands for itself, the others follow from U+0100."""


class PlainEncoder(Protocol):
    """Encodes texts that hold no special tokens, or whose special tokens are to be read as text."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text by itself. The texts are valid Unicode and not empty."""
        ...


_MISSING = "\0"
"""Stands for any byte without a token. Not in the byte alphabet, so no text is ever written with it."""


class BytePairEncoder:
    """Byte-level BPE: cut into words, bytes written as printable characters, pairs merged by rank."""

    def __init__(self, vocab: VocabSpec) -> None:
        pre_tokenizer = pre_tokenizer_named(vocab.pre)
        ids = {text: token_id for token_id, text in enumerate(vocab.tokens) if text}
        # A byte that the vocabulary lacks is left out of the result, but must still keep its neighbours apart.
        self._missing_id = None if BYTE_OF_CHARACTER.keys() <= ids.keys() else len(vocab.tokens)
        if self._missing_id is not None:
            ids[_MISSING] = self._missing_id
        try:
            model = models.BPE(
                ids,
                [_merge(line) for line in vocab.merges],
                unk_token=None if self._missing_id is None else _MISSING,
                ignore_merges=pre_tokenizer.ignore_merges,
            )
        except Exception as error:  # the library raises bare exceptions
            raise CheckpointError(f"the merges do not fit the vocabulary: {error}") from error
        self._tokenizer = tokenizers.Tokenizer(model)
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer.build(), to_bytes])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            # Of the library's ways to encode, only the batches release the GIL.
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except BaseException as error:
            # The regex engine gives up on a run of over ten million spaces or so with a panic, which is no Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidRequest(
                f"the text cannot be tokenized ({error}); break up its longest run of the same kind of characters"
            ) from None
        if self._missing_id is None:
            return [encoding.ids for encoding in encodings]
        return [[i for i in encoding.ids if i != self._missing_id] for encoding in encodings]


def _merge(line: str) -> tuple[str, str]:
    left, separator, right = line.partition(" ")
    if not (left and separator and right):
        raise CheckpointError(f"merge {line!r} is not two parts with a space between")
    return left, right


class ScoreEncoder:
    """SentencePiece's BPE: the neighbours whose union scores best are merged first; the rest becomes bytes."""

    def __init__(self, vocab: VocabSpec) -> None:
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=_model_proto(vocab))
        except RuntimeError as error:
            raise CheckpointError(f"the vocabulary is not a SentencePiece one: {error}") from error

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        # One by one: given a list, the library starts a thread per core.
        return [self._processor.encode(text) for text in texts]


def _model_proto(vocab: VocabSpec) -> bytes:
    """The vocabulary in SentencePiece's own file format (sentencepiece_model.proto)."""
    if vocab.unknown_id is None:
        raise CheckpointError("the vocabulary names no unknown token (tokenizer.ggml.unknown_token_id)")
    format: Any = sentencepiece_model_pb2  # its classes are made at run time
    kinds = format.ModelProto.SentencePiece
    # Control and user-defined tokens are found before, in the text as it is; here nothing may turn into one.
    kind_of: dict[int, int] = {
        TokenType.NORMAL: kinds.NORMAL,
        TokenType.BYTE: kinds.BYTE,
        TokenType.UNUSED: kinds.UNUSED,
    }
    proto = format.ModelProto()
    for text, score, token_type in zip(vocab.tokens, vocab.scores, vocab.token_types, strict=True):
        proto.pieces.add(piece=text, score=score, type=kind_of.get(token_type, kinds.CONTROL))
    proto.pieces[vocab.unknown_id].type = kinds.UNKNOWN
    trainer = proto.trainer_spec
    trainer.model_type = format.TrainerSpec.BPE
    trainer.byte_fallback = vocab.token_types.count(TokenType.BYTE) == 256
    trainer.unk_id = vocab.unknown_id
    trainer.unk_piece = vocab.tokens[vocab.unknown_id]
    trainer.bos_id = trainer.eos_id = trainer.pad_id = -1
    normalizer = proto.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    return proto.SerializeToString()
