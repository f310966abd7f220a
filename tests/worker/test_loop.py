"""The worker loop over real sockets, with the fake engine on its device thread."""

import asyncio
import random

import msgspec
import pytest

from tests.fakes import FAKE_VOCAB, expected_logprob, expected_tokens
from tests.worker.harness import Server, assert_at_rest, fake_config, random_prompt, segments, submit, thread_worker
from twinjet.wire.messages import (
    Abort,
    Failed,
    Ready,
    SequenceEnded,
    Shutdown,
    Stats,
    StepTokens,
    Submit,
)

pytestmark = pytest.mark.usefixtures("frequent_stats")


def test_start_is_reported_and_one_sequence_runs() -> None:
    async def scenario() -> None:
        async with Server() as server:
            config = fake_config()
            with thread_worker(server, config):
                ready = await server.until_ready()
                assert server.progress() == [
                    ("load", 1, 2),
                    ("load", 2, 2),
                    ("compile", 1, 3),
                    ("compile", 2, 3),
                    ("compile", 3, 3),
                ]
                limits = (ready.vocab_size, ready.context, ready.max_streams, ready.num_pages, ready.page_size)
                assert limits == (FAKE_VOCAB, 256, 8, 128, 8)
                assert (ready.token_budget, ready.backend, ready.kv_dtype) == (32, "fake", "float32")
                server.send(submit(7, [5, 6, 7], 10))
                await server.until_ended(7)
                assert server.tokens[7] == expected_tokens([5, 6, 7], 10)
                assert server.ends[7] == "length"
                await assert_at_rest(server)

    asyncio.run(scenario())


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_many_sequences_with_aborts_at_any_time(depth: int) -> None:
    """More than fit, on few pages: queueing and preemption happen; every token is the oracle's."""

    async def scenario() -> None:
        rng = random.Random(depth)
        async with Server() as server:
            config = fake_config(
                "step_ms=0.2", num_pages=24, max_streams=5, context=128, token_budget=16, pipeline_depth=depth
            )
            with thread_worker(server, config):
                await server.until_ready()
                prompts: dict[int, tuple[list[int], int]] = {}
                aborted = set()
                for sequence_id in range(80):
                    prompt = random_prompt(rng, 70)
                    n = rng.randint(1, 128 - len(prompt))
                    prompts[sequence_id] = (prompt, n)
                    server.send(submit(sequence_id, prompt, n))
                    if rng.random() < 0.5:
                        victim = rng.choice(list(prompts))
                        aborted.add(victim)
                        server.send(Abort(victim))
                    if rng.random() < 0.3:
                        await asyncio.sleep(rng.random() * 0.01)
                server.send(Abort(12345))
                await server.until_ended(*prompts)
                for sequence_id, (prompt, n) in prompts.items():
                    tokens = server.tokens.get(sequence_id, [])
                    assert tokens == expected_tokens(prompt, n)[: len(tokens)]
                    if server.ends[sequence_id] == "length":
                        assert len(tokens) == n
                    else:
                        assert server.ends[sequence_id] == "cancelled"
                        assert sequence_id in aborted
                assert {"length", "cancelled"} == set(server.ends.values())
                await assert_at_rest(server)
                stats = server.of(Stats)[-1]
                assert stats.preemptions_total > 0
                assert stats.compiles_total == 0
                assert stats.busy_s_total > 0
                steps = [m.step_id for m in server.of(StepTokens)]
                assert len(steps) == len(set(steps)), "one message a step"

    asyncio.run(scenario())


def test_stop_tokens_end_a_sequence_and_are_emitted() -> None:
    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config()):
                await server.until_ready()
                prompt = [9, 8, 7, 6]
                tokens = expected_tokens(prompt, 20)
                server.send(submit(1, prompt, 20, stop=(tokens[6], 5000)))
                server.send(submit(2, prompt, 20, stop=(tokens[0],)))
                await server.until_ended(1, 2)
                assert server.tokens == {1: tokens[: tokens.index(tokens[6]) + 1], 2: tokens[:1]}
                assert server.ends == {1: "stop", 2: "stop"}
                await assert_at_rest(server)

    asyncio.run(scenario())


