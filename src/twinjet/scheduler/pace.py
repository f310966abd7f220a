"""How large steps may be, by a cost model: small enough for streams that wait for a token, else as large as pays.

Knows shapes of steps and milliseconds; neither sequences nor a clock. Tokens never depend on it, only plans do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from twinjet.core.config import CacheConfig, SchedulerConfig
from twinjet.core.types import Forecast
from twinjet.scheduler.cost_model import NOTHING, CostModel, StepShape
from twinjet.scheduler.policies import MIN_CHUNK_ROWS

WORTH_WHILE = 0.95
"""The share of the best throughput that is enough: chunks are no larger, since whoever arrives waits for the step."""

AUTO_LEAST_MS = 20.0
"""An automatic ITL target is no shorter: nobody would see a difference."""

AUTO_MOST_MS = 200.0
"""An automatic ITL target is at most this, where decoding alone does not take longer."""

IDLE_FACTOR = 4.0
"""How much longer than the target a step may take while nobody decodes: a new request waits for it."""

HEADROOM = 1.25
"""Stall bounds are this much more than what is predicted: steps spread by less on a quiet machine."""

_MOST_DRIFT, _DRIFT_SHARE = 4.0, 0.05
"""Limits of a ratio, and how much of it each step brings in."""

BUSY_STREAMS, BUSY_TOKENS = 8, 512
"""Streams, and tokens in each, that count as company in a forecast."""

Divide = Callable[[int], list[int]]
"""Rows in all -> rows of each prompt."""


class Drift:
    """How steps of late compare with the model, which was measured at one moment, perhaps a busy one."""

    def __init__(self) -> None:
        self.factor = 1.0
        """Actual over modelled time."""

    def add(self, actual_ms: float, modelled_ms: float) -> None:
        """One step. The factor follows within some twenty; a single step moves it by 7% at most."""
        ratio = min(max(actual_ms / modelled_ms, 1 / _MOST_DRIFT), _MOST_DRIFT)
        self.factor *= (ratio / self.factor) ** _DRIFT_SHARE


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits of steps."""

    model: CostModel
    itl_target_ms: float
    """Predicted time of a step while anybody decodes."""
    idle_limit_ms: float
    """The same while nobody does."""
    chunk_rows: int
    """Rows of a step that give as good as the best throughput."""
    stall_bound_ms: float | None
    """No running stream waits longer for its next token, if all are of a usual length at most; None: prompts go before
    streams, so there is no such bound."""
    full_stall_bound_ms: float | None
    """Nor longer than this with all streams on a full pool."""

    def wait_bound_ms(self, predicted_ms: float) -> float | None:
        """How long a stream may wait for a step that was predicted so; at most `full_stall_bound_ms`."""
        return None if self.stall_bound_ms is None else max(self.stall_bound_ms, HEADROOM * predicted_ms)

    def shares(
        self,
        shape: StepShape,
        starts: Sequence[int],
        needs: Sequence[int],
        divide: Divide,
        most: int,
        *,
        paced: bool,
        drift: float = 1.0,
    ) -> list[int]:
        """Rows of each prompt in a step that has `shape` already.

        Args:
            starts: position that each prompt is computed up to.
            needs: rows that each could take.
            divide: the policy's division of a number of rows.
            most: rows that there may be at most.
            paced: somebody decodes.
            drift: how much longer steps take than the model says.
        """
        limit_ms = (self.itl_target_ms if paced else self.idle_limit_ms) / drift
        if not paced:
            most = min(most, max(self.chunk_rows - shape.rows, 0))

        def fits(shares: list[int]) -> bool:
            after = shape
            for start, need, share in zip(starts, needs, shares, strict=True):
                if share:
                    after = after.plus(start, share, share == need)
            return self.model.predict_ms(after) <= limit_ms

        most = min(most, sum(needs))
        shares = divide(most)
        # What the plan has of prompts already was granted under the same limit.
        low = 0 if shape.chunk_pairs else min(most, MIN_CHUNK_ROWS)
        if most <= low or fits(shares):
            return shares
        high = most
        while high - low > 1:
            middle = (low + high) // 2
            if fits(divide(middle)):
                low = middle
            else:
                high = middle
        return divide(low)


