"""The official client against a live server: every answer parses, with the right values in it."""

import asyncio
from collections.abc import Iterator
from itertools import chain
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.server.fakes import CONTEXT
from tests.server.live import LiveServer

TEXT = "Hello world é€😀A"
"""The fake's reply for choice 0."""
CHAT: list[ChatCompletionMessageParam] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
NUM_CHAT_TOKENS = len("system:be brief") + len("user:hi") + len("assistant:") + 3 + 1
"""With a turn token before each, and BOS."""


@pytest.fixture
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: OpenAI):
    models = client.models.list().data
    assert [(m.id, m.object, m.created, m.owned_by) for m in models] == [("fake", "model", 1_700_000_000, "twinjet")]
    assert client.models.retrieve("fake") == models[0]
    assert models[0].model_dump()["max_model_len"] == CONTEXT
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_completion(client: OpenAI):
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=50)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (TEXT, "stop", 0, None)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.system_fingerprint is not None
    assert answer.usage is not None
    # BOS and three bytes; EOS is delivered, and counts.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 13, 17)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_completion_takes_16_tokens_unless_told(client: OpenAI):
    answer = client.completions.create(model="fake", prompt="abc", extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    # EOS has no text to show, also when it ended nothing.
    assert answer.choices[0].text == TEXT + "..."


def test_completion_defaults_to_what_is_left_of_the_context(client: OpenAI):
    answer = client.completions.create(model="fake", prompt=[65] * (CONTEXT - 3))
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


@pytest.mark.parametrize("n", [1, 2])
def test_completion_of_many_prompts(client: OpenAI, n: int):
    answer = client.completions.create(model="fake", prompt=["abc", "d"], n=n, max_tokens=50)
    assert [c.index for c in answer.choices] == list(range(2 * n))
    assert [c.text for c in answer.choices] == [TEXT[:-1] + letter for letter in "AB"[:n]] * 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 6
    assert answer.usage.completion_tokens == 13 * 2 * n


def test_completion_of_ids_and_of_many_ids(client: OpenAI):
    one = client.completions.create(model="fake", prompt=[1, 2, 3], max_tokens=50)
    many = client.completions.create(model="fake", prompt=[[1, 2, 3], [4]], max_tokens=50)
    assert one.choices[0].text == TEXT
    assert [c.text for c in many.choices] == [TEXT, TEXT]
    assert one.usage is not None
    assert many.usage is not None
    assert (one.usage.prompt_tokens, many.usage.prompt_tokens) == (3, 4)


def test_completion_stream(client: OpenAI):
    chunks = list(
        client.completions.create(
            model="fake", prompt="abc", max_tokens=50, stream=True, stream_options={"include_usage": True}
        )
    )
    *parts, last = chunks
    assert "".join(c.choices[0].text for c in parts) == TEXT
    assert [c.choices[0].finish_reason for c in parts] == [None] * 12 + ["stop"]
    assert {c.id for c in chunks} == {chunks[0].id}
    assert {c.created for c in chunks} == {chunks[0].created}
    assert all(c.usage is None for c in parts)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 13)


def test_completion_stream_of_many(client: OpenAI):
    texts = dict.fromkeys(range(4), "")
    finished = []
    for chunk in client.completions.create(model="fake", prompt=["abc", "d"], n=2, max_tokens=50, stream=True):
        assert chunk.usage is None
        (choice,) = chunk.choices
        assert choice.index not in finished
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            finished.append(choice.index)
    assert texts == {index: TEXT[:-1] + "AB"[index % 2] for index in range(4)}
    assert sorted(finished) == [0, 1, 2, 3]


def test_completion_logprobs(client: OpenAI):
    whole = client.completions.create(model="fake", prompt="abc", max_tokens=50, logprobs=2).choices[0].logprobs
    assert whole is not None
    assert whole.tokens is not None
    assert whole.text_offset is not None
    assert whole.top_logprobs is not None
    split = ["bytes:\\xf0\\x9f", "bytes:\\x98\\x80"]
    assert whole.tokens == [*"Hel", "lo wo", *"rld ", "é€", *split, "A", "</s>"]
    assert whole.token_logprobs == [-0.25] * 13
    assert whole.top_logprobs[0] == {"H": -0.25, "I": -1.5, "J": -2.5}
    for token, offset in zip(whole.tokens, whole.text_offset, strict=True):
        if token not in split and token != "</s>":
            assert TEXT[offset : offset + len(token)] == token
    assert whole.text_offset[-4:] == [14, 14, 15, 16]

    streamed = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(model="fake", prompt="abc", max_tokens=50, logprobs=2, stream=True)
    ]
    assert list(chain.from_iterable(part.text_offset or [] for part in streamed if part)) == whole.text_offset
    assert list(chain.from_iterable(part.tokens or [] for part in streamed if part)) == whole.tokens
    assert list(chain.from_iterable(part.top_logprobs or [] for part in streamed if part)) == whole.top_logprobs


