"""The text of one generated sequence, token by token, up to a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinjet.text.detokenize import Detokenizer
from twinjet.text.stop import StopMatcher
from twinjet.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push added to the text."""

    text: str
    stop: str | None
    """The stop string that has ended the text, if any."""
    num_tokens: int
    """How many of the pushed tokens belong to the result: all, or up to the one that completed the stop string."""


class TextStream:
    """Turns a generated sequence into text that never splits a character and never shows a part of a stop string.

    The texts of all deltas, joined, are the decoded sequence, cut before the first stop string (after it, with
    `include_stop`). The sequence continues a prompt, so a space that it begins with is kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        """Raises `InvalidRequest` for an empty stop string."""
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._matcher = StopMatcher(stops)
        self._include_stop = include_stop

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the text; tokens pushed after it are ignored."""
        return self._matcher.stop

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next tokens. Raises `InvalidRequest` for an id outside the vocabulary."""
        texts: list[str] = []
        num_tokens = 0
        for token_id in token_ids:
            if self.stop is not None:
                break
            texts.append(self._scan(self._detokenizer.push((token_id,))))
            num_tokens += 1
        return TextDelta("".join(texts), self.stop, num_tokens)

    def finish(self) -> TextDelta:
        """The sequence is over: release what was withheld. A last U+FFFD may still complete a stop string."""
        if self.stop is not None:
            return TextDelta("", self.stop, 0)
        text = self._scan(self._detokenizer.finish())
        return TextDelta(text + self._matcher.finish(), self.stop, 0)

    def _scan(self, text: str) -> str:
        scan = self._matcher.push(text)
        return scan.text + scan.stop if scan.stop is not None and self._include_stop else scan.text
