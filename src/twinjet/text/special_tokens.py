"""Finds special tokens in a text before anything else cuts it.

Rule, from llama.cpp: the longest token (in UTF-8 bytes) claims its places first, from left to right, then the next
longest in what is left. For vocabularies whose special tokens cannot overlap, which is nearly all, one scan for the
leftmost longest match gives the same, and that scan is linear in the text however many special tokens there are.
"""

import re
from collections.abc import Iterable, Mapping


class SpecialTokens:
    """The special tokens of one vocabulary, or some of them, ready to be searched for."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """`ids`: text of each token -> its id. An empty text is never found."""
        self._ids = {text: token_id for text, token_id in ids.items() if text}
        self._by_size = sorted(self._ids, key=lambda text: (-len(text.encode()), self._ids[text]))
        self._scan = None if _can_overlap(self._ids) else re.compile(_pattern(sorted(self._ids)))

    def split(self, text: str) -> list[str | int]:
        """Cut `text` into plain pieces, none empty, and the ids of special tokens between them."""
        if not self._ids or not text:
            return [text] if text else []
        if self._scan is None:
            return self._split_by_size(text)
        pieces: list[str | int] = []
        done = 0
        for match in self._scan.finditer(text):
            if match.start() > done:
                pieces.append(text[done : match.start()])
            pieces.append(self._ids[match.group()])
            done = match.end()
        if done < len(text):
            pieces.append(text[done:])
        return pieces

    def _split_by_size(self, text: str) -> list[str | int]:
        pieces: list[str | int] = [text]
        for special in self._by_size:
            if special not in text:
                continue
            cut: list[str | int] = []
            for piece in pieces:
                if isinstance(piece, int) or special not in piece:
                    cut.append(piece)
                    continue
                for index, part in enumerate(piece.split(special)):
                    if index:
                        cut.append(self._ids[special])
                    if part:
                        cut.append(part)
            pieces = cut
        return pieces


def _can_overlap(texts: Iterable[str]) -> bool:
    """Whether an end of one text is the beginning of another, or of itself.

    Runs of one character (Gemma has them for newlines, tabs and spaces) overlap only each other, and there both
    rules take the longest first from the left; they do not count.
    """
    texts = list(texts)
    prefixes: dict[str, bool] = {}  # prefix -> whether a text that is no run begins so
    for text in texts:
        is_run = len(set(text)) == 1
        for size in range(1, len(text) + 1):
            prefixes[text[:size]] = prefixes.get(text[:size], False) or not is_run
    for text in texts:
        is_run = len(set(text)) == 1
        for start in range(1, len(text)):
            begins = prefixes.get(text[start:])
            if begins or (begins is not None and not is_run):
                return True
    return False


def _pattern(texts: list[str]) -> str:
    """A regular expression that matches the longest of the sorted, distinct `texts`, sharing common beginnings."""
    if not texts:
        return r"(?!)"
    head = _common_prefix(texts[0], texts[-1])
    rests = [text[len(head) :] for text in texts]
    optional = rests[0] == ""
    groups: dict[str, list[str]] = {}
    for rest in rests[1:] if optional else rests:
        groups.setdefault(rest[0], []).append(rest)
    if not groups:
        return re.escape(head)
    branches = "|".join(_pattern(group) for group in groups.values())
    return f"{re.escape(head)}(?:{branches}){'?' if optional else ''}"


def _common_prefix(first: str, last: str) -> str:
    size = 0
    while size < min(len(first), len(last)) and first[size] == last[size]:
        size += 1
    return first[:size]
