"""What a stream may and must hold, chunk by chunk, and what happens when its reader is slow or gone."""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import httpx
import pytest

from tests.server.fakes import EOS, FakeOrchestrator, default_script, fake_service, say
from tests.server.live import LiveServer, live_server
from twinjet.server.app import create_app

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEFAULT_IDS = [*b"Hel", 259, *b"rld ", 260, 261, 262, ord("A"), EOS]


def events_of(text: str) -> list[dict[str, Any]]:
    """The stream's events, its end checked."""
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def stream(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    answer = server.http.post(
        COMPLETIONS,
        json={"prompt": "abc", "max_tokens": 50, "stream": True, "return_token_ids": True, **body},
    )
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_headers(server: LiveServer):
    answer = server.http.post(COMPLETIONS, json={"prompt": "a", "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"


def test_one_chunk_for_each_step_also_while_text_is_withheld(server: LiveServer):
    chunks = stream(server)
    assert [c["choices"][0]["token_ids"] for c in chunks] == [[token] for token in DEFAULT_IDS]
    texts = [c["choices"][0]["text"] for c in chunks]
    assert texts == [*"Hel", "lo wo", *"rld ", "é€", "", "😀", "A", ""]
    assert [c["choices"][0].get("prompt_token_ids") for c in chunks] == [[256, 97, 98, 99]] + [None] * 12


def test_ids_only_where_asked_for(server: LiveServer):
    chunk = stream(server, return_token_ids=False)[0]
    assert "token_ids" not in chunk["choices"][0]
    assert "prompt_token_ids" not in chunk["choices"][0]
    assert "usage" not in chunk


@pytest.mark.parametrize("stop", [[], ["zz"], ["wor"], ["d é", "l"]])
def test_events_merged_for_a_slow_reader_come_apart_again(stop: list[str]):
    # The orchestrator may hand over several steps at once; a client must not see the difference.
    orchestrator = FakeOrchestrator()
    with live_server(orchestrator) as server:
        expected = stream(server, stop=stop, logprobs=1)
        orchestrator.merge = True
        merged = stream(server, stop=stop, logprobs=1)
    for chunk in [*expected, *merged]:
        del chunk["id"], chunk["created"]
    assert merged == expected


def test_tokens_before_a_failure_are_delivered_with_merged_events_too():
    orchestrator = FakeOrchestrator()
    orchestrator.merge, orchestrator.fail_at = True, 3
    with live_server(orchestrator) as server:
        *chunks, error = stream(server)
    assert [c["choices"][0]["text"] for c in chunks] == ["H", "e", "l"]
    assert error["choices"][0]["finish_reason"] == "error"
    assert error["error"]["code"] == "engine_error"


# --- stop strings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "stop", "text", "num_tokens"),
    [
        ("Hello world", ["lo w"], "Hel", 7),
        ("Hello world", ["world"], "Hello ", 11),
        ("Hello world", "H", "", 1),
        ("Hello world", ["xyz", "o"], "Hell", 5),
        ("aaab", ["aab"], "a", 4),
        ("a€b", ["€"], "a", 4),
        ("a😀b", ["😀b"], "a", 6),
        ("one two", ["two!"], "one two", 8),
        ("12", ["3"], "12", 3),
    ],
)
def test_a_stop_string_never_shows(reply: str, stop: list[str], text: str, num_tokens: int):
    orchestrator = FakeOrchestrator(lambda _: say(reply))
    with live_server(orchestrator) as server:
        chunks = stream(server, stop=stop, stream_options={"include_usage": True})
        whole = server.http.post(
            COMPLETIONS,
            json={"prompt": "abc", "max_tokens": 50, "stop": stop, "return_token_ids": True},
        ).json()
        wait_for(lambda: not orchestrator.running)
    *parts, last = chunks
    shown = ""
    for part in parts:
        shown += part["choices"][0]["text"]
        assert text.startswith(shown)
    assert shown == text == whole["choices"][0]["text"]
    assert [p["choices"][0]["finish_reason"] for p in parts] == [None] * (num_tokens - 1) + ["stop"]
    ids = list(chain.from_iterable(p["choices"][0]["token_ids"] for p in parts))
    assert ids == whole["choices"][0]["token_ids"] == say(reply)[:num_tokens]
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == num_tokens
    assert whole["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_ends_the_sequence_for_the_engine_too():
    orchestrator = FakeOrchestrator(lambda _: say("go STOP and on and on"))
    orchestrator.hang_at = 8
    with live_server(orchestrator) as server:
        # Would hang if the server waited for the orchestrator's own end.
        assert "".join(c["choices"][0]["text"] for c in stream(server, stop="STOP")) == "go "
        wait_for(lambda: not orchestrator.running)


def test_withheld_text_is_shown_at_the_end():
    with live_server(FakeOrchestrator(lambda _: [*b"say ST", 0xF0, 0x9F])) as server:
        chunks = stream(server, stop=["STOP", "\ufffd!"], max_tokens=8)
        assert "".join(c["choices"][0]["text"] for c in chunks) == "say ST\ufffd"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_stop_token_ids_end_and_show_nothing(server: LiveServer):
    chunks = stream(server, stop_token_ids=[ord("r")])
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Hello wo"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["token_ids"] == [ord("r")]
    # They go to the engine beside the model's own.
    assert server.orchestrator.submitted[-1].stop_token_ids == {ord("r"), EOS}


# --- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_error_ends_the_stream_in_order(path: str):
    orchestrator = FakeOrchestrator()
    orchestrator.fail_at = 2
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    with live_server(orchestrator) as server:
        answer = server.http.post(path, json={**prompt, "stream": True, "n": 3})
        *_, error = events_of(answer.text)
        assert [c["finish_reason"] for c in error["choices"]] == ["error"] * 3
        assert set(error["error"]) == {"message", "type", "param", "code"}
        assert "secret" not in answer.text
        whole = server.http.post(path, json=prompt)
        assert whole.status_code == 500
        assert whole.json()["error"]["code"] == "engine_error"
        assert "secret" not in whole.text
        wait_for(lambda: not orchestrator.running)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_bug_below_is_an_error_without_details(streamed: bool):
    orchestrator = FakeOrchestrator()
    orchestrator.broken = ValueError("/secret/path")
    with live_server(orchestrator) as server:
        answer = server.http.post(COMPLETIONS, json={"prompt": "a", "stream": streamed})
        assert "secret" not in answer.text
        error = events_of(answer.text)[-1]["error"] if streamed else answer.json()["error"]
        assert answer.status_code == (200 if streamed else 500)
        assert error["code"] == "internal_error"
        orchestrator.broken = None
        assert server.http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


# --- clients that go away, or read slowly ---------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_ends_its_sequences(streamed: bool, n: int):
    orchestrator = FakeOrchestrator()
    orchestrator.hang_at = 2
    with live_server(orchestrator) as server:
        body = json.dumps({"prompt": "abc", "stream": streamed, "n": n}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection((server.host, server.port)) as client:
            client.sendall(head + body)
            if streamed:
                received = b""
                while received.count(b"data: ") < 2 * n:
                    received += client.recv(65536)
            wait_for(lambda: len(orchestrator.running) == n)
            assert orchestrator.aborted == []
        wait_for(lambda: not orchestrator.running)
        assert len(orchestrator.aborted) == n
        page = server.http.get("/metrics").text
    assert f'twinjet_request_success_total{{finished_reason="cancelled"}} {n}.0' in page


def test_a_client_that_goes_away_before_its_body_is_whole_leaves_nothing(server: LiveServer):
    before = len(server.orchestrator.submitted)
    with socket.create_connection((server.host, server.port)) as client:
        client.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"prompt":')
    assert server.http.get("/health").status_code == 200
    assert len(server.orchestrator.submitted) == before


def test_what_waits_for_a_slow_reader_is_bounded():
    # A server that buffered for its reader would run the sequence to its end; one that does not, stops
    # asking for tokens when the connection is full.
    taken: list[int] = []

    async def main() -> None:
        orchestrator = FakeOrchestrator(lambda _: [*b"x" * 150])
        app = create_app(fake_service(orchestrator))
        full, sent = asyncio.Event(), []
        body = json.dumps({"prompt": "a", "max_tokens": 150, "stream": True}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 5:
                full.set()
                await asyncio.Event().wait()

        scope = {
            "type": "http",
            "method": "POST",
            "path": COMPLETIONS,
            "headers": [],
            "query_string": b"",
            "root_path": "",
            "http_version": "1.1",
        }
        task = asyncio.create_task(app(scope, receive, send))
        await full.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        taken.append(len(sent))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not orchestrator.running
        app.state.routes.close()

    asyncio.run(main())
    assert taken == [5]


# --- many at once -----------------------------------------------------------------------------------


def test_many_streams_at_once_stay_apart():
    orchestrator = FakeOrchestrator(lambda request: [*bytes(request.prompt_ids[1:]) * 3, EOS])
    orchestrator.step_s = 0.002

    async def main(url: str) -> None:
        async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=64)) as client:

            async def one(number: int) -> None:
                prompt = f"stream {number:02d};"
                body = {"prompt": prompt, "max_tokens": 90, "stream": True}
                text = ""
                async with client.stream("POST", url + COMPLETIONS, json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            text += json.loads(line[6:])["choices"][0]["text"]
                assert text == prompt * 3

            await asyncio.gather(*(one(number) for number in range(48)))

    with live_server(orchestrator) as server:
        asyncio.run(main(server.url))
        assert orchestrator.running == {}


# --- sampling ---------------------------------------------------------------------------------------


def test_sampling_reaches_the_engine(server: LiveServer):
    stream(server, temperature=0.5, top_p=0.9, top_k=7, min_p=0.05, seed=11, n=2, logprobs=3, max_tokens=4)
    first, second = server.orchestrator.submitted[-2:]
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.5, 0.9, 7)
    assert (first.sampling.min_p, first.sampling.seed, first.num_logprobs, first.max_tokens) == (0.05, 11, 3, 4)
    assert [first.sampling.choice, second.sampling.choice] == [0, 1]
    assert second.sampling.seed == 11
    assert first.stop_token_ids == {EOS}


def test_defaults_reach_the_engine_and_seeds_are_drawn(server: LiveServer):
    stream(server, top_k=-1, ignore_eos=True)
    stream(server, temperature=None, seed=None)
    first, second = server.orchestrator.submitted[-2:]
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (1.0, 1.0, 0)
    assert first.sampling.seed != second.sampling.seed
    assert first.stop_token_ids == frozenset()


def test_add_special_tokens_and_generation_prompt(server: LiveServer):
    stream(server, add_special_tokens=False)
    assert server.orchestrator.submitted[-1].prompt_ids == (97, 98, 99)
    body = {
        "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    }
    answer = server.http.post(CHAT, json={**body, "add_generation_prompt": False})
    assert answer.status_code == 200
    assert bytes(server.orchestrator.submitted[-1].prompt_ids[2:]) == b"system:a\nb"


def test_the_default_script_is_what_these_tests_think(server: LiveServer):
    assert default_script(server.orchestrator.submitted[-1]) == DEFAULT_IDS


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_cached_tokens_are_in_the_usage(path: str, merge: bool):
    orchestrator = FakeOrchestrator()
    orchestrator.merge = merge
    # The later choices of a prompt find what its first has computed: that is no news of the cache.
    orchestrator.num_cached = lambda request: 3 if request.sampling.choice == 0 else 100
    prompt = {"prompt": "abcd"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    body = {**prompt, "max_tokens": 4, "n": 2}
    with live_server(orchestrator) as server:
        whole = server.http.post(path, json=body).json()
        streamed = events_of(
            server.http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}}).text
        )
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert streamed[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_several_prompts_add_up_their_cached_tokens():
    orchestrator = FakeOrchestrator()
    orchestrator.num_cached = lambda request: len(request.prompt_ids) - 1
    with live_server(orchestrator) as server:
        answer = server.http.post(COMPLETIONS, json={"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 2, "n": 2}).json()
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_what_a_request_says_of_the_cache_reaches_the_engine(server: LiveServer):
    for fields, use_cache, salt in (
        ({}, True, ""),
        ({"cache_prompt": True, "cache_salt": "me"}, True, "me"),
        ({"cache_prompt": False}, False, ""),
        ({"cache_prompt": None, "cache_salt": None}, True, ""),
    ):
        server.http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 1, **fields})
        request = server.orchestrator.submitted[-1]
        assert (request.use_cache, request.cache_salt) == (use_cache, salt)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_first_token_that_does_not_come_in_time(streamed: bool, n: int):
    orchestrator = FakeOrchestrator()
    orchestrator.hang_at = 0
    body = {"prompt": "abc", "max_tokens": 3, "n": n, "stream": streamed, "deadline_ms": 150}
    with live_server(orchestrator) as server:
        began = time.monotonic()
        answer = server.http.post(COMPLETIONS, json=body)
        assert 0.1 < time.monotonic() - began < 3
        wait_for(lambda: not orchestrator.running)
    error = events_of(answer.text)[-1]["error"] if streamed else answer.json()["error"]
    assert answer.status_code == (200 if streamed else 504)
    assert error["code"] == "deadline_exceeded"
    assert "within 0.15 s" in error["message"]


def test_a_deadline_is_for_the_first_token_only():
    orchestrator = FakeOrchestrator()
    orchestrator.step_s = 0.08
    with live_server(orchestrator) as server:
        answer = server.http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 6, "deadline_ms": 300})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 6


def test_priority_and_deadline_reach_the_engine(server: LiveServer):
    server.http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 1, "priority": -3, "deadline_ms": 2500})
    request = server.orchestrator.submitted[-1]
    assert (request.priority, request.deadline_s) == (-3, 2.5)
