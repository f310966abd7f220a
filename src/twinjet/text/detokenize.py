"""Token ids to text, as they come."""

import codecs
from collections.abc import Iterable

from twinjet.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes a growing sequence that continues a prompt. A token costs the same however many came before.

    What `push` and `finish` return, joined, is `tokenizer.decode(ids, continuation=True)` of all ids. A character is
    held back until its last byte is there; bytes that can no longer become one turn into U+FFFD at once.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain now. Raises `InvalidRequest` for an id outside the vocabulary."""
        tokenizer = self._tokenizer
        return self._decoder.decode(
            b"".join(
                tokenizer.token_bytes(i) for i in token_ids if not (self._skip_special and tokenizer.is_special(i))
            )
        )

    def finish(self) -> str:
        """What was held back: U+FFFD if the sequence ends within a character."""
        return self._decoder.decode(b"", final=True)
