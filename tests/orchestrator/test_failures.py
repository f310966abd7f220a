"""Engines that die, hang or lie, as real processes: clients see a pause, never an error, a repeat or a gap."""

import asyncio
import os
import signal
import sys
import time

import pytest

from tests.fakes import expected_tokens
from tests.orchestrator.engines import POISON, load_poisonable
from tests.orchestrator.running import (
    IMPATIENT,
    collect,
    engine_pid,
    is_idle,
    request,
    running,
    running_scripted,
    segments,
    until,
)
from twinjet.core.errors import EngineDead, Overloaded
from twinjet.orchestrator.supervisor import RestartPolicy
from twinjet.orchestrator.watchdog import Patience


def test_a_kill_in_mid_stream_is_invisible():
    async def scenario():
        async with running("fake?step_ms=5") as orchestrator:
            prompts = [(i + 1, 2 * i + 3, 7) for i in range(16)]
            num_seen = 0

            def count(event):
                nonlocal num_seen
                num_seen += len(event.token_ids)

            streams = [orchestrator.submit(request(f"r{i}", p, 60)) for i, p in enumerate(prompts)]
            readers = [asyncio.create_task(collect(stream, count)) for stream in streams]
            first_pid = engine_pid(orchestrator)
            await until(lambda: num_seen > 16 * 5)
            os.kill(first_pid, signal.SIGKILL)
            await until(lambda: not orchestrator.health().ok)
            assert "SIGKILL" in orchestrator.health().reason or "not connected" in orchestrator.health().reason
            # Who comes during the restart waits as well.
            late = asyncio.create_task(collect(orchestrator.submit(request("late", (3, 3), 5))))
            for prompt, outcome in zip(prompts, await asyncio.gather(*readers), strict=True):
                assert (outcome.tokens, outcome.finish_reason) == (expected_tokens(prompt, 60), "length")
            assert (await late).tokens == expected_tokens((3, 3), 5)
            stats = orchestrator.stats()
            assert stats.replays_total == 16
            assert stats.engines[0].restarts == 1
            assert stats.engines[0].incarnation == 2
            assert engine_pid(orchestrator) != first_pid
            assert orchestrator.health().ok
            await until(lambda: is_idle(orchestrator))

    asyncio.run(scenario())


def test_kill_after_kill_of_a_single_stream():
    async def scenario():
        policy = RestartPolicy(backoff_s=0.01)
        async with running("fake?step_ms=10", restart_policy=policy) as orchestrator:
            num_kills = 0

            def kill(event):
                nonlocal num_kills
                if num_kills < 4 and event.token_ids:
                    num_kills += 1
                    os.kill(engine_pid(orchestrator), signal.SIGKILL)

            outcome = await collect(orchestrator.submit(request("a", max_tokens=30)), kill)
            assert (outcome.tokens, outcome.finish_reason) == (expected_tokens((5, 6, 7), 30), "length")
            assert orchestrator.stats().engines[0].restarts == 4

    asyncio.run(scenario())


def test_one_of_two_engines_dies_and_the_other_takes_over_at_once():
    async def scenario():
        async with running("fake?step_ms=10", roles=("both", "both")) as orchestrator:
            streams = [orchestrator.submit(request(f"r{i}", (i, 4), 60)) for i in range(1, 5)]
            killed = False

            def kill(event):
                nonlocal killed
                if not killed:
                    killed = True
                    os.kill(engine_pid(orchestrator, 0), signal.SIGKILL)

            for i, outcome in enumerate(await asyncio.gather(*(collect(s, kill) for s in streams)), start=1):
                assert outcome.tokens == expected_tokens((i, 4), 60)
            assert orchestrator.health().ok

    asyncio.run(scenario())


@pytest.mark.parametrize("victim", [0, 1])
def test_either_side_of_a_transfer_dies(victim):
    async def scenario():
        policy = RestartPolicy(backoff_s=0.01)
        async with running("fake?step_ms=5", roles=("prefill", "decode"), restart_policy=policy) as orchestrator:
            prompts = [tuple(range(i + 1, 5 * i + 30)) for i in range(8)]
            for delay_s in (0.0, 0.01, 0.03, 0.1):
                await until(lambda: all(engine.state == "ready" for engine in orchestrator.stats().engines))
                streams = [orchestrator.submit(request(f"r{i}", p, 20)) for i, p in enumerate(prompts)]
                readers = [asyncio.create_task(collect(stream)) for stream in streams]
                await asyncio.sleep(delay_s)
                os.kill(engine_pid(orchestrator, victim), signal.SIGKILL)
                for prompt, outcome in zip(prompts, await asyncio.gather(*readers), strict=True):
                    assert (outcome.tokens, outcome.finish_reason) == (expected_tokens(prompt, 20), "length")
            await until(lambda: is_idle(orchestrator) and not segments(orchestrator))
        assert not segments(orchestrator)

    asyncio.run(scenario())


