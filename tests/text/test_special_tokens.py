"""Special tokens are found as llama.cpp finds them."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinjet.text.special_tokens import SpecialTokens


def _longest_first(text: str, ids: dict[str, int]) -> list[str | int]:
    """llama.cpp's procedure, written down literally: per token, longest first, over all pieces of text left."""
    pieces: list[str | int] = [text] if text else []
    for special in sorted(ids, key=lambda special: (-len(special.encode()), ids[special])):
        at = 0
        while at < len(pieces):
            piece = pieces[at]
            if isinstance(piece, str) and special in piece:
                left, _, right = piece.partition(special)
                pieces[at : at + 1] = [*([left] if left else []), ids[special], *([right] if right else [])]
            at += 1
    return pieces


_TEXTS = st.text(st.sampled_from("ab<>\n"), min_size=1, max_size=5)


@given(st.lists(_TEXTS, unique=True, max_size=6), st.text(st.sampled_from("ab<>\n"), max_size=30))
def test_equals_longest_first(specials: list[str], text: str) -> None:
    ids = {special: index for index, special in enumerate(specials)}
    assert SpecialTokens(ids).split(text) == _longest_first(text, ids)


def _runs(character: str) -> list[str]:
    return [character * size for size in (1, 2, 3, 5, 8)]


@given(st.text(st.sampled_from("x\n\t<"), max_size=40))
def test_runs_and_tags_equal_longest_first(text: str) -> None:
    """The shape of Gemma's vocabulary."""
    ids = {special: index for index, special in enumerate([*_runs("\n"), *_runs("\t"), "<x", "<x<x>"])}
    assert SpecialTokens(ids).split(text) == _longest_first(text, ids)


def test_no_special_tokens() -> None:
    assert SpecialTokens({}).split("<s>") == ["<s>"]
    assert SpecialTokens({"": 0}).split("a") == ["a"]
    assert SpecialTokens({"<s>": 0}).split("") == []


@pytest.mark.parametrize("text", ["\n" * 300_000, "<|t1|>" * 50_000, "a" * 300_000, "<" * 300_000])
def test_thousands_of_special_tokens_in_a_long_text(text: str) -> None:
    ids = {
        special: i for i, special in enumerate([*("\n" * n for n in range(1, 32)), *(f"<|t{i}|>" for i in range(6000))])
    }
    special_tokens = SpecialTokens(ids)
    began = time.process_time()
    pieces = special_tokens.split(text)
    assert time.process_time() - began < 5
    names = list(ids)
    assert "".join(piece if isinstance(piece, str) else names[piece] for piece in pieces) == text
