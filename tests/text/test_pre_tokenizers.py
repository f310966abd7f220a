"""Where each pre-tokenizer cuts, against llama.cpp and, where that only approximates, the model's own expression."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.text.vocabularies import byte_level_tokenizer
from twinjet.core.errors import CheckpointError
from twinjet.text.pre_tokenizers import PRE_TOKENIZERS, pre_tokenizer_named

_GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "words.json").read_text())
_WORDS = {name: group["words"] for group in _GOLDEN["groups"] for name in group["names"]}


def _cut(name: str, text: str) -> list[str]:
    return [word for word, _ in pre_tokenizer_named(name).build().pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_words_equal_llama_cpp(name: str) -> None:
    for text, words in zip(_GOLDEN["texts"], _WORDS[name], strict=True):
        assert _cut(name, text) == words


@pytest.mark.parametrize("name", ["tekken", "gpt-4o"])
def test_case_and_marks_outside_ascii(name: str) -> None:
    # llama.cpp sees neither: it cuts "Ä|PFEL" and before every mark.
    assert _cut(name, "ÄPFELMus ÉcoleNormale हिन्दी") == ["ÄPFELMus", " École", "Normale", " हिन्दी"]


@pytest.mark.parametrize("name", ["superbpe", "kimi-k2", "gemma4", "jina-v2-de", "", "GPT-2"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"pre-tokenizer '{name}'"):
        pre_tokenizer_named(name)


_RUNS = ["a", "A", "É", " ", "\n", "\r\n", " \n", "1", "!", " !", "\u0301", "漢", "aA"]


@pytest.mark.parametrize("name", {p.patterns: name for name, p in PRE_TOKENIZERS.items()}.values())
def test_long_runs_take_linear_time(name: str) -> None:
    """Quadratic work would take minutes; a run is tried alone, and before a digit, where look-aheads fail."""
    tokenizer = byte_level_tokenizer(pre=name)
    for run in _RUNS:
        text = run * 10_000 + "1"
        assert tokenizer.decode(tokenizer.encode(text)) == text
