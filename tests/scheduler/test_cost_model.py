import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinjet.scheduler.cost_model import NOTHING, CostModel, MeasuredStep, StepShape, fit

ROWS = (1, 2, 4, 8, 9, 16, 32, 33, 64, 128, 256)
TRUE = CostModel((1, 8, 9, 64, 256), (4.0, 6.0, 9.0, 40.0, 200.0), 0.3, 0.002, 0.0004)
"""Padded beyond 8 rows, and with a bend at 64."""


def measured(model: CostModel, noise: float = 0.0) -> list[MeasuredStep]:
    shapes = [NOTHING.plus(0, rows, True) for rows in ROWS]
    shapes += [StepShape(n, n, n * context, 0) for n in (1, 8) for context in (1, 1000)]
    shapes += [NOTHING.plus(start, 64, True) for start in (500, 1500)]
    return [MeasuredStep(s, model.predict_ms(s) * (1 + noise * (-1) ** i)) for i, s in enumerate(shapes)]


def test_shapes_by_hand() -> None:
    decoding = NOTHING.plus(10, 1, True).plus(4, 1, True)
    assert decoding == StepShape(rows=2, samples=2, single_pairs=11 + 5, chunk_pairs=0)
    assert decoding.plus(5, 3, False) == StepShape(rows=5, samples=2, single_pairs=16, chunk_pairs=6 + 7 + 8)


def test_predict_by_hand() -> None:
    assert TRUE.predict_ms(StepShape(8, 2, 100, 50)) == pytest.approx(6 + 0.6 + 0.2 + 0.02)
    assert TRUE.predict_ms(StepShape(4, 0, 0, 0)) == pytest.approx(4 + 2 * 3 / 7)
    assert TRUE.predict_ms(StepShape(160, 0, 0, 0)) == pytest.approx(120)
    assert TRUE.predict_ms(StepShape(352, 0, 0, 0)) == pytest.approx(280), "the last line goes on"
    assert CostModel((7,), (3.0,), 0, 0, 0).predict_ms(StepShape(100, 0, 0, 0)) == 3


def test_fit_finds_what_made_the_steps() -> None:
    model = fit(measured(TRUE))
    for rows in (1, 5, 9, 40, 100, 250):
        for streams, context in ((0, 0), (16, 300)):
            shape = StepShape(rows + streams, 1 + streams, streams * context, rows * 200)
            assert model.predict_ms(shape) == pytest.approx(TRUE.predict_ms(shape), rel=0.05)


@given(st.lists(st.floats(0.5, 1.5), min_size=len(ROWS) + 6, max_size=len(ROWS) + 6))
@settings(max_examples=25, deadline=None)
def test_more_never_costs_less_however_noisy(noise: list[float]) -> None:
    steps = [MeasuredStep(s.shape, s.ms * n) for s, n in zip(measured(TRUE), noise, strict=True)]
    model = fit(steps)
    costs = [model.predict_ms(StepShape(rows, 1, 0, 0)) for rows in range(1, 300)]
    assert costs == sorted(costs)
    assert min(model.sample_ms, model.single_ms, model.chunk_ms) >= 0
    assert costs[0] > 0


def test_few_steps_do() -> None:
    (one,) = measured(TRUE)[:1]
    assert fit([one]).predict_ms(one.shape) == pytest.approx(one.ms, rel=1e-3)
    with pytest.raises(ValueError, match="at least one"):
        fit([])
