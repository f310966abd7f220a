"""From chat messages to prompt ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinjet.text.template import ChatTemplate
from twinjet.text.tokenizer import Tokenizer


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **kwargs: Any
) -> list[int]:
    """Render `messages` and encode them. `kwargs` are those of `ChatTemplate.render`. Raises `InvalidRequest`."""
    return encode_rendered_chat(tokenizer, template.render(messages, **kwargs))


def encode_rendered_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of what a chat template gave, special tokens parsed, with the BOS that the model's file asks for.

    Many templates write BOS themselves; it is put in front only where this one did not, so that a prompt never begins
    with two. EOS is not added: a generation follows. Raises `InvalidRequest` if `text` is not valid Unicode.
    """
    ids = tokenizer.encode(text, parse_special=True)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids
