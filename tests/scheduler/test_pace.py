"""Steps bounded in milliseconds: the target while anybody decodes, the throughput optimum while nobody does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.device import Rig, prompt, spec
from twinjet.core.config import CacheConfig, SchedulerConfig
from twinjet.core.plan import Plan
from twinjet.scheduler.cost_model import NOTHING, CostModel, StepShape
from twinjet.scheduler.pace import AUTO_LEAST_MS, HEADROOM, Drift, Pace, forecast, make_pace
from twinjet.scheduler.policies import MIN_CHUNK_ROWS, BalancedPolicy

# 20 ms, and 1 ms a row up to 64 rows, then 2 ms a row: 64 rows are the optimum.
MODEL = CostModel((1, 64, 512), (21.0, 84.0, 980.0), 0.5, 0.001, 0.0001)
LIMITS = SchedulerConfig(16, 2048, 512)
CACHE = CacheConfig(16, 1024, "float16")
DIVIDE = BalancedPolicy().divide


def shares(pace: Pace, shape: StepShape, starts: list[int], needs: list[int], most: int, paced: bool) -> list[int]:
    return pace.shares(shape, starts, needs, lambda rows: DIVIDE(rows, needs, 0.0), most, paced=paced)


@given(
    st.floats(1, 400),
    st.integers(0, 16),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 900)), min_size=1, max_size=5),
    st.booleans(),
)
@settings(deadline=None)
def test_as_many_rows_as_fit_and_no_more(
    target: float, streams: int, prompts: list[tuple[int, int]], paced: bool
) -> None:
    pace = make_pace(MODEL, SchedulerConfig(16, 2048, 512, itl_target_ms=target), CACHE)
    limit = target if paced else pace.idle_limit_ms
    shape = StepShape(streams, streams, streams * 100, 0)
    starts, needs = [start for start, _ in prompts], [need for _, need in prompts]
    most = 512 - streams

    def cost(given: list[int]) -> float:
        after = shape
        for start, need, rows in zip(starts, needs, given, strict=True):
            after = after.plus(start, rows, rows == need) if rows else after
        return MODEL.predict_ms(after)

    got = shares(pace, shape, starts, needs, most, paced)
    # The oracle tries every number of rows.
    top = min(most, sum(needs)) if paced else min(most, sum(needs), pace.chunk_rows - streams)
    fitting = [rows for rows in range(top + 1) if cost(DIVIDE(rows, needs, 0.0)) <= limit]
    least = min(top, MIN_CHUNK_ROWS)
    if cost(got) <= limit:
        assert sum(got) >= min(least, max(fitting))
        assert sum(got) == top or cost(DIVIDE(sum(got) + 1, needs, 0.0)) > limit
    else:
        assert sum(got) == least, "too tight a target still lets prompts get on"


def test_limits() -> None:
    pace = make_pace(MODEL, LIMITS, CACHE)
    assert pace.chunk_rows == 64
    decoding = MODEL.predict_ms(StepShape(16, 16, 16 * 513, 0))
    assert decoding + 64 <= pace.itl_target_ms <= 200, "room for a good chunk beside all streams"
    # All streams on a full pool, and the least chunk.
    worst = MODEL.predict_ms(StepShape(16, 16, 16 * 1025, 0).plus(0, MIN_CHUNK_ROWS, True))
    assert pace.stall_bound_ms == pytest.approx(HEADROOM * pace.itl_target_ms)
    assert pace.full_stall_bound_ms == pytest.approx(HEADROOM * max(worst, pace.itl_target_ms))
    assert pace.wait_bound_ms(1.0) == pace.stall_bound_ms
    assert pace.wait_bound_ms(500.0) == HEADROOM * 500.0
    tight = make_pace(MODEL, SchedulerConfig(16, 2048, 512, itl_target_ms=1.0), CACHE)
    assert tight.full_stall_bound_ms == pytest.approx(HEADROOM * worst)
    usual = MODEL.predict_ms(StepShape(16, 16, 16 * 513, 0).plus(0, MIN_CHUNK_ROWS, True))
    assert tight.stall_bound_ms == pytest.approx(HEADROOM * usual), "no bound that the least chunk would break"
    quick = CostModel((1, 512), (0.1, 1.0), 0.0, 0.0, 0.0)
    assert make_pace(quick, LIMITS, CACHE).itl_target_ms == AUTO_LEAST_MS
    slow = CostModel((1, 512), (400.0, 5000.0), 0.0, 0.0, 0.0)
    assert make_pace(slow, LIMITS, CACHE).itl_target_ms > 400, "not under what decoding alone takes"
    unbounded = make_pace(MODEL, SchedulerConfig(16, 2048, 512, "prefill-first"), CACHE)
    assert unbounded.stall_bound_ms is unbounded.full_stall_bound_ms is unbounded.wait_bound_ms(1.0) is None


def rig(target: float) -> Rig:
    rig = Rig(max_streams=8, context=512, token_budget=256, page_size=16, num_pages=256)
    limits = SchedulerConfig(8, 512, 256, itl_target_ms=target)
    rig.scheduler.keep_pace(make_pace(MODEL, limits, CacheConfig(16, 256, "float32")))
    return rig


@pytest.mark.parametrize("target", [0.1, 60.0, 90.0])
def test_no_step_beyond_the_target_while_anybody_decodes(target: float) -> None:
    r = rig(target)
    r.add(spec(1, prompt(5), 60), spec(2, prompt(9), 60))
    r.plan()
    r.add(spec(3, prompt(400), 3), spec(4, prompt(30), 3), spec(5, prompt(200), 3))
    predicted: list[tuple[float, bool]] = []
    while r.scheduler.has_work:
        r.schedule()
        step = r.complete()
        assert step.predicted_ms is not None
        predicted.append((step.predicted_ms, step.decodes))
    beside_streams = [ms for ms, decodes in predicted if decodes]
    chunks = [
        sum(w.num_tokens for w in p.work if w.token_ids) for p in r.plans if any(w.token_ids is None for w in p.work)
    ]
    if target > 30:
        assert max(beside_streams) <= target
        assert max(beside_streams) > 0.9 * target, "and it is made use of"
    else:
        assert {min(rows, MIN_CHUNK_ROWS) for rows in chunks if rows > 14} == {MIN_CHUNK_ROWS}
    r.check_tokens()


def test_alone_a_prompt_is_computed_in_chunks_of_the_best_throughput() -> None:
    r = rig(50.0)
    r.add(spec(1, prompt(200), 2))
    r.run()
    assert [p.num_rows for p in r.plans] == [64, 64, 64, 8, 1]


@pytest.mark.parametrize("target", [0.1, 30.0, 60.0, 1000.0])
def test_tokens_do_not_depend_on_the_target(target: float) -> None:
    r = rig(target)
    for i in range(12):
        r.add(spec(i, prompt(1 + 31 * i, i), 1 + 2 * i))
        r.schedule()
    r.run(3)
    r.check_tokens()


def test_forecast() -> None:
    pace = make_pace(MODEL, LIMITS, CACHE)
    told = forecast(pace, LIMITS, 2)
    assert told.chunk_rows == 64
    assert [n for n, _ in told.ttft_ms] == [128, 512], "2,048 tokens leave no room for an answer"
    two_chunks = MODEL.predict_ms(NOTHING.plus(0, 64, False)) + MODEL.predict_ms(NOTHING.plus(64, 64, True))
    assert told.ttft_ms[0][1] == pytest.approx(two_chunks)
    assert all(busy > alone for (_, busy), (_, alone) in zip(told.busy_ttft_ms, told.ttft_ms, strict=True))
    assert [n for n, _ in told.itl_ms] == [1, 4, 8, 16]
    assert told.itl_ms[0][1] == pytest.approx(21 + 0.5 + 0.513)
    assert told.decode_tokens_s == pytest.approx(16e3 / told.itl_ms[-1][1])
    assert 0.95 * told.itl_target_ms < told.busy_itl_ms <= told.itl_target_ms, "steps beside streams fill the target"
    least = SchedulerConfig(16, 2048, 512, itl_target_ms=1.0)
    tight = forecast(make_pace(MODEL, least, CACHE), least, 2)
    steps = 512 // MIN_CHUNK_ROWS
    assert tight.busy_itl_ms == pytest.approx(tight.busy_ttft_ms[-1][1] / steps, rel=0.05), "and go beyond a tight one"
    small = forecast(make_pace(MODEL, SchedulerConfig(2, 32, 8), CACHE), SchedulerConfig(2, 32, 8), 2)
    assert [n for n, _ in small.ttft_ms] == [31]


def plan_ms(plan: Plan) -> float:
    shape = NOTHING
    for work in plan.work:
        shape = shape.plus(work.start, work.num_tokens, work.samples)
    return MODEL.predict_ms(shape)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_predictions_follow_what_steps_take(factor: float) -> None:
    """A machine that is twice as fast or slow as when it was measured: the target holds for what steps take."""
    r = rig(90.0)
    r.device.step_s = lambda plan: factor * plan_ms(plan) / 1e3
    r.add(spec(1, prompt(5), 490), spec(2, prompt(9), 480))
    for _ in range(100):
        r.plan()
        r.complete()
    assert r.scheduler.stats().cost_drift == pytest.approx(factor, rel=0.02)
    r.add(spec(3, prompt(400), 3))
    steps = [factor * plan_ms(r.plan()) for _ in range(3)]
    assert 80 < min(steps) <= max(steps) < 92
    predicted = [r.complete().predicted_ms for _ in range(3)]
    assert predicted == pytest.approx(steps, rel=0.02)


def test_one_odd_step_moves_little() -> None:
    drift = Drift()
    drift.add(1e6, 1.0)
    assert 1.05 < drift.factor < 1.08
    for _ in range(1000):
        drift.add(1e6, 1.0)
    assert drift.factor == pytest.approx(4)
