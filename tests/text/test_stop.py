"""Stop strings, against a search that looks at the whole text after every character."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinjet.core.errors import InvalidRequest
from twinjet.text.stop import MAX_STOP_CHARACTERS, StopMatcher

_LETTERS = st.sampled_from("abc")
_STOPS = st.lists(st.text(_LETTERS, min_size=1, max_size=5), max_size=4)
_PARTS = st.lists(st.text(_LETTERS, max_size=6), max_size=12)


def _naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(_STOPS, _PARTS)
def test_equals_naive_search_however_the_text_is_cut(stops: list[str], parts: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    seen = ""
    expected, stop = _naive("".join(parts), stops)
    for part in parts:
        scan = matcher.push(part)
        shown += scan.text
        seen += part
        # No character of a stop string ever leaks.
        assert expected.startswith(shown)
        assert scan.stop == matcher.stop
        if matcher.stop is None:
            # Nothing is withheld that cannot become a stop string.
            withheld = seen[len(shown) :]
            assert not withheld or any(s.startswith(withheld) for s in stops)
    shown += matcher.finish()
    assert (shown, matcher.stop) == (expected, stop)


def test_the_string_that_is_complete_first_wins() -> None:
    # "bc" is there one character before "abcd" can be.
    matcher = StopMatcher(["abcd", "bc"])
    scan = matcher.push("xabcd")
    assert (scan.text, scan.stop) == ("xa", "bc")


def test_of_strings_that_end_together_the_longest_wins() -> None:
    scan = StopMatcher(["bc", "abc"]).push("xabc")
    assert (scan.text, scan.stop) == ("x", "abc")


def test_a_beginning_is_withheld_and_released() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("hi\nUs").text == "hi"
    assert matcher.push("\nUs").text == "\nUs"
    assert matcher.push("ual").text == "\nUsual"
    assert matcher.push(" \n").text == " "
    assert matcher.finish() == "\n"


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb").text == "a"
    assert matcher.push("cd").text == ""
    assert matcher.finish() == ""


def test_without_stop_strings_nothing_is_withheld() -> None:
    assert StopMatcher([]).push("anything").text == "anything"


def test_empty_and_oversized_stop_strings_are_refused() -> None:
    for stops in (["a", ""], ["a" * MAX_STOP_CHARACTERS, "b"]):
        with pytest.raises(InvalidRequest) as caught:
            StopMatcher(stops)
        assert caught.value.param == "stop"


def test_a_text_of_beginnings_takes_linear_time() -> None:
    matcher = StopMatcher(["a" * 5000 + "b"])
    began = time.process_time()
    assert matcher.push("a" * 500_000).text == "a" * 495_000
    assert time.process_time() - began < 5
