"""The small parts: admission, output, routes, the child's environment, the watchdog."""

import asyncio
import gc
import os
import sys
from dataclasses import replace

import pytest

from tests.fakes import blank_stats
from tests.orchestrator.simulation import READY, request
from twinjet.core.errors import ConfigError, ContextTooLong, InvalidRequest
from twinjet.core.types import EngineInfo, Forecast, SamplingParams, TokenEvent, TokenLogprobs
from twinjet.orchestrator.admission import check_request
from twinjet.orchestrator.environment import worker_environment
from twinjet.orchestrator.health import judge
from twinjet.orchestrator.journal import Entry, HeldPages
from twinjet.orchestrator.output import Output, TokenStream
from twinjet.orchestrator.pools import Engine, EnginePool
from twinjet.orchestrator.prediction import ttft_s
from twinjet.orchestrator.router import route
from twinjet.orchestrator.supervisor import RestartPolicy
from twinjet.orchestrator.watchdog import Patience, Watchdog

INFO = EngineInfo(
    engine_id=0,
    incarnation=1,
    pid=1,
    vocab_size=100,
    context=32,
    max_streams=2,
    num_pages=8,
    page_size=4,
    token_budget=8,
    backend="fake",
    kv_dtype="float32",
    warmup_s=0.0,
)


# --- admission ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (1, 100)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_token_ids": frozenset({3, 100})}, "stop_token_ids"),
        ({"stop_token_ids": frozenset({-1})}, "stop_token_ids"),
        ({"num_logprobs": -1}, "logprobs"),
        ({"num_logprobs": 21}, "logprobs"),
        # What a program may pass and no engine could read.
        ({"prompt": (1, 1.5)}, "prompt"),
        ({"prompt": ("a",)}, "prompt"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"num_logprobs": 1.5}, "logprobs"),
        ({"stop_token_ids": frozenset({"a"})}, "stop_token_ids"),
    ],
)
def test_what_cannot_run_is_refused_by_the_field_to_change(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        check_request(request("a", **fields), INFO)
    assert caught.value.param == param


@pytest.mark.parametrize("field", ["top_k", "seed", "choice"])
def test_sampling_that_no_engine_could_read_is_refused(field: str):
    sampling = SamplingParams(**{field: 1.5})  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match=r"must be an int, got 1\.5") as caught:
        check_request(replace(request("a"), sampling=sampling), INFO)
    assert caught.value.param == field


@pytest.mark.parametrize(("num_prompt", "max_tokens", "param"), [(32, 1, "prompt"), (30, 3, "max_tokens")])
def test_what_does_not_fit_the_context_is_refused_with_all_three_numbers(num_prompt, max_tokens, param):
    with pytest.raises(ContextTooLong, match=rf"{num_prompt} tokens.*{max_tokens}.*32") as caught:
        check_request(request("a", (1,) * num_prompt, max_tokens), INFO)
    assert caught.value.param == param


def test_the_largest_request_is_accepted():
    check_request(request("a", (99,) * 31, 1, stop_token_ids=frozenset({99}), num_logprobs=20), INFO)


# --- output -------------------------------------------------------------------------------------


def test_a_forgotten_stream_aborts_its_request_and_a_finished_one_does_not():
    async def scenario():
        aborted = []
        forgotten = TokenStream(Output(), lambda: aborted.append("forgotten"))
        output = Output()
        finished = TokenStream(output, lambda: aborted.append("finished"))
        output.push(3, None)
        output.end("length")
        assert [event async for event in finished] == [TokenEvent((3,), finish_reason="length")]
        del forgotten, finished
        gc.collect()
        await asyncio.sleep(0)
        assert aborted == ["forgotten"]

    asyncio.run(scenario())


def test_logprobs_merge_with_their_tokens():
    output = Output()
    output.push(1, TokenLogprobs(-1.0))
    output.push(2, TokenLogprobs(-2.0))
    assert output.take() == TokenEvent((1, 2), (TokenLogprobs(-1.0), TokenLogprobs(-2.0)))
    assert output.take() is None
    output.end("error", "why")
    assert output.take() == TokenEvent(finish_reason="error", error="why")


def test_two_readers_of_one_stream_are_an_error():
    async def scenario():
        stream = TokenStream(Output(), lambda: None)
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="two tasks"):
            await anext(stream)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    asyncio.run(scenario())


# --- routes -------------------------------------------------------------------------------------


def routed(*roles: str, held: bool = False, max_tokens: int = 5, loads: tuple[int, ...] | None = None):
    """(engine id, exports) for an entry, with engines of these roles alive."""
    entry = Entry(request("a", max_tokens=max_tokens))
    entry.held = HeldPages(0, 1, ()) if held else None
    engines = [Engine(i, role) for i, role in enumerate(roles)]
    found = route(entry, engines, lambda engine: 0 if loads is None else loads[engine.engine_id])
    return found and (found.engine.engine_id, found.exports)


def test_roles_are_preferences():
    assert routed() is None
    assert routed("both", "both", loads=(9, 3)) == (1, False)
    assert routed("prefill", "decode") == (0, True)
    assert routed("decode", "prefill", "decode") == (1, True)
    assert routed("prefill", "decode", max_tokens=1) == (0, False)
    assert routed("prefill", "prefill", "decode", loads=(5, 1, 0)) == (1, True)
    assert routed("prefill", "decode", "decode", held=True, loads=(0, 7, 2)) == (2, False)
    # Somebody is missing.
    assert routed("prefill") == (0, False)
    assert routed("decode") == (0, False)
    assert routed("prefill", held=True) == (0, False)
    assert routed("both", "decode", held=True, loads=(1, 2)) == (0, False)


