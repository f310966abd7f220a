"""benchmarks/load.py against a server whose streams are known in advance."""

import asyncio
import contextlib
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from benchmarks import load


class FakeServer:
    """Streams `max_tokens` words, `gap_s` apart; the second counted request meets `fault`."""

    def __init__(self, gap_s: float = 0.0, usage: bool = True, fault: str = ""):
        self.gap_s, self.usage, self.fault = gap_s, usage, fault
        self.bodies: list[dict] = []
        self.in_flight = self.most_in_flight = 0
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "listed"}, {"id": "other"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        fault = self.fault if len(self.bodies) == 3 else ""
        if fault == "status":
            return web.json_response({"error": {"message": "too busy"}}, status=429)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: dict) -> None:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        await response.write(b": a comment\n\n")
        for i in range(body["max_tokens"]):
            await asyncio.sleep(self.gap_s)
            if fault == "error" and i == 1:
                await send({"error": {"message": "engine lost"}})
            await send({"choices": [{"text": f" w{i}"}]})
            await send({"choices": [{"text": ""}]})  # text withheld: no token that a client can see
            if fault == "cut" and i == 1:
                self.in_flight -= 1
                return response
        if self.usage:
            counts = {"prompt_tokens": len(body["prompt"].split()) + 1, "completion_tokens": body["max_tokens"] * 2}
            await send({"choices": [], "usage": counts})
        await response.write(b"data: [DONE]\n\n")
        self.in_flight -= 1
        return response


def settings(**changes) -> load.Settings:
    base = load.Settings(
        url="", model="m", requests=6, concurrency=2, rate=None, prompt_words=5, max_tokens=4, seed=3, timeout_s=20
    )
    return replace(base, **changes)


def apply(server: FakeServer, **changes) -> tuple[list, float]:
    async def run():
        async with server.running():
            return await load.apply_load(settings(url=server.url, **changes))

    return asyncio.run(run())


def test_closed_loop_keeps_its_concurrency_and_sends_different_prompts():
    server = FakeServer(gap_s=0.01)
    outcomes, duration_s = apply(server)
    assert server.most_in_flight == 2
    assert len(outcomes) == 6
    assert len(server.bodies) == 7  # and one to warm up
    assert duration_s >= 3 * 4 * 0.01
    prompts = [body["prompt"] for body in server.bodies[1:]]
    assert len(set(prompts)) == 6
    assert all(len(prompt.split()) == 5 for prompt in prompts)
    body = server.bodies[-1]
    assert (body["stream"], body["ignore_eos"], body["temperature"], body["cache_prompt"]) == (True, True, 0.0, False)


def test_tokens_are_counted_by_usage_where_there_is_one():
    outcomes, _ = apply(FakeServer())
    assert {(o.input_tokens, o.output_tokens, len(o.gaps_s)) for o in outcomes} == {(6, 8, 3)}
    outcomes, duration_s = apply(FakeServer(usage=False))
    assert {(o.input_tokens, o.output_tokens) for o in outcomes} == {(None, 4)}
    report = load.summarise(outcomes, duration_s, None)
    assert (report["total_input_tokens"], report["total_throughput"], report["total_generated_tokens"]) == (
        None,
        None,
        24,
    )
    assert "unknown" in load.table(report)


def test_measured_gaps_are_those_of_the_stream():
    outcomes, _ = apply(FakeServer(gap_s=0.03), requests=2)
    for outcome in outcomes:
        assert outcome.ttft_s >= 0.03
        assert outcome.e2e_s >= 4 * 0.03
        assert all(gap >= 0.02 for gap in outcome.gaps_s)


def test_open_loop_sends_by_the_clock_and_counts_queueing():
    server = FakeServer(gap_s=0.05)
    apply(server, rate=1000.0, concurrency=None)
    assert server.most_in_flight == 6  # nobody waited for anybody
    one_at_a_time = FakeServer(gap_s=0.02)
    outcomes, _ = apply(one_at_a_time, rate=1000.0, concurrency=1)
    assert one_at_a_time.most_in_flight == 1
    assert max(o.ttft_s for o in outcomes) >= 5 * 4 * 0.02  # the last one was due at once, and waited for five


def test_arrivals_are_poisson_at_the_rate():
    server = FakeServer()
    _, duration_s = apply(server, rate=40.0, requests=20, concurrency=None)
    rng = random.Random(3)
    expected_s = sum(rng.expovariate(40.0) for _ in range(19))
    assert expected_s <= duration_s < expected_s + 5.0


