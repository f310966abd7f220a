"""Every kind of bad request: a 4xx in OpenAI's shape that says what to change, and a server that goes on."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.fakes import CONTEXT, MAX_STREAMS, VOCAB_SIZE, FakeOrchestrator
from tests.server.live import LiveServer, live_server
from twinjet.server.app import ServerLimits

C, H, T, D = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
MAX_BODY = 1 << 20


@pytest.fixture(scope="module")
def strict() -> Iterator[LiveServer]:
    with live_server(limits=ServerLimits(max_body_bytes=MAX_BODY)) as running:
        yield running


def ask(path: str, **fields: Any) -> tuple[str, bytes]:
    base: dict[str, Any] = {
        C: {"prompt": "a"},
        H: {"messages": [{"role": "user", "content": "a"}]},
        T: {"prompt": "a"},
        D: {"tokens": [97]},
    }[path]
    return path, json.dumps({**base, **fields}).encode()


def message(**fields: Any) -> tuple[str, bytes]:
    return ask(H, messages=[{"role": "user", "content": "a"}, fields])


# (path, body), status, code, param, words of the message
Case = tuple[tuple[str, bytes], int, str, str | None, str]


def bad(
    asked: tuple[str, bytes], param: str | None, words: str, code: str = "invalid_value", status: int = 400
) -> Case:
    return asked, status, code, param, words


WRONG_TYPES = [
    ("max_tokens", "x"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", [1]),
    ("temperature", "hot"),
    ("temperature", [1]),
    ("temperature", "NaN"),
    ("temperature", True),
    ("top_p", {}),
    ("top_k", 1.5),
    ("top_k", "all"),
    ("min_p", "x"),
    ("seed", "x"),
    ("seed", 1.5),
    ("n", "1"),
    ("n", 2.5),
    ("stop", 1),
    ("stop", {"a": 1}),
    ("stop_token_ids", "x"),
    ("stop_token_ids", 5),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", True),
    ("ignore_eos", 1),
    ("return_token_ids", "x"),
    ("cache_prompt", "x"),
    ("cache_salt", 1),
    ("priority", 0.5),
    ("deadline_ms", "soon"),
    ("model", 1),
    ("model", ["fake"]),
]
OUT_OF_RANGE = [
    ("cache_salt", "", "from 1 to 256 characters"),
    ("priority", 1001, "from -1000 to 1000"),
    ("deadline_ms", 0, "over 0"),
    ("deadline_ms", 1e9, "at most 86400000"),
    ("cache_salt", "x" * 257, "from 1 to 256 characters"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -1, "at least 1"),
    ("temperature", -0.1, "from 0.0 to 100.0"),
    ("temperature", 101, "from 0.0 to 100.0"),
    ("top_p", 0, "over 0"),
    ("top_p", 1.1, "at most 1"),
    ("top_p", -1, "over 0"),
    ("top_k", -2, "from 0"),
    ("top_k", 2**40, "from 0"),
    ("min_p", -0.1, "from 0.0 to 1.0"),
    ("min_p", 1.5, "from 0.0 to 1.0"),
    ("seed", -1, "from 0"),
    ("seed", 2**63, "from 0"),
    ("seed", 10**40, "from 0"),
    ("n", 0, f"from 1 to {MAX_STREAMS}"),
    ("n", -1, f"from 1 to {MAX_STREAMS}"),
    ("n", MAX_STREAMS + 1, f"from 1 to {MAX_STREAMS}"),
    ("stop", "", "from 1 to 1000 characters"),
    ("stop", ["a", ""], "from 1 to 1000 characters"),
    ("stop", "x" * 1001, "from 1 to 1000 characters"),
    ("stop", ["x"] * 17, "at most 16"),
    ("stop_token_ids", [-1], f"from 0 to {VOCAB_SIZE - 1}"),
    ("stop_token_ids", [1, VOCAB_SIZE], f"from 0 to {VOCAB_SIZE - 1}"),
    ("stop_token_ids", [2**70], f"from 0 to {VOCAB_SIZE - 1}"),
    ("stop_token_ids", [1] * 129, "at most 128"),
]
UNSUPPORTED: list[tuple[str, str, Any]] = [
    *((path, "frequency_penalty", 0.5) for path in (C, H)),
    *((path, "presence_penalty", -1) for path in (C, H)),
    *((path, "repetition_penalty", 1.1) for path in (C, H)),
    *((path, "logit_bias", {"5": 1}) for path in (C, H)),
    *((path, "logit_bias", "x") for path in (C, H)),
    (C, "echo", True),
    (C, "echo", "x"),
    (C, "suffix", "x"),
    (C, "best_of", 2),
    (H, "response_format", {"type": "json_object"}),
    (H, "response_format", {"type": "json_schema", "json_schema": {}}),
    (H, "response_format", "text"),
    (H, "tools", [{"type": "function"}]),
    (H, "tool_choice", "required"),
    (H, "functions", [{}]),
    (H, "function_call", {"name": "f"}),
    (H, "parallel_tool_calls", "x"),
    (H, "modalities", ["text", "audio"]),
    (H, "audio", {"voice": "x"}),
    (H, "prediction", {}),
    (H, "reasoning_effort", "high"),
    (H, "service_tier", "flex"),
    (H, "verbosity", "low"),
    (H, "web_search_options", {}),
]
MALFORMED = {
    "empty": b"",
    "blank": b"  \n",
    "text": b"hello",
    "truncated": b'{"model": "fake"',
    "single quotes": b"{'model': 'fake'}",
    "comment": b'{"model": "fake" /* x */}',
    "NaN": b'{"model": "fake", "temperature": NaN}',
    "Infinity": b'{"model": "fake", "temperature": Infinity}',
    "-Infinity": b'{"model": "fake", "temperature": -Infinity}',
    "UTF-16": '{"model": "fake"}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"model": "fake"}',
    "control character": b'{"model": "fake\x00"}',
}


def cases() -> Iterator[Case]:
    for path in (C, H):
        for name, value in WRONG_TYPES:
            yield bad(ask(path, **{name: value}), name, f"`{name}`: expected")
        for name, value, words in OUT_OF_RANGE:
            yield bad(ask(path, **{name: value}), name, words)
        yield bad(ask(path, model="gpt-4"), "model", "'fake'", "model_not_found", 404)
        yield bad(ask(path, model=""), "model", "'fake'", "model_not_found", 404)
        yield bad(ask(path, model="x" * 100_000), "model", f"'{'x' * 100}' is not served", "model_not_found", 404)
        yield bad(ask(path, foo=1), "foo", "unknown field `foo`")
        yield bad(ask(path, Prompt="a"), "Prompt", "unknown field `Prompt`")
        yield bad(ask(path, **{"a\nb": 1}), "a\nb", "unknown field")
        yield bad(ask(path, guided_json={}), "guided_json", "unknown field")
        yield bad(ask(path, stream_options={"include_usage": True}), "stream_options", "stream to be true")
        yield bad(ask(path, stream=True, stream_options={"x": 1}), "stream_options.x", "unknown field")
        yield bad(
            ask(path, stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage", "expected"
        )
        yield bad(ask(path, max_tokens=CONTEXT), "max_tokens", f"context is {CONTEXT}", "context_length_exceeded")
        yield bad(ask(path, max_tokens=10**30), "max_tokens", "at most", "context_length_exceeded")
        yield bad((path, b"[]"), None, "must be a JSON object")
        yield bad((path, b"null"), None, "must be a JSON object")
        yield bad((path, b'"a"'), None, "must be a JSON object")
        yield bad((path, b'{"temperature": 1e999}'), "temperature", "out of range")
        for body in MALFORMED.values():
            yield bad((path, body), None, "JSON")
        yield bad((path, ask(path)[1] + b" x"), None, "trailing characters")
        yield bad((path, ask(path)[1] * 2), None, "trailing characters")
        yield bad((path, b'{"model": "fak\xff"}'), None, "not UTF-8")
        yield bad((path, b'{"user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), None, "nested too deeply")
        yield bad((path, b'{"metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001), None, "nested too deeply")
    for path, name, value in UNSUPPORTED:
        yield bad(ask(path, **{name: value}), name, f"`{name}` is not supported yet")

    # Prompts.
    yield bad((C, b"{}"), "prompt", "`prompt` is missing")
    for value in (None, 1, 1.5, True, {}, {"a": "b"}):
        yield bad(ask(C, prompt=value), "prompt", "must be a string")
    for value in ("", [], [""], ["a", ""]):
        yield bad(ask(C, prompt=value), "prompt", "the prompt is empty")
    yield bad(ask(C, prompt=[[]]), "prompt[0]", "the prompt is empty")
    yield bad(ask(C, prompt=[[1], []]), "prompt[1]", "the prompt is empty")
    for value in ([-1], [1, VOCAB_SIZE], [1, "a"], [1, 1.5], [1, None], [1, True], [1, [2]], [2**80], [None], [True]):
        yield bad(ask(C, prompt=value), f"prompt[{len(value) - 1}]", f"integers from 0 to {VOCAB_SIZE - 1}")
    yield bad(ask(C, prompt=["a", 1]), "prompt[1]", "expected")
    yield bad(ask(C, prompt=["a", ["b"]]), "prompt[1]", "expected")
    yield bad(ask(C, prompt=[[1], [VOCAB_SIZE]]), "prompt[1][0]", "integers from 0")
    yield bad(ask(C, prompt=[[1], "a"]), "prompt[1]", "list of token ids")
    yield bad(ask(C, prompt=[[1], 2]), "prompt[1]", "list of token ids")
    yield bad(ask(C, prompt=[[[1]]]), "prompt[0][0]", "integers from 0")
    yield bad(ask(C, prompt=["a"] * 513), "prompt", "at most 512 prompts")
    yield bad(ask(C, prompt=[[1]] * 513), "prompt", "at most 512 prompts")
    yield bad(ask(C, prompt=["a"] * 300, n=2), "prompt", "600 choices")
    too_long = "context_length_exceeded"
    yield bad(ask(C, prompt="a" * CONTEXT), "prompt", f"at most {CONTEXT - 1}", too_long)
    yield bad(ask(C, prompt="a" * 100_000), "prompt", f"at most {CONTEXT - 1}", too_long)
    yield bad(ask(C, prompt=[1] * CONTEXT), "prompt", f"at most {CONTEXT - 1}", too_long)
    yield bad(ask(C, prompt=[1] * 100_000), "prompt", f"at most {CONTEXT - 1}", too_long)
    yield bad(ask(C, prompt=[[1], [1] * CONTEXT]), "prompt[1]", f"at most {CONTEXT - 1}", too_long)
    yield bad(ask(C, prompt=[1] * 100, max_tokens=101), "max_tokens", "to at most 100", too_long)
    yield bad((C, b'{"prompt": "\\ud800"}'), None, "surrogate")
    yield bad((C, b'{"prompt": "a\\udc00b"}'), None, "surrogate")
    yield bad((C, b'{"prompt": ["a", "\\ud83d\\u0041"]}'), None, "surrogate")
    yield bad((C, b'{"prompt": "a\xffb"}'), "prompt", "UTF-8")
    yield bad((C, b'{"prompt": "\xc3"}'), "prompt", "UTF-8")
    yield bad((C, b'{"prompt": "\xed\xa0\x80"}'), "prompt", "UTF-8")
    yield bad((C, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), None, "nested too deeply")
    yield bad((C, b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}"), "prompt[0][0]", "token ids")
    for value in (-1, 21):
        yield bad(ask(C, logprobs=value), "logprobs", "from 0 to 20")
    for value in (True, "x", 1.5):
        yield bad(ask(C, logprobs=value), "logprobs", "expected")
    yield bad(ask(C, messages=[]), "messages", "unknown field")
    yield bad(ask(C, top_logprobs=1), "top_logprobs", "unknown field")

    # Chats.
    yield bad((H, b"{}"), "messages", "`messages` is missing")
    yield bad(ask(H, messages=[]), "messages", "at least one message")
    yield bad(ask(H, messages=[{"role": "user", "content": ""}] * 4097), "messages", "at most 4096 messages")
    for value in (None, "hi", {"role": "user"}):
        yield bad(ask(H, messages=value), "messages", "expected")
    yield bad(ask(H, messages=["hi"]), "messages[0]", "expected")
    yield bad(message(content="a"), "messages[1].role", "is missing")
    yield bad(message(role="user"), "messages[1].content", "is missing")
    yield bad(message(role="user", content=None), "messages[1].content", "is missing")
    yield bad(message(role="user", content=5), "messages[1].content", "expected")
    for role in ("tool", "function", "robot", ""):
        yield bad(message(role=role, content="a"), "messages[1].role", "must be one of")
    yield bad(message(role=None, content="a"), "messages[1].role", "expected")
    yield bad(message(role="user", content="a", foo=1), "messages[1].foo", "unknown field")
    yield bad(message(role="user", content="a", name=1), "messages[1].name", "expected")
    yield bad(message(role="assistant", content="a", tool_calls=[{}]), "messages[1].tool_calls", "not supported")
    yield bad(message(role="user", content=["a"]), "messages[1].content[0]", "expected")
    yield bad(message(role="user", content=[{"type": "text"}]), "messages[1].content[0].text", "is missing")
    yield bad(message(role="user", content=[{"text": "a"}]), "messages[1].content[0].type", "is missing")
    yield bad(
        message(role="user", content=[{"type": "text", "text": "a", "image_url": {}}]),
        "messages[1].content[0].image_url",
        "not supported",
    )
    yield bad(
        message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[1].content[0].type",
        "only parts of type 'text'",
    )
    yield bad((H, b'{"messages": [{"role": "user", "content": "\\ud800 abcdef"}]}'), None, "surrogate")
    yield bad(message(role="user", content="a" * 500), "messages", "context", too_long)
    yield bad(message(role="user", content="a" * 100_000), "messages", "context", too_long)
    yield bad(ask(H, max_completion_tokens=0), "max_completion_tokens", "at least 1")
    yield bad(ask(H, max_completion_tokens=CONTEXT), "max_completion_tokens", "to at most", too_long)
    yield bad(ask(H, max_completion_tokens=3, max_tokens=4), "max_completion_tokens", "differ")
    yield bad(ask(H, top_logprobs=3), "top_logprobs", "logprobs to be true")
    yield bad(ask(H, logprobs=False, top_logprobs=3), "top_logprobs", "logprobs to be true")
    for value in (-1, 21):
        yield bad(ask(H, logprobs=True, top_logprobs=value), "top_logprobs", "from 0 to 20")
    for value in (1, "x"):
        yield bad(ask(H, logprobs=value), "logprobs", "expected")
    yield bad(ask(H, prompt="a"), "prompt", "unknown field")
    yield bad(ask(H, echo=False), "echo", "unknown field")

    # Text routes.
    yield bad((T, b"{}"), "prompt", "either `prompt` or `messages`")
    yield bad(ask(T, messages=[{"role": "user", "content": "a"}]), "prompt", "either `prompt` or `messages`")
    yield bad(ask(T, prompt=[1]), "prompt", "expected")
    yield bad(ask(T, foo=1), "foo", "unknown field")
    yield bad(ask(T, model="x"), "model", "'fake'", "model_not_found", 404)
    yield bad((T, b'{"prompt": "\\ud800"}'), None, "JSON")
    yield bad((T, b'{"messages": [{"role": "x", "content": "a"}]}'), "messages[0].role", "must be one of")
    chat = [{"role": "user", "content": "a"}]
    yield bad(
        (T, json.dumps({"messages": chat, "add_special_tokens": True}).encode()), "add_special_tokens", "template"
    )
    yield bad((D, b"{}"), "tokens", "is missing")
    yield bad(ask(D, tokens="a"), "tokens", "list of token ids")
    yield bad(ask(D, tokens=[VOCAB_SIZE]), "tokens[0]", "integers from 0")
    yield bad(ask(D, tokens=["a"]), "tokens[0]", "integers from 0")
    yield bad(ask(D, tokens=[[1]]), "tokens[0]", "integers from 0")
    yield bad(ask(D, tokens=[1] * 50_000 + [-1]), "tokens[50000]", "integers from 0")
    yield bad(ask(D, tokens=[[1, 2, 3, 4]] * 20_000), "tokens[0]", "integers from 0")
    yield bad(ask(D, model="x"), "model", "'fake'", "model_not_found", 404)

    # Bodies too large.
    for path in (C, H, T, D):
        yield bad((path, b" " * (MAX_BODY + 1)), None, f"limit is {MAX_BODY}", "body_too_large", 413)


CASES = list(cases())


def test_there_are_enough_cases():
    assert len(CASES) > 250


def test_bad_requests_are_refused_in_words(strict: LiveServer):
    # One test over all, with one connection: a hundred pytest items would cost more than the requests.
    with httpx.Client(base_url=strict.url) as client:
        for (path, body), status, code, param, words in CASES:
            answer = client.post(path, content=body)
            about = f"{path} {body[:200]!r}: {answer.status_code} {answer.text}"
            assert answer.status_code == status, about
            assert answer.headers["content-type"] == "application/json", about
            error = answer.json()["error"]
            assert set(answer.json()) == {"error"}, about
            assert set(error) == {"message", "type", "param", "code"}, about
            assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error"), about
            assert words in error["message"], about
            assert len(error["message"]) < 1000, about
            assert "Traceback" not in answer.text, about
            assert ".py" not in answer.text, about
        assert client.post(C, json={"prompt": "a"}).status_code == 200
    assert strict.orchestrator.running == {}


NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    *(
        (path, fields)
        for path in (C, H)
        for fields in (
            {"user": "me", "metadata": {"a": [1]}, "store": True},
            {"cache_prompt": False},
            {"cache_salt": "tenant 1"},
            {"priority": 1, "deadline_ms": 60_000},
            {"cache_prompt": True},
            {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}},
            {"frequency_penalty": None, "presence_penalty": None, "logit_bias": None},
            {"stop": None, "stop_token_ids": [], "seed": None, "n": None, "top_k": None, "max_tokens": None},
            {"stop": [], "stream": False, "model": None},
            {"n": 2, "temperature": 0},
            {"temperature": 2, "top_k": 10**6, "top_p": 1},
            {"stream": True, "stream_options": {"include_usage": False, "include_obfuscation": False}},
        )
    ),
    (C, {"echo": False, "suffix": None, "best_of": 1}),
    (C, {"best_of": 2, "n": 2}),
    (C, {"prompt": "\ud83d\ude00 \x00 \u2028"}),
    (H, {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "parallel_tool_calls": False}),
    (H, {"modalities": ["text"], "service_tier": "auto", "functions": None, "reasoning_effort": None}),
    (H, {"top_logprobs": 0}),
    (H, {"max_tokens": 5, "max_completion_tokens": 5}),
    (H, {"messages": [{"role": "user", "content": "", "name": "bob"}]}),
]


@pytest.mark.parametrize(("path", "fields"), NEUTRAL)
def test_what_asks_for_nothing_is_accepted(strict: LiveServer, path: str, fields: dict[str, Any]):
    _, body = ask(path, **fields)
    answer = strict.http.post(path, content=body, headers={"content-type": "text/plain"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "allow"),
    [
        ("GET", C, 405, "method_not_allowed", "POST"),
        ("PUT", H, 405, "method_not_allowed", "POST"),
        ("POST", "/v1/models", 405, "method_not_allowed", "GET, HEAD"),
        ("DELETE", "/v1/models/fake", 405, "method_not_allowed", "GET, HEAD"),
        ("GET", T, 405, "method_not_allowed", "POST"),
        ("POST", "/health", 405, "method_not_allowed", "GET, HEAD"),
        ("POST", "/v1/embeddings", 404, "not_found", None),
        ("POST", C + "/", 404, "not_found", None),
        ("GET", "/v1", 404, "not_found", None),
        ("GET", "/..%2f..%2fetc%2fpasswd", 404, "not_found", None),
        ("GET", "/" + "x" * 5000, 404, "not_found", None),
        ("GET", "/v1/models/other/one", 404, "model_not_found", None),
    ],
)
def test_wrong_paths_and_methods(strict: LiveServer, method: str, path: str, status: int, code: str, allow: str | None):
    answer = strict.http.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert len(error["message"]) < 500
    got = answer.headers.get("allow")
    assert (set(got.split(", ")) if got else None) == (set(allow.split(", ")) if allow else None)


def test_a_huge_body_is_refused_by_its_announced_length(strict: LiveServer):
    with socket.create_connection((strict.host, strict.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 52428800\r\n\r\n{")
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_huge_body_without_a_length_is_refused_while_it_comes(strict: LiveServer):
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with socket.create_connection((strict.host, strict.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(MAX_BODY // 65536 + 1):
            client.sendall(piece)
        # The body has not ended yet.
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_50_mb_body_with_the_default_limits():
    with live_server() as server:
        answer = server.http.post(C, content=b'{"prompt": "' + b"a" * 50_000_000 + b'"}', timeout=30)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert server.http.post(C, json={"prompt": "a"}).status_code == 200


def test_a_text_that_cannot_fit_is_refused_without_tokenizing_it():
    # 20 MB of text would take the fake minutes to encode.
    with live_server() as server:
        answer = server.http.post(C, content=b'{"prompt": "' + b"a" * 5_000_000 + b'"}', timeout=30)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_chat_without_a_template():
    with live_server(chat=False) as server:
        for path, body in (ask(H), (T, b'{"messages": [{"role": "user", "content": "a"}]}')):
            answer = server.http.post(path, content=body)
            assert answer.status_code == 400
            assert "no chat template" in answer.json()["error"]["message"]
        assert server.http.post(C, json={"prompt": "a"}).status_code == 200


def test_overload_says_when_to_come_back():
    orchestrator = FakeOrchestrator()
    orchestrator.max_requests = 2
    with live_server(orchestrator) as server:
        for fields in ({"n": 3}, {"n": 3, "stream": True}):
            answer = server.http.post(C, json={"prompt": "a", **fields})
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "3"
            assert answer.json()["error"]["code"] == "overloaded"
            # The two that were accepted are not left running.
            assert orchestrator.running == {}
        orchestrator.max_requests = 3
        assert server.http.post(C, json={"prompt": "a", "n": 3}).status_code == 200
