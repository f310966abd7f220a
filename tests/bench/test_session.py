"""What a test makes the engine compute, and what is timed of it: on the fake engine, whose plans are looked at."""

import gc
import sys
import time

import pytest

from tests.bench.made_up import engine_config
from tests.bench.watched import Watched, run_tests
from twinjet.bench.rig import Rig, Timing
from twinjet.bench.suite import BenchTest, Kind
from twinjet.core.config import CacheConfig, SchedulerConfig
from twinjet.core.errors import CheckpointError, EngineDead, StepFailed
from twinjet.core.plan import Plan
from twinjet.core.types import SamplingParams
from twinjet.scheduler.scheduler import Scheduler
from twinjet.scheduler.sequence import SequenceSpec


def run_once(watched: Watched, kind: Kind, num_tokens: int, concurrency: int) -> Timing:
    test = BenchTest(kind, num_tokens, concurrency)
    rig = Rig(watched.config, watched.load)
    try:
        rig.start(lambda *stage: None)
        return rig.run(
            [
                SequenceSpec(number, tuple(range(1, test.prompt_tokens + 1)), test.new_tokens, SamplingParams())
                for number in range(concurrency)
            ]
        )
    finally:
        rig.close()


def test_prompts_are_computed_under_the_budget_until_all_have_a_token():
    watched = Watched(engine_config(token_budget=8))
    timing = run_once(watched, "pp", 10, 3)
    assert [plan.num_rows for plan in watched.plans] == [8, 8, 8, 6]
    assert (timing.prefill.num_steps, timing.prefill.num_rows) == (4, 30)
    assert timing.decode.num_steps == 0
    assert sum(work.samples for plan in watched.plans for work in plan.work) == 3


def test_decoding_is_one_row_a_stream_and_step_behind_a_prompt_of_one_token():
    watched = Watched(engine_config())
    timing = run_once(watched, "tg", 20, 4)
    assert [plan.num_rows for plan in watched.plans] == [4] * 21
    assert (timing.prefill.num_steps, timing.prefill.num_rows) == (1, 4)
    assert (timing.decode.num_steps, timing.decode.num_rows) == (20, 80)
    for index, plan in enumerate(watched.plans):
        assert [work.start for work in plan.work] == [index] * 4


def test_the_prompts_step_is_not_in_the_time_of_decoding():
    watched = Watched(engine_config("fake?step_ms=5"))
    slow_s = 0.5
    watched.before_step = lambda plan: time.sleep(slow_s) if plan.work[0].token_ids is not None else None
    timing = run_once(watched, "tg", 10, 2)
    assert timing.prefill.device_s >= slow_s
    assert timing.prefill.wall_s >= timing.prefill.device_s
    assert 10 * 0.005 <= timing.decode.device_s < slow_s
    assert timing.decode.device_s <= timing.decode.wall_s < slow_s


def test_the_next_plan_is_made_while_a_step_runs(monkeypatch: pytest.MonkeyPatch):
    planned: set[int] = set()
    schedule = Scheduler.schedule

    def noted(self: Scheduler, now_s: float) -> Plan | None:
        plan = schedule(self, now_s)
        if plan is not None:
            planned.add(plan.step_id)
        return plan

    monkeypatch.setattr(Scheduler, "schedule", noted)
    watched = Watched(engine_config())
    overtaken: list[bool] = []

    def wait_for_the_next(plan: Plan) -> None:
        gives_up_s = time.monotonic() + 10
        while plan.step_id + 1 not in planned and time.monotonic() < gives_up_s and plan.step_id < 10:
            time.sleep(0.001)
        overtaken.append(plan.step_id + 1 in planned)

    watched.before_step = wait_for_the_next
    run_once(watched, "tg", 10, 2)
    assert overtaken == [True] * 10 + [False]


def test_tests_take_turns_and_warm_ups_are_not_counted():
    watched = Watched(engine_config(token_budget=8))
    tests = BenchTest("pp", 16, 2), BenchTest("tg", 12, 3)
    results, told = run_tests(watched, *tests, repetitions=3)
    for test, result in zip(tests, results, strict=True):
        assert (result.test, result.model, result.backend) == (test, "fake", "fake")
        assert [sample.num_tokens for sample in result.samples] == [test.total_tokens] * 3
    assert told == [*((done, 6, tests[done % 2]) for done in range(6)), (6, 6, tests[1])]
    # The short ones before them: as many prompts, and 3 streams that decode 4 tokens; each behind a prompt of one.
    assert sum(plan.num_rows for plan in watched.plans) == 3 * (32 + 32) + 3 * (3 * 5 + 3 * 13)


