"""Small vocabularies whose tokens can be told by looking."""

from dataclasses import replace

from twinjet.core.vocab import TokenType, VocabSpec
from twinjet.text.encoders import BYTE_OF_CHARACTER
from twinjet.text.tokenizer import Tokenizer

_BYTES = tuple(sorted(BYTE_OF_CHARACTER, key=BYTE_OF_CHARACTER.__getitem__))
_WORDS = ("he", "hell", "Ġhe", "th", "the", "ll", "ĠĠ")
_SPECIAL = ("<bos>", "<eos>", "<|turn|>", "<|turn|>x", "[think]", "<pad>")

BOS, EOS, TURN, TURN_X, THINK, PAD = range(256 + len(_WORDS), 256 + len(_WORDS) + len(_SPECIAL))
HE, HELL, SPACE_HE, TH, THE, LL, SPACES = range(256, 256 + len(_WORDS))

BYTE_LEVEL = VocabSpec(
    kind="bpe",
    tokens=(*_BYTES, *_WORDS, *_SPECIAL),
    token_types=(
        *[TokenType.NORMAL] * (256 + len(_WORDS)),
        *[TokenType.CONTROL] * 4,
        TokenType.USER_DEFINED,
        TokenType.UNUSED,
    ),
    merges=("h e", "l l", "he ll", "Ġ he", "t h", "t he", "Ġ Ġ"),
    pre="gpt-2",
    bos_id=BOS,
    eos_id=EOS,
    end_ids=(EOS, TURN),
    add_bos=True,
)
"""Ids under 256 are bytes."""

_PIECES = ("▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "abc", "▁▁", "é")
_SCORES = (-9.0, -9.0, -9.0, -9.0, -3.0, -2.0, -4.0, -1.0, -5.0, -6.0, -9.0)

SPM_FIRST_BYTE = 3
SPM_PIECES = {piece: 3 + 256 + index for index, piece in enumerate(_PIECES)}
SPM_THINK = 3 + 256 + len(_PIECES)

SCORED = VocabSpec(
    kind="spm",
    tokens=("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES, "[think]"),
    token_types=(
        TokenType.UNKNOWN,
        TokenType.CONTROL,
        TokenType.CONTROL,
        *[TokenType.BYTE] * 256,
        *[TokenType.NORMAL] * len(_PIECES),
        TokenType.USER_DEFINED,
    ),
    scores=(*[0.0] * 259, *_SCORES, 0.0),
    bos_id=1,
    eos_id=2,
    end_ids=(2,),
    unknown_id=0,
    add_bos=True,
)


def byte_level_tokenizer(**changes: object) -> Tokenizer:
    """A tokenizer of `BYTE_LEVEL` with some fields changed."""
    return Tokenizer(replace(BYTE_LEVEL, **changes))  # pyright: ignore[reportArgumentType]


def scored_tokenizer(**changes: object) -> Tokenizer:
    """A tokenizer of `SCORED` with some fields changed."""
    return Tokenizer(replace(SCORED, **changes))  # pyright: ignore[reportArgumentType]