def test_logprobs_reach_only_who_asked() -> None:
    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config("step_ms=1")):
                await server.until_ready()
                for sequence_id, num_logprobs in ((1, None), (2, 0), (3, 2)):
                    server.send(submit(sequence_id, [4, 5, 6], 5, num_logprobs=num_logprobs))
                await server.until_ended(1, 2, 3)
                seen: dict[int, list] = {1: [], 2: [], 3: []}
                for message in server.of(StepTokens):
                    for row, sequence_id in enumerate(message.sequence_ids):
                        seen[sequence_id].append(message.logprobs[row] if message.logprobs else None)
                tokens = expected_tokens([4, 5, 6], 5)
                assert seen[1] == [None] * 5
                assert [entry.logprob for entry in seen[2]] == pytest.approx([expected_logprob(t) for t in tokens])
                assert [entry.top_ids for entry in seen[2]] == [[]] * 5
                assert [entry.top_ids for entry in seen[3]] == [[t, (t + 1) % FAKE_VOCAB] for t in tokens]
                assert [len(entry.top_logprobs) for entry in seen[3]] == [2] * 5

    asyncio.run(scenario())


def test_an_abort_frees_slot_and_pages_within_two_steps() -> None:
    async def scenario() -> None:
        async with Server() as server:
            # The only slot; steps that can be told apart.
            config = fake_config("step_ms=20", max_streams=1, num_pages=32, context=256)
            with thread_worker(server, config):
                await server.until_ready()
                server.send(submit(1, [1, 2, 3], 200))
                await server.until(lambda: len(server.tokens.get(1, ())) >= 3)
                server.send(submit(2, [4, 5, 6], 1))
                server.send(Abort(1))
                await server.until_ended(1)
                step_of_abort = server.of(StepTokens)[-1].step_id
                await server.until_ended(2)
                # At most two plans were made before the abort arrived; the next holds the newcomer.
                assert server.of(StepTokens)[-1].step_id - step_of_abort <= 3
                assert server.ends == {1: "cancelled", 2: "length"}
                assert server.tokens[2] == expected_tokens([4, 5, 6], 1)
                await assert_at_rest(server)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"token_ids": b""}, "at least one token"),
        ({"token_ids": b"\x01\x00\x00"}, "int32"),
        ({"token_ids": b"\xff\xff\xff\xff"}, "from 0 to 1008, got some from -1"),
        ({"token_ids": b"\xf1\x03\x00\x00"}, "from 0 to 1008"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"max_new_tokens": 256}, "context of 256"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"num_logprobs": 21}, "logprobs must be from 0 to 20"),
    ],
)
def test_a_wrong_submission_is_refused_and_harms_nobody(changes: dict, complaint: str) -> None:
    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config()):
                await server.until_ready()
                server.send(submit(1, [1, 2, 3], 50))
                server.send(msgspec.structs.replace(submit(2, [1], 5), **changes))
                await server.until_ended(1, 2)
                assert server.ends == {1: "length", 2: "error"}
                assert complaint in server.texts[2]
                assert server.tokens == {1: expected_tokens([1, 2, 3], 50)}

    asyncio.run(scenario())


def test_garbage_on_the_wire_is_ignored() -> None:
    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config()) as worker:
                await server.until_ready()
                for garbage in (b"", b"\xc1", b"\x81\xa4type\xa6Submit", bytes(range(256)) * 100):
                    server.socket._socket.send_multipart([b"0.0", garbage])
                server.send(submit(1, [1, 2, 3], 5))
                await server.until_ended(1)
                assert server.tokens[1] == expected_tokens([1, 2, 3], 5)
                assert worker.socket.bad_frames_total == 4

    asyncio.run(scenario())


# --- the end ------------------------------------------------------------------------------------


def test_shutdown_sends_the_running_step_and_frees_shared_memory() -> None:
    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config("step_ms=50")) as worker:
                await server.until_ready()
                server.send(submit(0, [1, 2, 3], 9, export=True))
                await server.exported(0)
                assert segments(server)
                server.send(submit(1, [1, 2, 3], 200))
                await server.until(lambda: 1 in server.tokens)
                server.send(Shutdown())
                assert await worker.stopped() == 0
                assert not segments(server)
                await asyncio.sleep(0.05)
                assert 2 <= len(server.tokens[1]) < 10
                assert server.tokens[1] == expected_tokens([1, 2, 3], 200)[: len(server.tokens[1])]
                assert 1 not in server.ends
                assert not server.of(Failed)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["fail", "refuse"])
