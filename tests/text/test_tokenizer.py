"""Encoding and decoding rules, on vocabularies small enough to work out by hand."""

import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.vocabularies import (
    BOS,
    BYTE_LEVEL,
    EOS,
    HE,
    HELL,
    LL,
    PAD,
    SCORED,
    SPACE_HE,
    SPACES,
    SPM_FIRST_BYTE,
    SPM_PIECES,
    SPM_THINK,
    TH,
    THE,
    THINK,
    TURN,
    TURN_X,
    byte_level_tokenizer,
    scored_tokenizer,
)
from twinjet.core.errors import CheckpointError, InvalidRequest
from twinjet.core.vocab import TokenType
from twinjet.text.tokenizer import Tokenizer

_BYTE_LEVEL = byte_level_tokenizer()
_SCORED = scored_tokenizer()


# Byte-level BPE


def test_merges_go_by_rank() -> None:
    # "h e", "l l", "he ll"; "Ġ he" ranks after them and finds no "he" left.
    assert _BYTE_LEVEL.encode("hello hello") == [HELL, ord("o"), ord(" "), HELL, ord("o")]
    # "h e" ranks before "t h", which leaves "t he".
    assert _BYTE_LEVEL.encode("the he") == [THE, SPACE_HE]
    assert _BYTE_LEVEL.encode("th ll") == [TH, ord(" "), LL]


def test_a_merge_crosses_no_word() -> None:
    # Two spaces before a word: the second belongs to the word.
    assert _BYTE_LEVEL.encode("  he") == [ord(" "), SPACE_HE]
    assert _BYTE_LEVEL.encode("   ") == [SPACES, ord(" ")]


def test_ignore_merges_takes_whole_words() -> None:
    changes = {"merges": ("l l",), "tokens": (*BYTE_LEVEL.tokens[:-1], "qqq")}
    types = (*BYTE_LEVEL.token_types[:-1], TokenType.NORMAL)
    assert byte_level_tokenizer(pre="llama-bpe", token_types=types, **changes).encode("qqq") == [PAD]
    assert byte_level_tokenizer(pre="gpt-2", token_types=types, **changes).encode("qqq") == [ord("q")] * 3


def test_bytes_that_the_vocabulary_lacks_are_left_out_and_keep_neighbours_apart() -> None:
    tokens = tuple("<no-x>" if text == "x" else text for text in BYTE_LEVEL.tokens)
    tokenizer = byte_level_tokenizer(tokens=tokens)
    assert tokenizer.encode("hxe") == [ord("h"), ord("e")]
    assert tokenizer.encode("he") == [HE]


# SentencePiece


def test_the_best_score_is_merged_first() -> None:
    # "bc" (-1) before "ab" (-2); then "a" and "bc" give "abc".
    tokenizer = scored_tokenizer(add_space_prefix=False)
    assert tokenizer.encode("abc") == [SPM_PIECES["abc"]]
    # Here "bc", then "▁a" (-3) before "abc" (-5).
    assert tokenizer.encode(" abc") == [SPM_PIECES["▁a"], SPM_PIECES["bc"]]
    assert tokenizer.encode(" ab") == [SPM_PIECES["▁ab"]]


def test_unknown_characters_become_bytes() -> None:
    tokenizer = scored_tokenizer(add_space_prefix=False)
    assert tokenizer.encode("é") == [SPM_PIECES["é"]]
    assert tokenizer.encode("ö") == [SPM_FIRST_BYTE + byte for byte in "ö".encode()]


def test_space_prefix() -> None:
    assert _SCORED.encode("a") == [SPM_PIECES["▁a"]]
    assert _SCORED.encode("") == []
    assert _SCORED.encode("", add_special=True) == [1]
    # Again after a special token, as llama.cpp does.
    assert _SCORED.encode("a</s>a") == [SPM_PIECES["▁a"], 2, SPM_PIECES["▁a"]]
    assert _SCORED.decode(_SCORED.encode("a")) == "a"
    assert _SCORED.decode(_SCORED.encode(" a")) == " a"
    assert _SCORED.decode([1, SPM_PIECES["▁a"]]) == "a"
    assert _SCORED.decode([SPM_PIECES["▁a"], SPM_PIECES["▁a"]]) == "a a"
    assert _SCORED.decode([SPM_PIECES["▁a"]], continuation=True) == " a"
    assert scored_tokenizer(add_space_prefix=False).decode([SPM_PIECES["▁a"]]) == " a"


