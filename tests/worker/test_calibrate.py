import asyncio

import pytest

from tests.fakes import FakeEngine, expected_tokens
from tests.worker.harness import Server, fake_config, submit, thread_worker
from twinjet.core.config import EngineConfig
from twinjet.core.plan import Plan, StepOutput
from twinjet.scheduler.cost_model import StepShape, fit
from twinjet.scheduler.pace import forecast, make_pace
from twinjet.wire.messages import Stats
from twinjet.worker.calibrate import measure_steps


class Recorder(FakeEngine):
    """A step takes 1 ms and 50 us a row."""

    def __init__(self) -> None:
        super().__init__(97, 128, 8, 8, 256, step_time_s=1e-3, row_time_s=50e-6)
        self.plans: list[Plan] = []

    def step(self, plan: Plan) -> StepOutput:
        self.plans.append(plan)
        return super().step(plan)


def check_plans(engine: Recorder, config: EngineConfig) -> None:
    for plan in engine.plans:
        assert plan.num_rows <= config.scheduler.token_budget
        pages = [page_id for grant in plan.grants for page_id in grant.page_ids]
        assert len(set(pages)) == len(pages)
        assert max(pages) < config.cache.num_pages
        assert len({work.slot for work in plan.work}) == len(plan.work) <= config.scheduler.max_streams
        held = {grant.slot: len(grant.page_ids) * config.cache.page_size for grant in plan.grants}
        for work in plan.work:
            assert work.start >= 0
            assert work.start + work.num_tokens <= min(held[work.slot], config.scheduler.context)


def test_plans_tell_an_engines_costs() -> None:
    engine, config = Recorder(), fake_config(calibration_s=0.3)
    model = fit(measure_steps(engine, config))
    check_plans(engine, config)
    assert max(plan.num_rows for plan in engine.plans) == config.scheduler.token_budget
    # Sleeping takes longer than asked, on a busy machine much longer.
    assert 1 < model.predict_ms(StepShape(1, 1, 1, 0)) < 3
    assert 2.5 < model.predict_ms(StepShape(32, 1, 0, 500)) < 5


@pytest.mark.parametrize(
    ("num_pages", "page_size", "context", "max_streams", "token_budget"),
    [(1, 2, 2, 1, 1), (4, 8, 32, 8, 8), (3, 8, 20, 16, 64), (100, 16, 1600, 2, 512), (5000, 16, 40_000, 64, 2048)],
)
def test_plans_fit_any_engine(
    num_pages: int, page_size: int, context: int, max_streams: int, token_budget: int
) -> None:
    engine = Recorder()
    engine.step_time_s = engine.row_time_s = 0.0
    config = fake_config(
        num_pages=num_pages,
        page_size=page_size,
        context=context,
        max_streams=max_streams,
        token_budget=token_budget,
        calibration_s=0.02,
    )
    pace = make_pace(fit(measure_steps(engine, config)), config.scheduler, config.cache)
    check_plans(engine, config)
    assert forecast(pace, config.scheduler, 2).decode_tokens_s > 0


def test_a_slow_engine_is_measured_for_no_longer_than_it_must() -> None:
    engine = Recorder()
    engine.step_time_s = 0.02
    assert len(measure_steps(engine, fake_config(calibration_s=1e-9))) == len(engine.plans) == 3


def test_an_engine_that_measured_says_what_to_expect_and_keeps_to_its_target() -> None:
    async def scenario() -> None:
        async with Server() as server:
            config = fake_config("step_ms=1&row_ms=0.5", calibration_s=0.2, itl_target_ms=11.0)
            with thread_worker(server, config):
                ready = await server.until_ready()
                assert ready.forecast is not None
                assert ready.forecast.itl_target_ms == 11.0
                assert ready.forecast.busy_chunk_rows <= 20
                server.send(submit(0, [1, 2, 3], 60))
                await server.until(lambda: 0 in server.tokens)
                server.send(submit(1, list(range(1, 90)), 5))
                await server.until_ended(0, 1)
                assert server.tokens[0] == expected_tokens([1, 2, 3], 60)
                assert server.tokens[1] == expected_tokens(list(range(1, 90)), 5)
                stats: Stats = await server.fresh_stats()
                assert 0 < stats.predicted_s_total < 2 * stats.busy_s_total
                assert sum(stats.step_durations.counts) == stats.steps_total
                assert sum(stats.gap_durations.counts) == stats.steps_total - 1
                assert stats.step_durations.total_s == stats.busy_s_total

    asyncio.run(scenario())


def test_the_heart_tells_how_long_a_step_has_been_running(monkeypatch) -> None:
    monkeypatch.setattr("twinjet.worker.loop.STATS_INTERVAL_S", 0.05)
    monkeypatch.setattr("twinjet.worker.loop.STOP_S", 0.1)

    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config("step_ms=2&hang_at=3", calibration_s=0.1)):
                await server.until_ready()
                stats: Stats = await server.fresh_stats()
                assert (stats.step_age_s, stats.step_expected_s) == (0.0, None)
                server.send(submit(0, [1, 2, 3], 60))
                await server.until(lambda: len(server.tokens.get(0, [])) == 2)
                await asyncio.sleep(0.5)
                stats = await server.fresh_stats()
                assert 0.4 < stats.step_age_s < 10
                assert stats.step_expected_s is not None
                assert 0.001 < stats.step_expected_s < 0.05

    asyncio.run(scenario())
