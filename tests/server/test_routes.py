"""The routes that do not generate: health, metrics, models before the start, tokenize, detokenize."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fakes import BOS, CONTEXT, EOS, TURN, FakeOrchestrator
from tests.server.live import LiveServer, live_server


def test_index(server: LiveServer):
    answer = server.http.get("/").json()
    assert answer["model"] == "fake"
    for path in answer["routes"]:
        assert server.http.get(path).status_code in (200, 405)


def test_before_the_engines_are_ready():
    orchestrator = FakeOrchestrator()
    orchestrator.started = False
    with live_server(orchestrator) as server:
        health = server.http.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, "starting")
        for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}):
            answer = server.http.post("/v1/completions", json=body)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "2"
            assert answer.json()["error"]["code"] == "unavailable"
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] is None
        assert server.http.post("/tokenize", json={"prompt": "a"}).json()["max_model_len"] is None
        assert "twinjet_healthy 0.0" in server.http.get("/metrics").text

        orchestrator.started = True
        assert server.http.get("/health").json() == {"status": "ok", "reason": "ok"}
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("base", ["", "/v1"])
def test_tokenize_and_back(server: LiveServer, base: str):
    answer = server.http.post(f"{base}/tokenize", json={"prompt": "a</s>é"}).json()
    assert answer == {
        "count": 5,
        "max_model_len": CONTEXT,
        "tokens": [BOS, 97, EOS, 0xC3, 0xA9],
        "token_strs": None,
    }
    plain = server.http.post(
        f"{base}/tokenize",
        json={"prompt": "ab", "add_special_tokens": False, "return_token_strs": True, "model": "fake"},
    ).json()
    assert (plain["tokens"], plain["token_strs"]) == ([97, 98], ["a", "b"])
    back = server.http.post(f"{base}/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": "<s>a</s>é"}


def test_tokenize_a_chat(server: LiveServer):
    chat = [{"role": "user", "content": "a"}]
    with_head = server.http.post("/tokenize", json={"messages": chat}).json()
    without = server.http.post("/tokenize", json={"messages": chat, "add_generation_prompt": False}).json()
    assert with_head["tokens"][:2] == [BOS, TURN]
    assert bytes(with_head["tokens"][2:8]) == b"user:a"
    assert with_head["tokens"][: without["count"]] == without["tokens"]
    assert bytes(with_head["tokens"][without["count"] + 1 :]) == b"assistant:"
    # What is counted is what generating takes.
    answer = server.http.post("/v1/chat/completions", json={"messages": chat, "return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == with_head["tokens"]
    assert answer["choices"][0]["token_ids"][-1] == EOS


def test_tokenize_nothing(server: LiveServer):
    assert server.http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == [BOS]
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_long_texts_and_lists(server: LiveServer):
    text = "ab" * 20_000
    tokens = server.http.post("/tokenize", json={"prompt": text}, timeout=30).json()["tokens"]
    assert bytes(tokens[1:]).decode() == text
    assert server.http.post("/detokenize", json={"tokens": tokens[1:]}).json() == {"prompt": text}


def samples(server: LiveServer) -> dict[str, float]:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {
        sample.name + "".join(f"|{v}" for _, v in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics():
    orchestrator = FakeOrchestrator()
    orchestrator.step_s = 0.01
    with live_server(orchestrator) as server:
        before = samples(server)
        assert before["twinjet_generation_tokens_total"] == 0
        post = server.http.post
        post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "n": 2})
        post("/v1/completions", json={"prompt": "abc", "max_tokens": 50, "stream": True, "stop": "o"})
        post("/v1/completions", json={"prompt": ""})
        post("/v1/nothing")
        orchestrator.fail_at = 1
        post("/v1/completions", json={"prompt": "abc", "stream": True})
        after = samples(server)
    expected = {
        "prompt_tokens_total": 12,
        "generation_tokens_total": 2 * 5 + 4 + 1,
        "request_success_total|length": 2,
        "request_success_total|stop": 1,
        "request_success_total|error": 1,
        "request_success_total|cancelled": 0,
        "http_errors_total|400": 1,
        "http_errors_total|404": 1,
        "http_errors_total|500": 1,
        "time_to_first_token_seconds_count": 4,
        "inter_token_latency_seconds_count": 2 * 4 + 3,
        "token_delivery_seconds_count": 4 + 1,  # streamed ones
        "e2e_request_latency_seconds_count": 4,
        "num_requests_running": 0,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc|0": 0.25,
        "padding_tokens_total|0": 17,
        "wasted_rows_total|0": 19,
        "preemptions_total|0": 23,
        "prefix_cache_pages|0": 6,
        "prefilled_not_decoding|0": 1,
        "cost_drift|0": 1.5,
        "busy_seconds_total|0": 1.5,
        "predicted_seconds_total|0": 1.25,
        "stall_bound_violations_total|0": 59,
        "duty_cycle|0": 0.75,
        "step_seconds_count|0": 3,
        "step_seconds_sum|0": 1.5,
        "step_seconds_bucket|0|0.0002": 1,
        "step_seconds_bucket|0|0.0005": 3,
        "step_gap_seconds_bucket|0|10.0": 1,
        "step_gap_seconds_count|0": 2,
        "prefix_cache_queries_total|0": 43,
        "prefix_cache_hits_total|0": 47,
        "prefix_cache_evictions_total|0": 53,
        "compiles_total|0": 0,
        "engine_restarts_total|0": 3,
        "engine_ready|0|both": 1,
        "replays_total": 29,
        "transfers_total": 31,
        "transfer_bytes_total": 37,
        "stale_messages_total": 41,
        "healthy": 1,
    }
    assert {name: after[f"twinjet_{name}"] for name in expected} == expected
    # A step takes 10 ms, so no gap is under that, and none of these requests takes a second.
    assert after["twinjet_inter_token_latency_seconds_bucket|0.005"] == 0
    assert after["twinjet_inter_token_latency_seconds_bucket|1.0"] == after["twinjet_inter_token_latency_seconds_count"]
    assert after["twinjet_inter_token_latency_seconds_bucket|+Inf"] == 11
    assert after["twinjet_inter_token_latency_seconds_sum"] >= 11 * 0.009
    assert all(name.startswith("twinjet_") for name in after)
