"""Requests through real engine processes with the fake engine: nothing goes wrong here."""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.fakes import FAKE_VOCAB, expected_logprob, expected_tokens
from tests.orchestrator.running import FAKE, collect, config, engine_pid, is_idle, request, running, segments, until
from twinjet.core.errors import (
    CheckpointError,
    ConfigError,
    ContextTooLong,
    EngineDead,
    InvalidRequest,
    Overloaded,
)
from twinjet.orchestrator.orchestrator import Orchestrator


def test_one_request_and_sixteen_at_once():
    async def scenario():
        async with running() as orchestrator:
            assert orchestrator.health().ok
            assert orchestrator.info.vocab_size == FAKE_VOCAB
            outcome = await collect(orchestrator.submit(request("a", (5, 6, 7), 20)))
            assert (outcome.tokens, outcome.finish_reason) == (expected_tokens((5, 6, 7), 20), "length")
            prompts = [tuple(range(i + 1, 3 * i + 4)) for i in range(16)]
            streams = [orchestrator.submit(request(f"r{i}", p, 10 + i)) for i, p in enumerate(prompts)]
            assert orchestrator.stats().num_requests == 16
            outcomes = await asyncio.gather(*map(collect, streams))
            for i, outcome in enumerate(outcomes):
                assert (outcome.tokens, outcome.finish_reason) == (expected_tokens(prompts[i], 10 + i), "length")
            assert orchestrator.stats().num_requests == 0
            await until(lambda: is_idle(orchestrator))

    asyncio.run(scenario())


def test_tokens_arrive_one_by_one_with_logprobs_and_end_at_a_stop_token():
    async def scenario():
        async with running("fake?step_ms=20") as orchestrator:
            oracle = expected_tokens((5, 6, 7), 10)
            sizes = []
            stream = orchestrator.submit(request("a", stop_token_ids=frozenset({oracle[5]}), num_logprobs=2))
            outcome = await collect(stream, lambda event: sizes.append(len(event.token_ids)))
            assert (outcome.tokens, outcome.finish_reason) == (oracle[:6], "stop")
            assert sizes == [1] * 6
            for token, logprobs in zip(outcome.tokens, outcome.logprobs, strict=True):
                assert logprobs.logprob == pytest.approx(expected_logprob(token))
                assert logprobs.top_ids == (token, (token + 1) % FAKE_VOCAB)

    asyncio.run(scenario())


def test_news_for_a_slow_reader_merges_and_holds_up_nobody():
    async def scenario():
        async with running() as orchestrator:
            slow = orchestrator.submit(request("slow", max_tokens=100))
            quick = await collect(orchestrator.submit(request("quick", (1, 2), 50)))
            assert quick.tokens == expected_tokens((1, 2), 50)
            await until(lambda: orchestrator.stats().num_requests == 0)
            events = []
            outcome = await collect(slow, events.append)
            assert outcome.tokens == expected_tokens((5, 6, 7), 100)
            assert len(events) == 1

    asyncio.run(scenario())


def test_two_engines_share_the_work():
    async def scenario():
        async with running("fake?step_ms=5", roles=("both", "both")) as orchestrator:
            prompts = [(i + 1, i + 2) for i in range(12)]
            streams = [orchestrator.submit(request(f"r{i}", p, 30)) for i, p in enumerate(prompts)]
            for prompt, outcome in zip(prompts, await asyncio.gather(*map(collect, streams)), strict=True):
                assert outcome.tokens == expected_tokens(prompt, 30)
            # Six requests each: two prompt rows, and one for each token but the last.
            rows = 6 * (2 + 29)
            await until(
                lambda: all(e.stats is not None and e.stats.rows_total >= rows for e in orchestrator.stats().engines)
            )

    asyncio.run(scenario())


def test_prefill_and_decode_engines_give_the_same_tokens():
    async def scenario():
        async with running(roles=("prefill", "decode")) as orchestrator:
            prompts = [tuple(range(i + 1, 5 * i + 4)) for i in range(8)]
            streams = [orchestrator.submit(request(f"r{i}", p, 10)) for i, p in enumerate(prompts)]
            for prompt, outcome in zip(prompts, await asyncio.gather(*map(collect, streams)), strict=True):
                assert (outcome.tokens, outcome.finish_reason) == (expected_tokens(prompt, 10), "length")
            stats = orchestrator.stats()
            assert stats.transfers_total == 8
            assert stats.transfer_bytes_total == sum(2 * 4 * len(prompt) for prompt in prompts)
            assert stats.extra["transfer_failures_total"] == 0
            await until(lambda: is_idle(orchestrator) and not segments(orchestrator))
        assert not segments(orchestrator)

    asyncio.run(scenario())