# --- the child's environment --------------------------------------------------------------------


def test_a_child_finds_the_same_code_and_the_platform_that_was_asked_for(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = worker_environment({"PYTHONPATH": "/elsewhere", "JAX_PLATFORMS": "tpu", "A": "b"}, "cpu")
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert paths[0] == str(tmp_path)
    assert "/elsewhere" in paths
    # Before the standard library, these would hide parts of it.
    assert os.path.dirname(os.__file__) not in paths
    assert not any(path.startswith(os.path.join(sys.prefix, "lib")) for path in paths)
    assert (environment["JAX_PLATFORMS"], environment["A"]) == ("cpu", "b")
    assert worker_environment({"JAX_PLATFORMS": "tpu"}, None)["JAX_PLATFORMS"] == "tpu"


# --- the watchdog -------------------------------------------------------------------------------


def ready_engine() -> Engine:
    engine = Engine(0, "both", incarnation=1)
    engine.begin(pid=1)
    engine.become_ready(READY)
    return engine


def ticks_until_blamed(watchdog: Watchdog, engine: Engine, most: int = 200) -> int | None:
    return next((i for i in range(1, most) if watchdog.tick(engine)), None)


def test_silence_and_standstill_are_noticed_in_time():
    patience = Patience(heartbeat_s=10, stall_s=20, stall_kill_s=40)
    assert patience.tick_s == 1.0
    assert ticks_until_blamed(Watchdog(patience, lambda engine: False), ready_engine()) == 11

    engine, watchdog = ready_engine(), Watchdog(patience, lambda engine: True)
    for i in range(1, 41):
        engine.silent_ticks = 0
        assert watchdog.tick(engine) is None
        assert watchdog.stalled_s(engine) == i
    engine.silent_ticks = 0
    assert "41 s" in (watchdog.tick(engine) or "")


def test_a_steady_report_without_steps_is_no_progress_and_one_with_steps_is():
    engine = ready_engine()
    watchdog = Watchdog(Patience(), lambda engine: True)

    def report(steps_total: int) -> None:
        engine.report(blank_stats(num_running=1, pages_used=1, steps_total=steps_total))

    report(1)
    watchdog.tick(engine)
    report(1)
    assert watchdog.stalled_s(engine) == 1
    report(2)
    assert watchdog.stalled_s(engine) == 0


def test_patience_is_positive():
    with pytest.raises(ConfigError, match="stall_s"):
        Patience(stall_s=0)


def test_pauses_between_restarts_grow_up_to_a_limit():
    policy = RestartPolicy(backoff_s=0.5, max_backoff_s=3.0)
    assert [policy.pause_s(losses) for losses in range(1, 7)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


# --- health -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age_s", "expected_s", "ok"),
    [(0.0, None, True), (9.0, None, True), (2.9, 0.1, True), (3.1, 0.1, False), (9.0, 1.0, True), (11.0, 1.0, False)],
)
def test_health_is_red_while_a_step_takes_many_times_its_prediction(age_s: float, expected_s: float | None, ok: bool):
    pool = EnginePool(("both",))
    pool[0].begin(pid=1)
    pool[0].become_ready(READY)
    patience = Patience()
    pool[0].report(blank_stats(steps_total=1, step_age_s=age_s, step_expected_s=expected_s))
    health = judge(pool, Watchdog(patience, lambda engine: False), patience)
    assert health.ok == ok
    assert ok or "should take" in health.reason
    pool[0].report(blank_stats(steps_total=2, step_age_s=0.0, step_expected_s=None))
    assert judge(pool, Watchdog(patience, lambda engine: False), patience).ok, "and green again"


# --- prediction ---------------------------------------------------------------------------------

FORECAST = Forecast(
    itl_target_ms=50.0,
    stall_bound_ms=60.0,
    full_stall_bound_ms=80.0,
    chunk_rows=64,
    busy_streams=8,
    busy_chunk_rows=32,
    ttft_ms=((100, 100.0), (500, 600.0)),
    busy_ttft_ms=((100, 200.0), (500, 1200.0)),
    itl_ms=((1, 10.0), (4, 25.0)),
    busy_itl_ms=50.0,
    prefill_tokens_s=1000.0,
    decode_tokens_s=160.0,
)


@pytest.mark.parametrize(
    ("num_prompt", "ahead", "remaining", "seconds"),
    [
        (100, [], [], 0.1),
        (50, [], [], 0.05),
        (1100, [], [], 1.35),  # the last line goes on: 1.25 ms a token
        (100, [], [7], 0.2),  # somebody decodes
        (100, [200], [20], 0.1 + 0.125),  # a much longer one ahead gives up half: 200 tokens' time
        (100, [100_000], [20], 0.1 + 0.125),
        (100, [150], [20], 0.1 + 0.1875),  # not that much longer: it goes first
        (100, [50, 100_000, 100_000], [9, 9, 9], 0.1 + 0.4375),  # 50 + 100 * 4 tokens' time
        (100, [], [30, 3, 20, 8], 3 * 0.025 + 0.2),  # all four slots are taken; one is free after three tokens
        (100, [], [30, 3, 20, 8, 5, 5], 5 * 0.025 + 0.2),
    ],
)
def test_expected_ttft(num_prompt: int, ahead: list[int], remaining: list[int], seconds: float):
    assert ttft_s(FORECAST, num_prompt, ahead, remaining, max_streams=4) == pytest.approx(seconds)