def test_completion_logprobs_of_the_chosen_token_only(client: OpenAI):
    logprobs = client.completions.create(model="fake", prompt="abc", max_tokens=1, logprobs=0).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs == [{"H": -0.25}]


def test_an_infinite_logprob_is_sent_as_a_number(client: OpenAI):
    answer = client.chat.completions.create(
        model="fake",
        messages=CHAT,
        max_tokens=1,
        logprobs=True,
        top_logprobs=20,
    )
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].top_logprobs[-1].logprob == -9999.0


def test_chat(client: OpenAI):
    answer = client.chat.completions.create(model="fake", messages=CHAT)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == NUM_CHAT_TOKENS
    # What came back can be sent again.
    sent_back: Any = choice.message.model_dump()
    again: list[ChatCompletionMessageParam] = [*CHAT, sent_back, {"role": "user", "content": "go on"}]
    assert client.chat.completions.create(model="fake", messages=again).choices[0].message.content == TEXT


def test_chat_takes_what_is_left_of_the_context(client: OpenAI):
    answer = client.chat.completions.create(model="fake", messages=CHAT, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (CONTEXT, "length")


def test_chat_stream(client: OpenAI):
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=CHAT,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *parts, last = chunks
    for index in range(2):
        mine = [c.choices[0] for c in parts if c.choices[0].index == index]
        assert "".join(c.delta.content or "" for c in mine) == TEXT[:-1] + "AB"[index]
        assert [c.delta.role for c in mine] == ["assistant"] + [None] * 12
        assert [c.finish_reason for c in mine] == [None] * 12 + ["stop"]
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (NUM_CHAT_TOKENS, 26)


def test_chat_logprobs(client: OpenAI):
    whole = (
        client.chat.completions.create(model="fake", messages=CHAT, logprobs=True, top_logprobs=2).choices[0].logprobs
    )
    assert whole is not None
    assert whole.content is not None
    assert [t.token for t in whole.content[-5:]] == ["é€", "\\xf0\\x9f", "\\x98\\x80", "A", "</s>"]
    assert b"".join(bytes(t.bytes or []) for t in whole.content[:-1]).decode() == TEXT
    first = whole.content[0]
    assert (first.token, first.logprob, first.bytes) == ("H", -0.25, [72])
    assert [(t.token, t.logprob, t.bytes) for t in first.top_logprobs] == [("I", -1.5, [73]), ("J", -2.5, [74])]

    streamed = []
    for chunk in client.chat.completions.create(
        model="fake", messages=CHAT, logprobs=True, top_logprobs=2, stream=True
    ):
        logprobs = chunk.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content) == 1
        streamed += logprobs.content
    assert streamed == whole.content


def test_chat_logprobs_without_alternatives(client: OpenAI):
    answer = client.chat.completions.create(model="fake", messages=CHAT, max_completion_tokens=2, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert [(t.token, t.top_logprobs) for t in answer.choices[0].logprobs.content] == [("H", []), ("e", [])]


def test_errors_have_the_clients_own_classes(client: OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=CHAT)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="a" * CONTEXT)
    assert caught.value.code == "context_length_exceeded"


def test_async_client(server: LiveServer):
    async def main() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def streamed() -> str:
                text = ""
                async for chunk in await client.chat.completions.create(model="fake", messages=CHAT, stream=True):
                    text += chunk.choices[0].delta.content or ""
                return text

            async def whole() -> str:
                return (await client.completions.create(model="fake", prompt="x", max_tokens=50)).choices[0].text

            texts = await asyncio.gather(*(streamed() if i % 2 else whole() for i in range(24)))
            assert texts == [TEXT] * 24

    asyncio.run(main())
    assert server.orchestrator.running == {}
