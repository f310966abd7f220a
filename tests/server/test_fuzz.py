"""Random bodies never get a 5xx, and never leave anything running."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.fakes import FakeOrchestrator, fake_service
from twinjet.server.app import create_app
from twinjet.server.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

FIELDS = {
    "/v1/completions": CompletionBody.__struct_fields__,
    "/v1/chat/completions": ChatBody.__struct_fields__,
    "/tokenize": TokenizeBody.__struct_fields__,
    "/detokenize": DetokenizeBody.__struct_fields__,
}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40])
    | st.floats(allow_nan=True)
    | st.text(max_size=6)
    | st.sampled_from(["fake", "user", "text", "\ud800", "</s>", "none"])
)
parts = st.fixed_dictionaries({"type": st.just("text") | scalars}, optional={"text": scalars, "image_url": scalars})
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]) | scalars},
        optional={"content": st.text(max_size=5) | st.lists(parts, max_size=2) | scalars, "name": scalars},
    )
    | scalars,
    max_size=3,
)
prompts = (
    st.text(max_size=5)
    | st.lists(st.integers(0, 263), max_size=5)
    | st.lists(st.lists(st.integers(-1, 263), max_size=3), max_size=3)
    | st.lists(st.text(max_size=3), max_size=3)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


LIKELY = {"messages": messages | values, "prompt": prompts | values, "tokens": prompts | values}


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """The needed field, mostly right, and a few others of any kind."""
    needed = {name: kind for name, kind in LIKELY.items() if name in FIELDS[path]}
    names = st.sampled_from([*(name for name in FIELDS[path] if name not in needed), "other"])
    others = st.dictionaries(names, st.integers(1, 4) | st.booleans() | values, max_size=4)
    return st.tuples(st.fixed_dictionaries(needed), others).map(lambda pair: {**pair[1], **pair[0]})


@pytest.fixture(scope="module")
def client() -> Iterator[tuple[asyncio.Runner, httpx.AsyncClient, FakeOrchestrator]]:
    orchestrator = FakeOrchestrator()
    app = create_app(fake_service(orchestrator))
    with asyncio.Runner() as runner:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")
        yield runner, client, orchestrator
        runner.run(client.aclose())
        app.state.routes.close()


Client = tuple[asyncio.Runner, httpx.AsyncClient, FakeOrchestrator]
fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(client: Client, path: str, body: bytes) -> int:
    runner, http, orchestrator = client
    answer = runner.run(http.post(path, content=body))
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text
    else:
        assert answer.json()
    assert orchestrator.running == {}
    return answer.status_code


@pytest.mark.parametrize("path", FIELDS)
def test_random_fields(client: Client, path: str):
    @fuzz
    @given(bodies(path))
    def run(body: dict[str, Any]) -> None:
        check(client, path, json.dumps(body).encode())

    run()


@pytest.mark.parametrize("path", FIELDS)
def test_random_bytes(client: Client, path: str):
    good = json.dumps({"prompt": "abc", "max_tokens": 3, "stop": ["\u20ac"], "temperature": 0.5}).encode()

    @fuzz
    @given(st.binary(max_size=40), st.integers(0, len(good)), st.integers(0, len(good)))
    def run(junk: bytes, start: int, stop: int) -> None:
        check(client, path, good[:start] + junk + good[stop:])

    run()


def test_the_fuzz_also_makes_good_requests(client: Client):
    statuses = set()

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(bodies("/v1/completions"))
    def run(body: dict[str, Any]) -> None:
        statuses.add(check(client, "/v1/completions", json.dumps(body).encode()))

    run()
    assert {200, 400} <= statuses
