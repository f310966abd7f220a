"""Text as it streams: joined it is the decoded whole, cut at the first stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.vocabularies import (
    EOS,
    HE,
    HELL,
    SPACE_HE,
    SPM_FIRST_BYTE,
    SPM_PIECES,
    TURN,
    byte_level_tokenizer,
    scored_tokenizer,
)
from twinjet.core.errors import InvalidRequest
from twinjet.text.detokenize import Detokenizer
from twinjet.text.stream import TextDelta, TextStream
from twinjet.text.tokenizer import Tokenizer

_BYTE_LEVEL = byte_level_tokenizer()
_SCORED = scored_tokenizer()


def _groups(tokenizer: Tokenizer) -> st.SearchStrategy[list[list[int]]]:
    # Half of the ids are bytes, so that characters are whole, split, and broken.
    some = [b for character in "aé€😀" for b in character.encode()]
    first = 0 if tokenizer is _BYTE_LEVEL else SPM_FIRST_BYTE
    ids = st.sampled_from([first + byte for byte in some]) | st.integers(0, tokenizer.vocab_size - 1)
    return st.lists(st.lists(ids, max_size=6), max_size=10)


def _flat(groups: list[list[int]]) -> list[int]:
    return [token_id for group in groups for token_id in group]


@pytest.mark.parametrize("tokenizer", [_BYTE_LEVEL, _SCORED], ids=["bpe", "spm"])
@pytest.mark.parametrize("skip_special", [True, False])
@given(data=st.data())
def test_detokenizer_equals_decoding_all_at_once(tokenizer: Tokenizer, skip_special: bool, data: st.DataObject) -> None:
    groups = data.draw(_groups(tokenizer))
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    texts = [detokenizer.push(group) for group in groups]
    texts.append(detokenizer.finish())
    assert "".join(texts) == tokenizer.decode(_flat(groups), skip_special=skip_special, continuation=True)


def test_a_character_comes_whole_and_a_broken_one_at_once() -> None:
    detokenizer = Detokenizer(_BYTE_LEVEL)
    assert [detokenizer.push([byte]) for byte in "€".encode()] == ["", "", "€"]
    # The second byte cannot belong to the first.
    assert [detokenizer.push([byte]) for byte in b"\xe2a"] == ["", "�a"]
    assert detokenizer.push(b"\xf0\x9f") == ""
    assert detokenizer.finish() == "�"


def test_a_first_space_belongs_to_the_text() -> None:
    stream = TextStream(_SCORED)
    assert stream.push([SPM_PIECES["▁a"]]).text == " a"
    assert _SCORED.decode([SPM_PIECES["▁a"]], continuation=True) == " a"


_STOPS = st.lists(st.text(st.sampled_from("ahel é€😀�<"), min_size=1, max_size=4), max_size=3)


@pytest.mark.parametrize("include_stop", [False, True])
@given(stops=_STOPS, groups=_groups(_BYTE_LEVEL))
def test_stream_equals_cutting_the_whole(include_stop: bool, stops: list[str], groups: list[list[int]]) -> None:
    ids = _flat(groups)
    whole = _BYTE_LEVEL.decode(ids, continuation=True)
    ends = {whole.find(stop) + len(stop): stop for stop in sorted(stops, key=len) if stop in whole}
    stop = ends[min(ends)] if ends else None
    cut = whole if stop is None else whole[: whole.index(stop) + (len(stop) if include_stop else 0)]

    stream = TextStream(_BYTE_LEVEL, stops, include_stop=include_stop)
    deltas = [stream.push(group) for group in groups]
    deltas.append(stream.finish())
    assert "".join(delta.text for delta in deltas) == cut
    assert stream.stop == stop

    num_tokens = sum(delta.num_tokens for delta in deltas)
    if stop is None:
        assert num_tokens == len(ids)
    else:
        # The delivered tokens hold the stop string, and without the last of them it is not there.
        assert stop in _BYTE_LEVEL.decode(ids[:num_tokens], continuation=True)
        before = Detokenizer(_BYTE_LEVEL).push(ids[: num_tokens - 1])
        assert stop not in before


def test_tokens_are_counted_up_to_the_stop_string() -> None:
    stream = TextStream(_BYTE_LEVEL, ["lo"])
    assert stream.push([HE]) == TextDelta("he", None, 1)
    assert stream.push([SPACE_HE, ord("l")]) == TextDelta(" he", None, 2)
    assert stream.push([ord("o"), HELL, HE]) == TextDelta("", "lo", 1)
    assert stream.push([HE]) == TextDelta("", "lo", 0)
    assert stream.finish() == TextDelta("", "lo", 0)


def test_the_stop_string_is_shown_on_demand_and_what_follows_in_its_token_is_not() -> None:
    shown = TextStream(_BYTE_LEVEL, ["el"], include_stop=True).push([HELL, HE])
    assert shown == TextDelta("hel", "el", 1)
    assert TextStream(_BYTE_LEVEL, ["el"]).push([HELL]) == TextDelta("h", "el", 1)


def test_withheld_text_comes_at_the_end() -> None:
    stream = TextStream(_BYTE_LEVEL, ["hex"])
    assert stream.push([HE, EOS]) == TextDelta("", None, 2)
    assert stream.finish() == TextDelta("he", None, 0)


def test_a_broken_last_character_may_complete_a_stop_string() -> None:
    stream = TextStream(_BYTE_LEVEL, ["a�"])
    assert stream.push([ord("b"), ord("a"), 0xE2]) == TextDelta("b", None, 3)
    assert stream.finish() == TextDelta("", "a�", 0)


def test_special_tokens_are_shown_on_demand() -> None:
    assert TextStream(_BYTE_LEVEL).push([HE, TURN]).text == "he"
    assert TextStream(_BYTE_LEVEL, skip_special=False).push([HE, TURN]).text == "he<|turn|>"
    assert TextStream(_BYTE_LEVEL, ["<|turn|>"]).push([HE, TURN]).stop is None
    assert TextStream(_BYTE_LEVEL, ["<|turn|>"], skip_special=False).push([HE, TURN]).stop == "<|turn|>"


def test_an_id_outside_the_vocabulary() -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        TextStream(_BYTE_LEVEL).push([_BYTE_LEVEL.vocab_size])