@pytest.mark.parametrize(
    ("fault", "said"), [("status", "429"), ("error", "engine lost"), ("cut", "without [DONE], after 2 chunks")]
)
def test_failures_are_counted_and_said(fault, said):
    outcomes, duration_s = apply(FakeServer(fault=fault))
    report = load.summarise(outcomes, duration_s, None)
    assert (report["successful_requests"], report["failed_requests"]) == (5, 1)
    assert said in report["failures"][0]
    assert said in load.table(report)


def test_report_is_the_arithmetic_of_its_requests():
    outcomes = [
        load.Outcome(ttft_s=0.1, e2e_s=0.4, output_tokens=4, input_tokens=10, gaps_s=[0.1, 0.05, 0.15]),
        load.Outcome(ttft_s=0.3, e2e_s=0.3, output_tokens=1, input_tokens=20),
        load.Failure("lost"),
    ]
    report = load.summarise(outcomes, 2.0, load.Goodput(ttft_ms=200.0, tpot_ms=120.0))
    assert (report["successful_requests"], report["failed_requests"]) == (2, 1)
    assert (report["total_input_tokens"], report["total_generated_tokens"]) == (30, 5)
    assert (report["request_throughput"], report["output_throughput"], report["total_throughput"]) == (1.0, 2.5, 17.5)
    assert report["ttft_ms"] == pytest.approx({"mean": 200, "median": 200, "p99": 298, "max": 300})
    assert report["tpot_ms"] == pytest.approx({"mean": 100, "median": 100, "p99": 100, "max": 100})
    assert report["itl_ms"]["median"] == pytest.approx(100)
    assert report["worst_gap_ms"] == pytest.approx(150)
    assert report["request_goodput"] == 0.5  # the second one came too late


@pytest.mark.parametrize(
    ("words", "good"), [(["ttft:99"], 0), (["ttft:101"], 1), (["tpot:99"], 0), (["ttft:101", "tpot:101"], 1)]
)
def test_goodput_wants_every_target_met(words, good):
    outcome = load.Outcome(ttft_s=0.1, e2e_s=0.4, output_tokens=4, input_tokens=1)
    assert load.summarise([outcome], 1.0, load.parse_goodput(words))["request_goodput"] == good


@pytest.mark.parametrize("words", [["itl:5"], ["ttft"], ["tpot:fast"]])
def test_goodput_refuses_what_it_does_not_know(words):
    with pytest.raises(ValueError, match=r"expected .*:MS"):
        load.parse_goodput(words)


def run_command(server: FakeServer, *words: str) -> tuple[int, str, str]:
    async def run():
        async with server.running():
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", load.__name__, "--url", server.url, *words),
                cwd=Path(load.__file__).parents[1],
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await process.communicate()
            return process.returncode or 0, out.decode(), err.decode()

    return asyncio.run(run())


def test_command_prints_the_terms_and_writes_json(tmp_path):
    file = tmp_path / "report.json"
    small = ("--requests", "4", "--concurrency", "2", "--prompt-words", "3", "--max-tokens", "2")
    server = FakeServer()
    code, out, err = run_command(server, *small, "--goodput", "ttft:60000", "tpot:60000", "--json", str(file))
    assert (code, err) == (0, "")
    for term in ("Successful requests", "Median TTFT (ms)", "P99 TPOT (ms)", "Mean ITL (ms)", "Worst gap", "goodput"):
        assert term in out
    report = json.loads(file.read_text())
    assert (report["successful_requests"], report["total_generated_tokens"]) == (4, 16)
    assert report["settings"]["model"] == server.bodies[0]["model"] == "listed"
    assert report["request_goodput"] == report["request_throughput"]
    code, out, _ = run_command(FakeServer(fault="status"), *small, "--json", "-")
    assert code == 1  # a request failed
    assert json.loads(out)["failed_requests"] == 1


def test_command_says_why_it_cannot_start():
    code, out, err = run_command(FakeServer(), "--url", "http://127.0.0.1:9", "--model", "m")
    assert (code, out) == (1, "")
    assert err.startswith("load: expected a stream from http://127.0.0.1:9")
    assert run_command(FakeServer(), "--rate", "0")[0] == 2