@pytest.mark.parametrize("roles", [("both",), ("prefill", "decode")])
def test_a_prefix_is_computed_once_and_told(roles):
    async def scenario():
        async with running(roles=roles) as orchestrator:
            prompt = tuple(range(1, 51))
            found = []
            for i, fields in enumerate(({}, {}, {"cache_salt": "other"}, {"use_cache": False}, {})):
                events = []
                outcome = await collect(
                    orchestrator.submit(request(f"r{i}", (*prompt, i + 1), 10, **fields)), events.append
                )
                assert outcome.tokens == expected_tokens((*prompt, i + 1), 10)
                found.append(sum(event.num_cached for event in events))
            assert found == [0, 48, 0, 0, 48]  # whole pages of 4
            await until(lambda: is_idle(orchestrator))
            stats = orchestrator.stats().engines[0].stats
            assert stats is not None
            assert (stats.prefix_queries_total, stats.prefix_hits_total) == (4 * 51, 2 * 48)
            assert stats.pages_cached > 0

    asyncio.run(scenario())


def test_aborts_at_random_moments_leave_nothing_behind():
    async def scenario(roles):
        async with running("fake?step_ms=1", roles=roles) as orchestrator:

            async def leave(i: int, stream) -> None:
                # Every way to leave: by id, by closing, by cancelling, by forgetting.
                num_read = 0
                async for event in stream:
                    num_read += len(event.token_ids)
                    if num_read > i % 7:
                        break
                if i % 4 == 0:
                    orchestrator.abort(f"r{i}")
                    assert (await collect(stream)).finish_reason == "cancelled"
                elif i % 4 == 1:
                    await stream.aclose()
                elif i % 4 == 2:
                    reader = asyncio.create_task(collect(stream))
                    await asyncio.sleep(0)
                    reader.cancel()
                    await asyncio.gather(reader, return_exceptions=True)

            for i in range(40):
                # Not gathered: a finished task holds nothing, so that what is forgotten is collected.
                stream = orchestrator.submit(request(f"r{i}", tuple(range(1, 2 + i)), 200))
                await asyncio.wait_for(leave(i, stream), 10)
                del stream
            survivor = await collect(orchestrator.submit(request("survivor", (9, 9), 30)))
            assert survivor.tokens == expected_tokens((9, 9), 30)
            assert orchestrator.stats().num_requests == 0
            await until(lambda: is_idle(orchestrator) and not segments(orchestrator))

    asyncio.run(scenario(("both",)))
    asyncio.run(scenario(("prefill", "decode")))


def test_requests_that_can_never_run_are_refused_by_the_call():
    async def scenario():
        async with running() as orchestrator:
            with pytest.raises(InvalidRequest, match="empty"):
                orchestrator.submit(request("a", ()))
            with pytest.raises(ContextTooLong, match=r"200 tokens.*57, together 257.*256.*at most 56"):
                orchestrator.submit(request("a", (1,) * 200, 57))
            with pytest.raises(ContextTooLong, match=r"300 tokens.*256"):
                orchestrator.submit(request("a", (1,) * 300, 1))
            with pytest.raises(InvalidRequest, match=f"from 0 to {FAKE_VOCAB - 1}, got {FAKE_VOCAB}"):
                orchestrator.submit(request("a", (1, FAKE_VOCAB)))
            running_one = orchestrator.submit(request("a", (1,) * 200, 56))
            with pytest.raises(InvalidRequest, match="'a' is running"):
                orchestrator.submit(request("a"))
            assert (await collect(running_one)).tokens == expected_tokens((1,) * 200, 56)
            assert (await collect(orchestrator.submit(request("a", (2,), 1)))).tokens == expected_tokens((2,), 1)

    asyncio.run(scenario())


def test_too_many_requests_are_refused():
    async def scenario():
        async with running("fake?step_ms=20", max_waiting=2) as orchestrator:
            streams = [orchestrator.submit(request(f"r{i}", (i,), 100)) for i in range(18)]
            with pytest.raises(Overloaded, match="18 requests are here"):
                orchestrator.submit(request("one too many"))
            orchestrator.abort("r0")
            streams.append(orchestrator.submit(request("in its place")))
            for stream in streams:
                await stream.aclose()

    asyncio.run(scenario())


def test_what_cannot_be_in_time_is_refused_at_once():
    async def scenario():
        # A step of 4 ms, and 1 ms a row: a prompt of 200 tokens takes about 230 ms.
        async with running("fake?step_ms=4&row_ms=1", engine=replace(config(), calibration_s=0.3)) as orchestrator:
            forecast = orchestrator.info.forecast
            assert forecast is not None
            prompt = tuple(range(1, 201))
            with pytest.raises(Overloaded, match="first token is expected in") as refused:
                orchestrator.submit(request("late", prompt, 5, deadline_s=0.05))
            assert refused.value.retry_after_s >= 1
            outcome = await collect(orchestrator.submit(request("in time", prompt, 5, deadline_s=30.0)))
            assert outcome.tokens == expected_tokens(prompt, 5)
            # Not for lack of speed, but of slots.
            streams = [orchestrator.submit(request(f"r{i}", (i + 1, 2), 250)) for i in range(17)]
            with pytest.raises(Overloaded, match="first token is expected in"):
                orchestrator.submit(request("no slot", (1, 2), 5, deadline_s=1.0))
            for stream in streams:
                await stream.aclose()
            with pytest.raises(InvalidRequest, match="over 0"):
                orchestrator.submit(request("never", deadline_s=0.0))

    asyncio.run(scenario())