def test_poison_ends_in_an_error_and_harms_nobody():
    async def scenario():
        factory = f"{load_poisonable.__module__}:{load_poisonable.__name__}"
        policy = RestartPolicy(backoff_s=0.01)
        async with running("fake?step_ms=5", factory=factory, restart_policy=policy) as orchestrator:
            streams = [orchestrator.submit(request(f"r{i}", (i, 4), 30)) for i in range(1, 5)]
            poison = orchestrator.submit(request("poison", (POISON, 1), 5))
            outcome = await collect(poison)
            assert (outcome.tokens, outcome.finish_reason) == ([], "error")
            assert outcome.error is not None
            assert "3 attempts" in outcome.error
            for i, outcome in enumerate(await asyncio.gather(*map(collect, streams)), start=1):
                assert (outcome.tokens, outcome.finish_reason) == (expected_tokens((i, 4), 30), "length")
            await until(lambda: orchestrator.health().ok)
            assert orchestrator.stats().engines[0].restarts == 3
            assert orchestrator.stats().extra["requests_given_up_total"] == 1

    asyncio.run(scenario())


def test_a_step_that_raises_fails_its_own_requests_and_the_engine_is_replaced(tmp_path):
    async def scenario():
        async with running(f"fake?fail_token=666&once={tmp_path / 'failed'}") as orchestrator:
            outcome = await collect(orchestrator.submit(request("a", (666, 1), 5)))
            assert outcome.finish_reason == "error"
            assert outcome.error is not None
            assert "the fake device failed" in outcome.error
            outcome = await collect(orchestrator.submit(request("b", (5, 5), 10)))
            assert outcome.tokens == expected_tokens((5, 5), 10)
            assert orchestrator.stats().engines[0].restarts == 1

    asyncio.run(scenario())


def test_a_step_that_hangs_turns_health_red_and_is_replayed(tmp_path):
    async def scenario():
        model = f"fake?hang_at=10&once={tmp_path / 'hung'}"
        async with running(model, patience=IMPATIENT) as orchestrator:
            reader = asyncio.create_task(collect(orchestrator.submit(request("a"))))
            await until(lambda: not orchestrator.health().ok)
            assert "nothing has moved" in orchestrator.health().reason
            assert (await reader).tokens == expected_tokens((5, 6, 7), 20)

    asyncio.run(scenario())


def test_a_frozen_process_is_replaced():
    async def scenario():
        async with running("fake?step_ms=5", patience=IMPATIENT) as orchestrator:
            reader = asyncio.create_task(collect(orchestrator.submit(request("a", max_tokens=100))))
            await asyncio.sleep(0.1)
            os.kill(engine_pid(orchestrator), signal.SIGSTOP)
            assert (await reader).tokens == expected_tokens((5, 6, 7), 100)
            assert orchestrator.stats().engines[0].restarts == 1

    asyncio.run(scenario())


def test_a_busy_server_process_does_not_blame_its_engines():
    async def scenario():
        patience = Patience(heartbeat_s=0.9, stall_s=0.9, stall_kill_s=0.9)
        async with running(patience=patience) as orchestrator:
            time.sleep(1.5)
            await asyncio.sleep(0.3)
            assert orchestrator.stats().engines[0].restarts == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "script",
    [
        "garbled",
        "two frames",
        "unequal columns",
        "token outside the vocabulary",
        "export unasked",
        "says that it failed, and stays",
        "silent",
        "stuck",
    ],
)
def test_an_engine_that_makes_no_sense_is_replaced_in_mid_stream(script):
    async def scenario():
        async with running_scripted(script) as orchestrator:
            outcome = await collect(orchestrator.submit(request("a", max_tokens=8)))
            assert (outcome.tokens, outcome.finish_reason) == (expected_tokens((5, 6, 7), 8), "length")
            assert orchestrator.stats().engines[0].restarts == 1
            assert orchestrator.stats().replays_total == 1

    asyncio.run(scenario())


def test_strangers_and_old_incarnations_are_not_believed():
    async def scenario():
        async with running_scripted("strangers") as orchestrator:
            outcome = await collect(orchestrator.submit(request("a", max_tokens=8)))
            assert (outcome.tokens, outcome.finish_reason) == (expected_tokens((5, 6, 7), 8), "length")
            extra = orchestrator.stats().extra
            assert (extra["stale_messages_total"], extra["stranger_messages_total"]) == (3, 1)
            assert orchestrator.stats().engines[0].restarts == 0

    asyncio.run(scenario())


def test_a_sequence_dropped_by_its_engine_is_replayed():
    async def scenario():
        async with running_scripted("drops the sequence") as orchestrator:
            stream = orchestrator.submit(request("a", max_tokens=3))
            assert (await collect(stream)).tokens == expected_tokens((5, 6, 7), 3)
            outcome = await collect(orchestrator.submit(request("b", (2,), 5)))
            assert (outcome.tokens, outcome.finish_reason) == (expected_tokens((2,), 5), "length")

    asyncio.run(scenario())


def test_a_start_without_progress_is_not_waited_for():
    async def scenario():
        patience = Patience(start_s=2.5)
        async with running_scripted("never ready", patience=patience) as orchestrator:
            assert orchestrator.stats().engines[0].incarnation == 2

    asyncio.run(scenario())


def test_an_engine_deaf_to_shutdown_is_killed():
    async def scenario():
        async with running_scripted("deaf") as orchestrator:
            pid = engine_pid(orchestrator)
            assert (await collect(orchestrator.submit(request("a", max_tokens=2)))).finish_reason == "length"
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(scenario())


def test_requests_end_when_the_engine_does_not_come_back_in_time():
    async def scenario():
        patience = Patience(recovery_s=0.3)
        async with running("fake?warm_ms=1500", patience=patience) as orchestrator:
            stream = orchestrator.submit(request("a", max_tokens=200))
            os.kill(engine_pid(orchestrator), signal.SIGKILL)
            outcome = await collect(stream)
            assert outcome.finish_reason == "error"
            assert outcome.error is not None
            assert "no engine" in outcome.error
            with pytest.raises(Overloaded, match="no engine"):
                orchestrator.submit(request("b"))
            await until(lambda: orchestrator.health().ok)
            assert (await collect(orchestrator.submit(request("c")))).tokens == expected_tokens((5, 6, 7), 20)

    asyncio.run(scenario())


def test_requests_outlast_a_restart_that_takes_long_but_gets_on():
    async def scenario():
        # Longer in all than requests wait for an engine that does not move; 2.5 s between two signs of life.
        patience = Patience(recovery_s=4.0)
        async with running("fake?warm_ms=7500&step_ms=2", patience=patience) as orchestrator:
            stream = orchestrator.submit(request("a", max_tokens=200))
            os.kill(engine_pid(orchestrator), signal.SIGKILL)
            outcome = await collect(stream)
            assert outcome.finish_reason == "length", outcome.error
            assert outcome.tokens == expected_tokens((5, 6, 7), 200)

    asyncio.run(scenario())


def test_requests_end_when_the_engine_cannot_be_started_again(tmp_path):
    async def scenario():
        # Loads once; every later incarnation finds the file.
        loads_once = (
            f"import os, runpy, sys; p = {str(tmp_path / 'loaded')!r}; os.path.exists(p) and sys.exit(5);"
            "open(p, 'w').close(); runpy; runpy.run_module('twinjet.worker', run_name='__main__')"
        )
        policy = RestartPolicy(backoff_s=0.01)
        command = (sys.executable, "-c", loads_once)
        async with running("fake?step_ms=5", command=command, restart_policy=policy) as orchestrator:
            stream = orchestrator.submit(request("a", max_tokens=200))
            os.kill(engine_pid(orchestrator), signal.SIGKILL)
            outcome = await collect(stream)
            assert outcome.finish_reason == "error"
            assert outcome.error is not None
            assert "exited with code 5" in outcome.error
            assert orchestrator.stats().engines[0].state == "dead"
            with pytest.raises(EngineDead, match="code 5"):
                orchestrator.submit(request("b"))

    asyncio.run(scenario())