def test_prompts_are_never_the_same_twice():
    watched = Watched(engine_config(token_budget=16, context=64))
    run_tests(watched, BenchTest("pp", 16, 2), repetitions=4)
    prompts = [work.token_ids for plan in watched.plans for work in plan.work]
    assert len(prompts) == len(set(prompts)) == 4 * 2 * 2


def test_no_repetition_begins_once_a_tests_time_is_up():
    watched = Watched(engine_config())
    watched.before_step = lambda plan: time.sleep(0.3) if plan.work[0].num_tokens == 8 else None
    slow, quick = BenchTest("pp", 8, 1), BenchTest("pp", 4, 1)
    results, told = run_tests(watched, slow, quick, repetitions=4, max_time_s=0.25)
    assert [len(result.samples) for result in results] == [1, 4]
    assert told == [(0, 8, slow), *((done, 8, quick) for done in (1, 3, 5, 7)), (8, 8, quick)]


def test_every_test_runs_once_whatever_its_time():
    results, _ = run_tests(Watched(engine_config()), BenchTest("pp", 4, 1), repetitions=5, max_time_s=0.0)
    assert len(results[0].samples) == 1


def test_the_prefix_cache_is_off(monkeypatch: pytest.MonkeyPatch):
    configs: list[CacheConfig] = []

    def noted(self: Scheduler, config: SchedulerConfig, cache: CacheConfig) -> None:
        configs.append(cache)
        create(self, config, cache)

    create = Scheduler.__init__
    monkeypatch.setattr(Scheduler, "__init__", noted)
    watched = Watched(engine_config())
    run_tests(watched, BenchTest("pp", 16, 1), repetitions=1)
    assert watched.config.cache.prefix_cache
    assert [cache.prefix_cache for cache in configs] == [False]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak can be reset on Linux only")
def test_the_peak_is_that_of_the_test_alone():
    watched = Watched(engine_config())
    block = 64 << 20
    touched: list[int] = []

    def allocate(plan: Plan) -> None:
        if plan.work[0].num_tokens == 7:
            touched.append(len(bytearray(b"x") * block))

    watched.before_step = allocate
    small, large, small_again = run_tests(
        watched, BenchTest("pp", 2, 1), BenchTest("pp", 7, 1), BenchTest("pp", 3, 1), repetitions=1
    )[0]
    assert (large.peak_bytes or 0) - (small.peak_bytes or 0) > block * 0.9
    assert (large.peak_bytes or 0) - (small_again.peak_bytes or 0) > block * 0.9
    assert small.peak_bytes
    assert touched == [block, block]  # the warm-up, and the one that counts


def test_the_interpreter_is_left_as_it_was():
    before = sys.getswitchinterval(), gc.isenabled()
    during: list[tuple[float, bool]] = []
    watched = Watched(engine_config())
    watched.before_step = lambda plan: during.append((sys.getswitchinterval(), gc.isenabled()))
    run_tests(watched, BenchTest("pp", 4, 1), repetitions=1)
    assert {collecting for _, collecting in during} == {False}
    assert all(interval < before[0] for interval, _ in during)
    assert (sys.getswitchinterval(), gc.isenabled()) == before
    assert gc.get_freeze_count() == 0


def test_a_step_that_fails_ends_the_benchmark():
    with pytest.raises(StepFailed, match="the fake device failed step 3"):
        run_tests(Watched(engine_config("fake?fail_at=3")), BenchTest("tg", 8, 1))


def test_an_engine_that_does_not_load_says_why():
    with pytest.raises(CheckpointError, match="cannot be read"):
        run_tests(Watched(engine_config("fake?load_error=CheckpointError")), BenchTest("pp", 8, 1))
    with pytest.raises(EngineDead, match="did not start: AttributeError"):
        run_tests(Watched(engine_config("fake?load_error=NoSuchError")), BenchTest("pp", 8, 1))