def test_nothing_is_accepted_before_the_start_and_after_the_stop():
    async def scenario():
        stages = []
        orchestrator = Orchestrator(config("fake?load_ms=200"), factory=FAKE)
        with pytest.raises(Overloaded, match="starting"):
            orchestrator.submit(request("a"))
        start = asyncio.create_task(orchestrator.start(lambda *progress: stages.append(progress)))
        await until(lambda: bool(stages))
        health = orchestrator.health()
        assert not health.ok
        assert "starting" in health.reason
        assert "load" in health.reason
        with pytest.raises(Overloaded, match="starting"):
            orchestrator.submit(request("a"))
        await start
        assert {(engine_id, stage) for engine_id, stage, _, _ in stages} == {(0, "load"), (0, "compile")}
        assert orchestrator.health().ok
        stream = orchestrator.submit(request("a", max_tokens=200))
        await orchestrator.stop()
        outcome = await collect(stream)
        assert (outcome.finish_reason, outcome.error) == ("error", "the server is stopping")
        assert not orchestrator.health().ok
        with pytest.raises(Overloaded, match="stopped"):
            orchestrator.submit(request("b"))
        await orchestrator.stop()

    asyncio.run(scenario())


def test_drain_lets_requests_finish_and_takes_no_new_ones():
    async def scenario():
        async with running("fake?step_ms=5") as orchestrator:
            stream = orchestrator.submit(request("a", max_tokens=30))
            drained = asyncio.create_task(orchestrator.drain(10))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="draining"):
                orchestrator.submit(request("b"))
            assert (await collect(stream)).tokens == expected_tokens((5, 6, 7), 30)
            assert await drained

    asyncio.run(scenario())


def test_a_drain_that_takes_too_long_aborts_the_rest():
    async def scenario():
        async with running("fake?step_ms=20") as orchestrator:
            stream = orchestrator.submit(request("a", max_tokens=200))
            assert not await orchestrator.drain(0.1)
            assert (await collect(stream)).finish_reason == "cancelled"

    asyncio.run(scenario())


def test_stop_leaves_no_process_no_directory_and_no_segment(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    async def scenario():
        async with running("fake?step_ms=5", roles=("prefill", "decode")) as orchestrator:
            (directory,) = tmp_path.iterdir()
            assert directory.stat().st_mode & 0o777 == 0o700
            pids = [engine_pid(orchestrator, i) for i in (0, 1)]
            assert all(os.getsid(pid) != os.getsid(0) for pid in pids)
            streams = [orchestrator.submit(request(f"r{i}", max_tokens=100)) for i in range(8)]
            await asyncio.sleep(0.05)
        assert [(await collect(stream)).finish_reason for stream in streams] == ["error"] * 8
        assert not any(map(psutil.pid_exists, pids))
        assert not segments(orchestrator)
        assert list(tmp_path.iterdir()) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [CheckpointError, ConfigError])
def test_a_start_that_cannot_succeed_raises_what_the_engine_raised(error, tmp_path):
    async def scenario():
        orchestrator = Orchestrator(config(f"fake?load_error={error.__name__}"), factory=FAKE, roles=("both", "both"))
        with pytest.raises(error, match="fake checkpoint"):
            await orchestrator.start()
        assert all(engine.restarts == 0 for engine in orchestrator.stats().engines)
        assert not orchestrator.health().ok
        await orchestrator.stop()

    asyncio.run(scenario())
    assert psutil.Process().children() == []


def test_an_engine_that_keeps_failing_at_start_is_given_up():
    async def scenario():
        orchestrator = Orchestrator(config("fake?load_error=StepFailed"), factory=FAKE)
        with pytest.raises(EngineDead, match=r"3 times.*StepFailed: the fake checkpoint"):
            await orchestrator.start()

    asyncio.run(scenario())
    assert psutil.Process().children() == []


def test_a_start_that_is_cancelled_leaves_nothing():
    async def scenario():
        orchestrator = Orchestrator(config("fake?load_ms=5000"), factory=FAKE)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(orchestrator.start(), 0.3)

    asyncio.run(scenario())
    assert psutil.Process().children() == []


@pytest.mark.parametrize("roles", [(), ("both", "encode")])
def test_roles_are_checked(roles):
    with pytest.raises(ConfigError, match="role"):
        Orchestrator(config(), roles=roles)


def test_neither_process_loads_jax():
    async def scenario():
        async with running() as orchestrator:
            maps = Path(f"/proc/{engine_pid(orchestrator)}/maps").read_text()
            assert "numpy" in maps
            assert "jaxlib" not in maps

    asyncio.run(scenario())
    code = "import sys, twinjet.orchestrator.orchestrator; sys.exit('jax' in sys.modules)"
    assert asyncio.run(_exit_code(code)) == 0


async def _exit_code(code: str) -> int:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    return await process.wait()
