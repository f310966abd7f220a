"""The vocabulary of a checkpoint, as read from the file: what `checkpoints` hands to `text`."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


class TokenType(IntEnum):
    """Token classes, numbered as in GGUF's `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class VocabSpec:
    """Everything needed to build a tokenizer and to render a chat."""

    kind: Literal["bpe", "spm"]
    """Byte-level BPE with merges, or SentencePiece-style BPE by scores."""
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    scores: tuple[float, ...] = ()
    """Only with `spm`."""
    merges: tuple[str, ...] = ()
    """Only with `bpe`: "left right", most important first."""
    pre: str | None = None
    """Only with `bpe`: name of the pre-tokenizer (`tokenizer.ggml.pre`)."""
    bos_id: int | None = None
    eos_id: int | None = None
    end_ids: tuple[int, ...] = ()
    """Every id that ends a generation: EOS, end of turn, end of message, where the file has them."""
    unknown_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = True
    """Only with `spm`."""
    chat_template: str | None = None
