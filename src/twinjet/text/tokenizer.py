"""Text to token ids and back, for one vocabulary.

Owns special tokens, BOS and EOS, and the bytes of each token; `encoders` turns the plain text between special tokens
into ids. Results are those of llama.cpp. Knows nothing of files, chats or streams.
"""

from collections.abc import Sequence

from twinjet.core.errors import CheckpointError, InvalidRequest
from twinjet.core.vocab import TokenType, VocabSpec
from twinjet.text.encoders import BYTE_OF_CHARACTER, SPACE, BytePairEncoder, PlainEncoder, ScoreEncoder
from twinjet.text.special_tokens import SpecialTokens


class Tokenizer:
    """Immutable after construction; any thread may use it."""

    def __init__(self, vocab: VocabSpec) -> None:
        """Raises `CheckpointError` if the vocabulary is inconsistent or its pre-tokenizer is not supported."""
        _check(vocab)
        self.vocab_size = len(vocab.tokens)
        self.bos_id = vocab.bos_id
        self.eos_id = vocab.eos_id
        self.end_ids = vocab.end_ids
        self.add_bos = vocab.add_bos and vocab.bos_id is not None
        self.add_eos = vocab.add_eos and vocab.eos_id is not None
        self._space_prefix = vocab.kind == "spm" and vocab.add_space_prefix
        self._token_types = vocab.token_types
        self._bytes = _bytes_of_tokens(vocab)
        # An end token is special whatever the file says of it: some files call theirs user-defined or normal.
        self._special_ids = frozenset(vocab.end_ids) | {
            i for i, kind in enumerate(vocab.token_types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)
        }
        user_defined = {
            i for i, kind in enumerate(vocab.token_types) if kind == TokenType.USER_DEFINED
        } - self._special_ids
        self._always_parsed = SpecialTokens({vocab.tokens[i]: i for i in sorted(user_defined)})
        self._parsed = SpecialTokens({vocab.tokens[i]: i for i in sorted(user_defined | self._special_ids)})
        self._encoder: PlainEncoder = ScoreEncoder(vocab) if vocab.kind == "spm" else BytePairEncoder(vocab)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """The ids of `text`.

        `add_special`: with the BOS and EOS that the model's file asks for. `parse_special`: control tokens written
        out in the text become those tokens; otherwise they are plain text. User-defined tokens always are tokens.
        Raises `InvalidRequest` if `text` is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text is not valid Unicode: unpaired surrogate U+{ord(text[error.start]):04X} "
                f"at character {error.start}; send whole characters"
            ) from None
        pieces = (self._parsed if parse_special else self._always_parsed).split(text)
        plain: list[str] = []
        after_special = True
        for piece in pieces:
            if isinstance(piece, str):
                plain.append(" " + piece if self._space_prefix and after_special else piece)
            after_special = isinstance(piece, int)
        encoded = iter(self._encoder.encode(plain) if plain else ())

        ids: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(next(encoded))
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        `skip_special`: leave special tokens out. `continuation`: the ids continue a text, so that the space they
        may begin with belongs to it; otherwise the space that `encode` puts before a text is taken off again.
        Raises `InvalidRequest` for an id outside the vocabulary.
        """
        visible = [i for i in self._checked(ids) if not (skip_special and i in self._special_ids)]
        joined = b"".join(self._bytes[i] for i in visible)
        if self._space_prefix and not continuation and visible and self._token_types[visible[0]] == TokenType.NORMAL:
            joined = joined.removeprefix(b" ")
        return joined.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text, special or not; they may be a part of a character."""
        self._checked((token_id,))
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of decoded text: control, unknown, or an end of generation."""
        return token_id in self._special_ids

    def _checked(self, ids: Sequence[int]) -> Sequence[int]:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens")
        return ids


def _check(vocab: VocabSpec) -> None:
    size = len(vocab.tokens)
    if len(vocab.token_types) != size:
        raise CheckpointError(f"the vocabulary has {size} tokens but {len(vocab.token_types)} token types")
    if vocab.kind == "spm" and len(vocab.scores) != size:
        raise CheckpointError(f"the vocabulary has {size} tokens but {len(vocab.scores)} scores")
    if len(set(vocab.tokens)) != size:
        seen: set[str] = set()
        twice = next(text for text in vocab.tokens if text in seen or seen.add(text))
        raise CheckpointError(f"the vocabulary has the token {twice!r} more than once")
    named = {"BOS": vocab.bos_id, "EOS": vocab.eos_id, "unknown": vocab.unknown_id}
    for name, token_id in [*named.items(), *(("end", i) for i in vocab.end_ids)]:
        if token_id is not None and not 0 <= token_id < size:
            raise CheckpointError(f"the {name} token's id {token_id} is outside the vocabulary of {size} tokens")


def _bytes_of_tokens(vocab: VocabSpec) -> list[bytes]:
    """What each token adds to a text. Padding (`UNUSED`) adds nothing, as in llama.cpp."""
    table: list[bytes] = []
    for text, kind in zip(vocab.tokens, vocab.token_types, strict=True):
        if kind == TokenType.UNUSED:
            table.append(b"")
        elif kind == TokenType.BYTE:
            table.append(_byte(text))
        elif kind != TokenType.NORMAL:
            table.append(text.encode())
        elif vocab.kind == "spm":
            table.append(text.replace(SPACE, " ").encode())
        else:
            try:
                table.append(bytes([BYTE_OF_CHARACTER[character] for character in text]))
            except KeyError:
                # Not in the byte alphabet: an added token that the file calls normal.
                table.append(text.encode())
    return table


def _byte(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes.fromhex(text[3:5])
        except ValueError:
            pass
    raise CheckpointError(f"byte token {text!r} is not written like <0x0A>")