def make_pace(model: CostModel, limits: SchedulerConfig, cache: CacheConfig) -> Pace:
    """The limits of an engine. Without a target, the one that lets chunks of good throughput run beside all streams."""
    itl_target_ms = limits.itl_target_ms
    best = max(rows / model.predict_ms(_chunk(0, rows)) for rows in _row_counts(limits))
    chunk_rows = min(
        rows for rows in _row_counts(limits) if rows / model.predict_ms(_chunk(0, rows)) >= WORTH_WHILE * best
    )
    # The longest step of decoding rows alone: all streams, the pool full. (Shared pages can be read more than once.)
    most_tokens = min(limits.max_streams * limits.context, cache.num_pages * cache.page_size)
    longest = _decodes(limits.max_streams, most_tokens // limits.max_streams)
    usual = _decodes(limits.max_streams, min(BUSY_TOKENS, most_tokens // limits.max_streams))
    if itl_target_ms is None:
        roomy_ms = model.predict_ms(usual.plus(0, chunk_rows, True))
        itl_target_ms = max(AUTO_LEAST_MS, min(roomy_ms, max(AUTO_MOST_MS, 2 * model.predict_ms(usual))))
    bounded = limits.policy != "prefill-first"
    # Some rows of a prompt go beside streams whatever the target.
    least_ms = max(itl_target_ms, model.predict_ms(usual.plus(0, MIN_CHUNK_ROWS, True)))
    worst_ms = max(least_ms, model.predict_ms(longest.plus(0, MIN_CHUNK_ROWS, True)))
    return Pace(
        model=model,
        itl_target_ms=itl_target_ms,
        idle_limit_ms=max(IDLE_FACTOR * itl_target_ms, model.predict_ms(_chunk(0, chunk_rows))),
        chunk_rows=chunk_rows,
        stall_bound_ms=HEADROOM * least_ms if bounded else None,
        full_stall_bound_ms=HEADROOM * worst_ms if bounded else None,
    )


def forecast(pace: Pace, limits: SchedulerConfig, pipeline_depth: int) -> Forecast:
    """What to expect of an engine, for people."""
    model = pace.model
    num_busy = min(BUSY_STREAMS, limits.max_streams)
    company = _decodes(num_busy, min(BUSY_TOKENS, limits.context // 2))
    streams = sorted({n for n in (1, 4, 8, 16, 32, limits.max_streams) if n <= limits.max_streams})
    itl = tuple((n, model.predict_ms(_decodes(n, min(BUSY_TOKENS, limits.context // 2)))) for n in streams)
    prompts = [n for n in (128, 512, 2048) if n < limits.context] or [limits.context - 1]
    alone = tuple((n, sum(_prompt_steps_ms(pace, limits, NOTHING, n))) for n in prompts if n)
    busy = [(n, _prompt_steps_ms(pace, limits, company, n)) for n in prompts if n]
    # Beside streams a prompt comes in the middle of a step, with others planned behind.
    planned_ms = (pipeline_depth - 0.5) * model.predict_ms(company)
    return Forecast(
        itl_target_ms=pace.itl_target_ms,
        stall_bound_ms=pace.stall_bound_ms,
        full_stall_bound_ms=pace.full_stall_bound_ms,
        chunk_rows=pace.chunk_rows,
        busy_streams=num_busy,
        busy_chunk_rows=_next_rows(pace, limits, company, 0, limits.token_budget),
        ttft_ms=alone,
        busy_ttft_ms=tuple((n, planned_ms + sum(steps_ms)) for n, steps_ms in busy),
        itl_ms=itl,
        busy_itl_ms=median(busy[-1][1] if busy else [model.predict_ms(company)]),
        prefill_tokens_s=max((1e3 * n / ms for n, ms in alone), default=0.0),
        decode_tokens_s=1e3 * itl[-1][0] / itl[-1][1],
    )


def _prompt_steps_ms(pace: Pace, limits: SchedulerConfig, company: StepShape, num_tokens: int) -> list[float]:
    """Each step, from the first to the last, that computes a prompt beside decoding rows."""
    done, steps_ms = 0, []
    while done < num_tokens:
        rows = _next_rows(pace, limits, company, done, num_tokens - done)
        steps_ms.append(pace.model.predict_ms(company.plus(done, rows, done + rows == num_tokens)))
        done += rows
    return steps_ms


def _next_rows(pace: Pace, limits: SchedulerConfig, company: StepShape, start: int, need: int) -> int:
    most = limits.token_budget - company.rows
    return pace.shares(company, [start], [need], lambda rows: [rows], most, paced=company.rows > 0)[0] or 1


def _row_counts(limits: SchedulerConfig) -> list[int]:
    """Sizes of chunks to choose from: whole pages, mostly, up to the budget."""
    return sorted({*range(MIN_CHUNK_ROWS, limits.token_budget, MIN_CHUNK_ROWS), limits.token_budget})


def _chunk(start: int, rows: int) -> StepShape:
    return NOTHING.plus(start, rows, True)


def _decodes(num_streams: int, num_tokens: int) -> StepShape:
    """A row for each stream, of this many tokens each."""
    return StepShape(num_streams, num_streams, num_streams * (num_tokens + 1), 0)
