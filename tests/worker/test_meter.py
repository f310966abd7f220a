import numpy as np

from twinjet.core.config import CacheConfig, SchedulerConfig
from twinjet.core.plan import StepOutput
from twinjet.scheduler.cost_model import CostModel
from twinjet.scheduler.pace import make_pace
from twinjet.scheduler.sequence import CompletedStep
from twinjet.wire.messages import DURATION_BOUNDS_S
from twinjet.worker.meter import StepMeter


def add(
    meter: StepMeter, start: float, stop: float, predicted_ms: float = 1.0, *, decodes: bool = True, more: bool = True
) -> None:
    output = StepOutput(0, np.empty(0, np.int32), started_s=start, ended_s=stop, num_padding_rows=3)
    meter.add(output, CompletedStep([], [], predicted_ms, decodes), more_work=more)


def bucket(seconds: float) -> int:
    return next(i for i, bound in enumerate(DURATION_BOUNDS_S) if seconds <= bound)


def test_steps_and_gaps_while_there_is_work() -> None:
    meter = StepMeter()
    add(meter, 10.0, 10.04)
    add(meter, 10.043, 10.05, more=False)
    add(meter, 60.0, 60.02)  # nothing was to be done before
    add(meter, 60.02, 60.2)
    assert (round(meter.busy_s_total, 6), meter.padding_rows_total, round(meter.predicted_s_total, 6)) == (
        0.247,
        12,
        0.004,
    )
    steps, gaps = meter.steps(), meter.gaps()
    assert (sum(steps.counts), sum(gaps.counts)) == (4, 2)
    assert round(gaps.total_s, 6) == 0.003
    assert steps.counts[bucket(0.04)] == 1
    assert steps.counts[bucket(0.18)] == 1
    assert gaps.counts[bucket(0.003)] == gaps.counts[0] == 1


def test_violations_of_the_stall_bound() -> None:
    meter = StepMeter()
    limits = SchedulerConfig(4, 100, 64, itl_target_ms=80.0)
    model = CostModel((1, 64), (1.0, 64.0), 0.0, 0.0, 0.0)
    add(meter, 0.0, 0.5)
    add(meter, 0.5, 1.0)
    assert meter.stall_bound_violations_total == 0, "no pace, no bound"
    meter.pace = make_pace(model, limits, CacheConfig(16, 64, "float32"))
    assert meter.pace.stall_bound_ms == 100.0
    add(meter, 1.0, 1.09)
    add(meter, 1.1, 1.2)  # 110 ms since the last token, the gap included
    add(meter, 1.2, 1.5, decodes=False)
    add(meter, 1.5, 1.7, predicted_ms=180.0)  # decoding alone was to take that long
    add(meter, 1.7, 1.9, predicted_ms=150.0)
    add(meter, 1.9, 1.95, more=False)
    add(meter, 9.0, 9.05)
    assert meter.stall_bound_violations_total == 2