def test_a_failed_step_fails_its_own_sequences_and_then_the_engine(how: str) -> None:
    """Whether the device fails it, or the engine does not take it."""

    async def scenario() -> None:
        async with Server() as server:
            # One slot: sequence 2 waits and has no part in the step that fails.
            config = fake_config(f"{how}_token=666&step_ms=5", max_streams=2, token_budget=4)
            with thread_worker(server, config) as worker:
                await server.until_ready()
                server.send(submit(0, [1, 2, 3], 200))
                await server.until(lambda: len(server.tokens.get(0, ())) > 5)
                server.send(submit(1, [1, 2, 3, 4, 5, 6, 666], 5))
                server.send(submit(2, [1, 2], 5))
                assert await worker.stopped() == 1
                await server.until(lambda: server.of(Failed))
                (failed,) = server.of(Failed)
                assert failed.kind == "StepFailed"
                assert "RuntimeError: the fake device" in failed.text
                assert server.ends == {0: "error", 1: "error"}
                assert server.texts[1] == failed.text
                assert server.log[-1][1] == failed, "the last word"
                assert server.tokens[0] == expected_tokens([1, 2, 3], 200)[: len(server.tokens[0])]

    asyncio.run(scenario())


def test_a_step_that_hangs_does_not_keep_the_loop_from_leaving(monkeypatch) -> None:
    monkeypatch.setattr("twinjet.worker.loop.STOP_S", 0.1)

    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config("hang_at=2")) as worker:
                await server.until_ready()
                server.send(submit(0, [1, 2, 3], 200))
                await server.until(lambda: 0 in server.tokens)
                steps = (await server.fresh_stats()).steps_total
                assert steps == 1, "the heart beats, and says that nothing moves"
                server.send(Shutdown())
                assert await worker.stopped(2) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["CheckpointError", "ConfigError"])
def test_a_load_error_is_reported_by_its_name(kind: str) -> None:
    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config(f"load_error={kind}")) as worker:
                assert await worker.stopped() == 1
                await server.until(lambda: server.of(Failed))
                assert server.of(Failed) == [Failed(kind, "the fake checkpoint cannot be read")]
                assert not server.of(Ready)

    asyncio.run(scenario())


def test_a_bug_in_the_loop_is_a_failure_not_silence(monkeypatch) -> None:
    def broken(self, spec, now_s):
        raise KeyError("a bug")

    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config()) as worker:
                await server.until_ready()
                monkeypatch.setattr("twinjet.scheduler.scheduler.Scheduler.add", broken)
                server.send(submit(0, [1], 1))
                assert await worker.stopped() == 1
                await server.until(lambda: server.of(Failed))
                assert server.of(Failed) == [Failed("EngineError", "KeyError: 'a bug'")]

    asyncio.run(scenario())


def test_shutdown_and_submissions_while_it_loads() -> None:
    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config("load_ms=60000")) as worker:
                while not server.socket.send(0, 0, submit(1, [1], 1)):
                    await asyncio.sleep(0.01)
                await server.until_ended(1)
                assert "still starting" in server.texts[1]
                server.send(Shutdown())
                assert await worker.stopped(3) == 0
                assert not server.of(Stats)
                assert server.of(SequenceEnded)

    asyncio.run(scenario())


def test_messages_of_one_sequence_keep_their_order() -> None:
    """Submit and abort sent back to back, many times: each is answered by exactly one end."""

    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config()):
                await server.until_ready()
                for sequence_id in range(300):
                    server.send(submit(sequence_id, [sequence_id + 1], 100))
                    server.send(Abort(sequence_id))
                await server.until_ended(*range(300))
                assert set(server.ends.values()) <= {"cancelled", "length"}
                await assert_at_rest(server)

    asyncio.run(scenario())


def test_a_resubmitted_journal_goes_on_where_it_was() -> None:
    """What a replay does: prompt and emitted tokens are the known tokens."""

    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config()):
                await server.until_ready()
                prompt = [3, 1, 4, 1, 5]
                tokens = expected_tokens(prompt, 30)
                again: Submit = submit(1, prompt + tokens[:12], 18)
                server.send(again)
                await server.until_ended(1)
                assert server.tokens[1] == tokens[12:]

    asyncio.run(scenario())