# Both


@given(st.text(st.sampled_from("ab ché▁<|>\n\0x"), max_size=40) | st.text(max_size=40))
def test_any_text_comes_back(text: str) -> None:
    assert _BYTE_LEVEL.decode(_BYTE_LEVEL.encode(text, parse_special=False)) == text
    # SentencePiece writes a space as ▁, so it cannot tell the two apart.
    assert _SCORED.decode(_SCORED.encode(text, parse_special=False)) == text.replace("▁", " ")


def test_special_tokens_in_text() -> None:
    assert _BYTE_LEVEL.encode("he<|turn|>he") == [HE, TURN, HE]
    assert _BYTE_LEVEL.encode("<|turn|>xhe") == [TURN_X, HE]  # the longest
    assert TURN not in _BYTE_LEVEL.encode("he<|turn|>he", parse_special=False)
    assert _BYTE_LEVEL.decode(_BYTE_LEVEL.encode("he<|turn|>he", parse_special=False)) == "he<|turn|>he"


@pytest.mark.parametrize("parse_special", [True, False])
def test_user_defined_tokens_are_always_tokens(parse_special: bool) -> None:
    assert _BYTE_LEVEL.encode("he[think]he", parse_special=parse_special) == [HE, THINK, HE]
    assert _SCORED.encode("[think]", parse_special=parse_special) == [SPM_THINK]
    assert _BYTE_LEVEL.decode([HE, THINK]) == "he[think]"


def test_an_end_token_is_special_whatever_its_type() -> None:
    tokenizer = byte_level_tokenizer(end_ids=(EOS, THINK))
    assert tokenizer.is_special(THINK)
    assert tokenizer.decode([HE, THINK]) == "he"
    assert THINK not in tokenizer.encode("[think]", parse_special=False)


def test_bos_and_eos() -> None:
    assert _BYTE_LEVEL.encode("he", add_special=True) == [BOS, HE]
    assert byte_level_tokenizer(add_eos=True).encode("he", add_special=True) == [BOS, HE, EOS]
    assert byte_level_tokenizer(add_bos=False).encode("he", add_special=True) == [HE]
    without = byte_level_tokenizer(bos_id=None)
    assert without.encode("he", add_special=True) == [HE]
    assert not without.add_bos


def test_decoding_specials_padding_and_broken_bytes() -> None:
    assert _BYTE_LEVEL.decode([BOS, HE, EOS]) == "he"
    assert _BYTE_LEVEL.decode([BOS, HE, EOS], skip_special=False) == "<bos>he<eos>"
    assert _BYTE_LEVEL.decode([HE, PAD, HE]) == "hehe"
    assert _BYTE_LEVEL.decode([0xE2, 0x82]) == "�"
    # A skipped token within a character does not break it.
    assert _BYTE_LEVEL.decode([0xE2, 0x82, TURN, 0xAC]) == "€"
    assert _BYTE_LEVEL.token_bytes(0xE2) == b"\xe2"
    assert _BYTE_LEVEL.token_bytes(SPACE_HE) == b" he"
    assert _SCORED.token_bytes(SPM_FIRST_BYTE + 0xE2) == b"\xe2"
    assert _SCORED.token_text(SPM_PIECES["▁a"]) == " a"
    assert _BYTE_LEVEL.token_text(TURN) == "<|turn|>"


def test_added_token_outside_the_byte_alphabet_is_its_own_text() -> None:
    tokens = (*BYTE_LEVEL.tokens[:-1], "思 考")
    types = (*BYTE_LEVEL.token_types[:-1], TokenType.NORMAL)
    assert byte_level_tokenizer(tokens=tokens, token_types=types).token_text(PAD) == "思 考"


