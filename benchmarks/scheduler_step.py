"""What the scheduler itself costs per step: median microseconds of schedule + complete, without any device.

    python -m benchmarks.scheduler_step [--steps 2000] [--json FILE]

Rows `decode N`: N streams decoding at pipeline depth 2. Rows `decode N + prompt`: beside them, a prompt of
100,000 tokens in chunks that fill a budget of 256 rows.
"""

import argparse
import os
import statistics
import time
from collections import deque

import numpy as np

from benchmarks.provenance import report, write_json
from twinjet.core.config import CacheConfig, SchedulerConfig
from twinjet.core.plan import Plan, StepOutput
from twinjet.core.types import SamplingParams
from twinjet.scheduler.scheduler import Scheduler
from twinjet.scheduler.sequence import SequenceSpec

PAGE_SIZE = 16
PROMPT_TOKENS = 128
LONG_PROMPT_TOKENS = 100_000
TOKEN_BUDGET = 256


def time_steps(num_streams: int, num_steps: int, long_prompt: bool) -> list[float]:
    """Microseconds of each of `num_steps` steps, at most as many as the long prompt takes."""
    context = LONG_PROMPT_TOKENS + 1 if long_prompt else PROMPT_TOKENS + num_steps + 1000
    num_pages = (num_streams + 1) * -(-(PROMPT_TOKENS + num_steps + 1000) // PAGE_SIZE) + -(-context // PAGE_SIZE)
    scheduler = Scheduler(
        SchedulerConfig(num_streams + 1, context, TOKEN_BUDGET), CacheConfig(PAGE_SIZE, num_pages, "float32")
    )
    for i in range(num_streams):
        scheduler.add(SequenceSpec(i, tuple(range(PROMPT_TOKENS)), num_steps + 500, SamplingParams()), 0.0)
    while scheduler.stats().waiting_tokens:
        _complete(scheduler, _schedule(scheduler))
    if long_prompt:
        scheduler.add(SequenceSpec(num_streams, tuple(range(LONG_PROMPT_TOKENS)), 1, SamplingParams()), 0.0)
        num_steps = min(num_steps, LONG_PROMPT_TOKENS // TOKEN_BUDGET)

    in_flight = deque([_schedule(scheduler)])
    times_us: list[float] = []
    for _ in range(num_steps):
        tokens = np.ones(sum(w.samples for w in in_flight[0].work), np.int32)
        output = StepOutput(in_flight[0].step_id, tokens)
        began_s = time.perf_counter()
        plan = scheduler.schedule(0.0)
        scheduler.complete(output)
        times_us.append((time.perf_counter() - began_s) * 1e6)
        in_flight.popleft()
        if plan is None:
            raise RuntimeError("sequences ended before the last step")
        in_flight.append(plan)
    return times_us


def _schedule(scheduler: Scheduler) -> Plan:
    plan = scheduler.schedule(0.0)
    if plan is None:
        raise RuntimeError("nothing to schedule")
    return plan


def _complete(scheduler: Scheduler, plan: Plan) -> None:
    scheduler.complete(StepOutput(plan.step_id, np.ones(sum(w.samples for w in plan.work), np.int32)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", help="write the results here, - for stdout")
    arguments = parser.parse_args()
    load_average = os.getloadavg()[0]
    results: list[dict[str, object]] = []
    for num_streams in (1, 8, 32):
        for long_prompt in (False, True):
            times_us = time_steps(num_streams, arguments.steps, long_prompt)
            name = f"decode {num_streams}" + (" + prompt" if long_prompt else "")
            results.append(
                {
                    "case": name,
                    "median_us": round(statistics.median(times_us), 1),
                    "p99_us": round(statistics.quantiles(times_us, n=100)[98], 1),
                }
            )
    for result in results if arguments.json != "-" else ():
        print(f"{result['case']:>20}  median {result['median_us']:>7} us  p99 {result['p99_us']:>7} us")
    if arguments.json:
        write_json(arguments.json, report("scheduler_step", load_average, {"results": results}))


if __name__ == "__main__":
    main()
