"""Ids equal to those of independent implementations, on the real vocabularies."""

import json
from pathlib import Path
from typing import Any

import pytest

from twinjet.core.vocab import VocabSpec
from twinjet.text.chat import encode_chat
from twinjet.text.template import ChatTemplate
from twinjet.text.tokenizer import Tokenizer

_GOLDEN = Path(__file__).parents[1] / "golden"


def _cases(name: str) -> list[dict[str, Any]]:
    return json.loads((_GOLDEN / name).read_text())["cases"]


@pytest.mark.parametrize("case", _cases("smollm2-135m-tokenize.json"), ids=lambda case: ascii(case["text"][:20]))
def test_smollm2_tokens(smollm2_tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    _check_tokens(smollm2_tokenizer, case)


@pytest.mark.parametrize("case", _cases("gemma3-270m-tokenize.json"), ids=lambda case: ascii(case["text"][:20]))
def test_gemma3_tokens(gemma3_tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    _check_tokens(gemma3_tokenizer, case)


def _check_tokens(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.encode(case["text"], add_special=True) == case["ids_special"]
    assert tokenizer.decode(case["ids"], skip_special=False) == case["text"]


def test_smollm2_chats(smollm2_vocab: VocabSpec, smollm2_tokenizer: Tokenizer) -> None:
    template = ChatTemplate.from_vocab(smollm2_vocab, smollm2_tokenizer)
    assert template is not None
    chats = [case for case in _cases("smollm2-135m.json") if "messages" in case]
    assert len(chats) >= 3
    for case in chats:
        assert encode_chat(smollm2_tokenizer, template, case["messages"]) == case["prompt_ids"], case["name"]


@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_generated_text(model: str, smollm2_tokenizer: Tokenizer, gemma3_tokenizer: Tokenizer) -> None:
    tokenizer = smollm2_tokenizer if model.startswith("smollm2") else gemma3_tokenizer
    for case in _cases(f"{model}.json"):
        assert tokenizer.decode(case["output_ids"], skip_special=False, continuation=True) == case["text_out"]


def test_a_control_token_never_comes_from_plain_text(smollm2_tokenizer: Tokenizer, gemma3_tokenizer: Tokenizer) -> None:
    for tokenizer in (smollm2_tokenizer, gemma3_tokenizer):
        texts = [tokenizer.token_text(i) for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
        ids = tokenizer.encode(" ".join(texts), parse_special=False)
        assert not any(map(tokenizer.is_special, ids))
        assert tokenizer.decode(ids) == " ".join(texts)
        assert sum(map(tokenizer.is_special, tokenizer.encode(" ".join(texts)))) == len(texts)