@pytest.mark.parametrize("token_id", [-1, len(BYTE_LEVEL.tokens), 10**12])
def test_ids_outside_the_vocabulary(token_id: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{token_id} is outside the vocabulary of {len(BYTE_LEVEL.tokens)}"):
        _BYTE_LEVEL.decode([HE, token_id])
    with pytest.raises(InvalidRequest):
        _BYTE_LEVEL.token_bytes(token_id)


@pytest.mark.parametrize("tokenizer", [_BYTE_LEVEL, _SCORED])
def test_unpaired_surrogates(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"U\+D83D at character 2"):
        tokenizer.encode("ab\ud83d")


# What a file may get wrong


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"pre": "no-such"}, "pre-tokenizer 'no-such'"),
        ({"pre": None}, "does not name its pre-tokenizer"),
        ({"token_types": BYTE_LEVEL.token_types[1:]}, "token types"),
        ({"tokens": (*BYTE_LEVEL.tokens[:-1], "he")}, "'he' more than once"),
        ({"merges": ("h",)}, "merge 'h'"),
        ({"merges": ("",)}, "merge ''"),
        ({"merges": ("h zz",)}, "merges do not fit"),
        ({"bos_id": 10**6}, "BOS token's id 1000000 is outside"),
        ({"end_ids": (-1,)}, "end token's id -1 is outside"),
    ],
)
def test_inconsistent_byte_level_vocabularies(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        byte_level_tokenizer(**changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"scores": SCORED.scores[1:]}, "scores"),
        ({"unknown_id": None}, "unknown token"),
        ({"tokens": (*SCORED.tokens[:3], "<0xZZ>", *SCORED.tokens[4:])}, "'<0xZZ>'"),
        ({"tokens": (*SCORED.tokens[:3], "<0x5>", *SCORED.tokens[4:])}, "'<0x5>'"),
    ],
)
def test_inconsistent_scored_vocabularies(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        scored_tokenizer(**changes)


def test_a_vocabulary_without_bytes_falls_back_to_unknown() -> None:
    keep = [i for i, kind in enumerate(SCORED.token_types) if kind != TokenType.BYTE]
    tokenizer = Tokenizer(
        replace(
            SCORED,
            tokens=tuple(SCORED.tokens[i] for i in keep),
            token_types=tuple(SCORED.token_types[i] for i in keep),
            scores=tuple(SCORED.scores[i] for i in keep),
        )
    )
    assert tokenizer.encode("aö")[-1] == 0


# Long texts


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
@pytest.mark.parametrize("unit", ["a", " ", "\n", "漢", "abcdefghij", "it's 5 o'clock\n"])
def test_a_megabyte(model: str, unit: str, smollm2_tokenizer: Tokenizer, gemma3_tokenizer: Tokenizer) -> None:
    """One word of a million characters is as good as many; quadratic work would take minutes."""
    tokenizer = smollm2_tokenizer if model == "smollm2" else gemma3_tokenizer
    text = unit * (1_000_000 // len(unit.encode()))
    began = time.process_time()
    ids = tokenizer.encode(text)
    assert time.process_time() - began < 20
    assert tokenizer.decode(ids) == text


@pytest.mark.slow
def test_a_run_that_the_regex_engine_gives_up_on_is_the_requests_fault() -> None:
    tokenizer = byte_level_tokenizer(pre="llama-bpe")
    with pytest.raises(InvalidRequest, match="longest run"):
        tokenizer.encode(" " * 12_000_000 + "x")
    assert tokenizer.encode("he") == [HE]


def test_encoding_leaves_other_threads_running(smollm2_tokenizer: Tokenizer) -> None:
    """The server encodes beside its event loop, which must go on meanwhile."""
    done = threading.Event()
    ticks = 0

    def encode() -> None:
        smollm2_tokenizer.encode("hello world " * 40_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.is_set():
        time.sleep(0.001)
        ticks += 1
    thread.join()
    assert ticks > 10
