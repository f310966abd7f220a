"""Measures steps of a warm engine that serves nobody yet, for the cost model.

Runs plans of made-up tokens on whatever is in the pool: a step's time depends on how many rows and positions there are,
not on what they hold. What the plans leave in pages and slots is written anew before anybody reads it.
"""

import time

from twinjet.core.config import EngineConfig
from twinjet.core.plan import PageGrant, Plan, SequenceWork
from twinjet.core.types import SamplingParams
from twinjet.engine.buckets import choose_buckets
from twinjet.engine.interface import SteppingEngine, run_plan
from twinjet.scheduler.cost_model import NOTHING, MeasuredStep, StepShape

MAX_STREAMS = 16
"""Decoding rows in a measured step."""

LONG_TOKENS = 1024
"""Tokens before the rows of those steps that show what reading KV costs."""

_MUST = 3
"""Kinds that are measured however long they take."""

MEASURED_STEP_ID = -1
"""Of all plans that are only measured."""

_GREEDY = SamplingParams(temperature=0.0)

Sequences = tuple[tuple[int, int], ...]
"""(start, rows) of each sequence in a step; each samples."""


def measure_steps(engine: SteppingEngine, config: EngineConfig) -> list[MeasuredStep]:
    """The least time of each kind of step, over as many rounds as `config.calibration_s` has room for.

    The least, because pages touched for the first time and other processes only ever add to it. The kinds that matter
    most come first, so that a slow engine gets these measured at least; one step more may be begun at the end of that
    time, and the first few are measured in any case.
    """
    kinds = _kinds(config)
    times_ms: dict[Sequences, list[float]] = {}
    deadline_s = time.monotonic() + config.calibration_s
    while True:
        for number, kind in enumerate(kinds):
            if time.monotonic() >= deadline_s and (number >= _MUST or times_ms.get(kind)):
                return [MeasuredStep(_shape(kind), min(times)) for kind, times in times_ms.items()]
            output = run_plan(engine, _plan(kind, config))
            times_ms.setdefault(kind, []).append((output.ended_s - output.started_s) * 1e3)


def _kinds(config: EngineConfig) -> list[Sequences]:
    limits, page_size = config.scheduler, config.cache.page_size
    most_rows = min(limits.token_budget, limits.context - 1)
    pool = config.cache.num_pages * page_size
    streams = min(MAX_STREAMS, limits.max_streams, config.cache.num_pages)
    far = min(LONG_TOKENS, limits.context // 2)
    # A sequence's own pages each, so that none is read from the processor's cache for another.
    far_each = min(far, pool // streams - page_size)
    chunk = min(64, most_rows)
    kinds: list[Sequences] = [
        ((0, 1),),
        ((0, chunk),),
        ((1, 1),) * streams,
        ((max(far_each, 1), 1),) * streams,
        ((min(far, limits.context - chunk), chunk),),
    ]
    # Backends that pad are dearer by leaps, just beyond each bucket.
    counts = {most_rows, *(1 << i for i in range(most_rows.bit_length()))}
    counts |= {size + 1 for size in choose_buckets(limits.token_budget) if 1 < size < most_rows}
    kinds += [((0, rows),) for rows in sorted(counts)]
    return list(dict.fromkeys(kinds))


def _shape(kind: Sequences) -> StepShape:
    shape = NOTHING
    for start, rows in kind:
        shape = shape.plus(start, rows, True)
    return shape


def _plan(kind: Sequences, config: EngineConfig) -> Plan:
    page_size = config.cache.page_size
    work: list[SequenceWork] = []
    grants: list[PageGrant] = []
    first_page = 0
    for slot, (start, rows) in enumerate(kind):
        num_pages = -(-(start + rows) // page_size)
        grants.append(PageGrant(slot, 0, tuple(range(first_page, first_page + num_pages))))
        first_page += num_pages
        work.append(SequenceWork(-1 - slot, slot, start, rows, (0,) * rows, True, _GREEDY))
    return Plan(MEASURED_STEP_ID, tuple(work), tuple(grants))
