"""A fake engine whose arithmetic can be done by hand, for tests of everything around an engine.

The "KV" of a position is ((position + 1) * token) % vocab_size, kept in pages as a real engine keeps keys and
values. The next token is the sum over all positions, read through the page table, modulo the vocabulary size.
So a wrong page, a stale page, a lost row or a wrong order gives a wrong token; where the fake can tell, it raises.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from twinjet.core import errors
from twinjet.core.config import EngineConfig
from twinjet.core.plan import PageExport, PageGrant, PageImport, Plan, SequenceWork, StepOutput
from twinjet.core.types import MAX_LOGPROBS
from twinjet.wire.messages import DURATION_BOUNDS_S, Durations, Stats
from twinjet.worker.calibrate import MEASURED_STEP_ID

FAKE_VOCAB = 1009
"""Default vocabulary size; prime, so that tokens do not repeat soon."""

NOTHING = -1
"""Marks a place in the pool that was never written."""


def expected_tokens(prompt: Sequence[int], n: int, vocab_size: int = FAKE_VOCAB) -> list[int]:
    """The oracle: the first `n` tokens that a `FakeEngine` generates after `prompt`."""
    total = sum((position + 1) * token for position, token in enumerate(prompt))
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + n):
        token = total % vocab_size
        tokens.append(token)
        total += (position + 1) * token
    return tokens


def expected_logprob(token: int, vocab_size: int = FAKE_VOCAB) -> float:
    """What a `FakeEngine` reports for a chosen token; the i-th alternative is token + i, i lower."""
    return -float(token) / vocab_size


def blank_stats(**figures: Any) -> Stats:
    """A report in which everything but `figures` is 0."""
    none = Durations([0] * (len(DURATION_BOUNDS_S) + 1), 0.0)
    report: dict[str, Any] = dict.fromkeys(Stats.__struct_fields__, 0)
    report.update(step_durations=none, gap_durations=none, step_expected_s=None)
    report.update(figures)
    return Stats(**report)


@dataclass(slots=True)
class StepAtWait:
    """Implements `engine.interface.DispatchedStep`: who waits for the step runs it."""

    plan: Plan
    step: Callable[[Plan], StepOutput]
    result: StepOutput | None = None

    @property
    def step_id(self) -> int:
        return self.plan.step_id

    def wait(self) -> None:
        self.result = self.step(self.plan)

    def output(self) -> StepOutput:
        if self.result is None:
            raise RuntimeError(f"step {self.step_id} was not waited for")
        return self.result


class FakeEngine:
    """Implements `engine.interface.SteppingEngine`.

    Canonical pages are float32 [L=1, 2, tokens, K=1, H=1]: the contribution at index 0, the position at 1.
    """

    backend = "fake"
    kv_shape = (1, 1, 1)

    def __init__(
        self,
        vocab_size: int,
        num_pages: int,
        page_size: int,
        max_streams: int,
        context: int,
        step_time_s: float = 0.0,
        row_time_s: float = 0.0,
    ) -> None:
        if vocab_size >= 1 << 24:
            raise ValueError("contributions must be exact in float32: vocab_size under 2**24")
        self.vocab_size = vocab_size
        self.compiles_total = 0
        self.step_time_s = step_time_s
        self.row_time_s = row_time_s
        self.num_steps = 0
        self.before_step: Callable[[int, Plan], None] = lambda number, plan: None
        """Called with the step's number, from 1; may raise or end the process."""
        self._page_size = page_size
        self._contributions = np.full([num_pages, page_size], NOTHING, np.int64)
        self._positions = np.full([num_pages, page_size], NOTHING, np.int64)
        self._page_table = np.full([max_streams, -(-context // page_size)], NOTHING, np.int64)
        self._last_token = np.full(max_streams, NOTHING, np.int64)

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        for done in range(1, 4):
            on_progress(done, 3)

    def dispatch(self, plan: Plan) -> StepAtWait:
        return StepAtWait(plan, self.step)

    def step(self, plan: Plan) -> StepOutput:
        started_s = time.monotonic()
        if plan.step_id == MEASURED_STEP_ID:
            # It reads what nobody wrote, and only its time counts.
            time.sleep(self.step_time_s + self.row_time_s * plan.num_rows)
            tokens = np.zeros(len(plan.work), np.int32)
            return StepOutput(plan.step_id, tokens, started_s=started_s, ended_s=time.monotonic())
        self.num_steps += 1
        self.before_step(self.num_steps, plan)
        for grant in plan.grants:
            self._grant(grant)
        for pages in plan.imports:
            self._import(pages)
        self._check_slots(plan.work)
        sampled = [(work, self._run(work)) for work in plan.work]
        tokens = np.array([token for work, token in sampled if work.samples], np.int32)
        exports = tuple(self._export(pages) for pages in plan.exports)
        delay_s = self.step_time_s + self.row_time_s * plan.num_rows
        if delay_s:
            time.sleep(delay_s)
        output = StepOutput(plan.step_id, tokens, exports=exports, started_s=started_s, ended_s=time.monotonic())
        if not any(work.samples and work.num_logprobs is not None for work in plan.work):
            return output
        ranks = np.arange(MAX_LOGPROBS)
        logprobs = (-tokens.astype(np.float64) / self.vocab_size).astype(np.float32)
        return StepOutput(
            plan.step_id,
            tokens,
            logprobs,
            ((tokens[:, None] + ranks) % self.vocab_size).astype(np.int32),
            (logprobs[:, None] - ranks).astype(np.float32),
            exports,
            started_s,
            output.ended_s,
        )

    def _grant(self, grant: PageGrant) -> None:
        stop = grant.first_index + len(grant.page_ids)
        if stop > self._page_table.shape[1]:
            raise ValueError(f"a grant up to index {stop} is over the page table's {self._page_table.shape[1]}")
        if grant.first_index == 0:
            self._page_table[grant.slot] = NOTHING
            self._last_token[grant.slot] = NOTHING
        self._check_pages(grant.page_ids)
        self._page_table[grant.slot, grant.first_index : stop] = grant.page_ids

    def _check_pages(self, page_ids: Sequence[int]) -> None:
        if any(not 0 <= page_id < len(self._contributions) for page_id in page_ids):
            raise ValueError(f"page ids must be from 0 to {len(self._contributions) - 1}, got {page_ids}")

    def _check_slots(self, work: Sequence[SequenceWork]) -> None:
        slots = [w.slot for w in work]
        if len(set(slots)) != len(slots):
            raise ValueError(f"a slot appears twice in one step: {slots}")

    def _places(self, page_ids: Sequence[int] | np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(page ids, offsets) of positions [start, stop)."""
        positions = np.arange(start, stop)
        return np.asarray(page_ids, np.int64)[positions // self._page_size], positions % self._page_size

    def _run(self, work: SequenceWork) -> int:
        if work.token_ids is None:
            if work.num_tokens != 1 or self._last_token[work.slot] == NOTHING:
                raise ValueError(f"slot {work.slot} has no last token, or takes {work.num_tokens} rows from it")
            inputs = self._last_token[work.slot : work.slot + 1]
        else:
            inputs = np.array(work.token_ids, np.int64)
        stop = work.start + work.num_tokens
        if len(inputs) != work.num_tokens or work.num_tokens < 1:
            raise ValueError(f"{work.num_tokens} rows need as many token ids, got {len(inputs)}")
        if inputs.min() < 0 or inputs.max() >= self.vocab_size:
            raise ValueError(f"token ids must be from 0 to {self.vocab_size - 1}")
        table = self._page_table[work.slot]
        num_needed = -(-stop // self._page_size)
        if num_needed > len(table) or (table[:num_needed] == NOTHING).any():
            raise ValueError(f"slot {work.slot} reads up to position {stop}, beyond what it was granted: {table}")

        pages, offsets = self._places(table, work.start, stop)
        self._contributions[pages, offsets] = (np.arange(work.start, stop) + 1) * inputs % self.vocab_size
        self._positions[pages, offsets] = np.arange(work.start, stop)
        token = int(self._read(table, 0, stop).sum() % self.vocab_size)
        if work.samples:
            self._last_token[work.slot] = token
        return token

    def _read(self, page_ids: Sequence[int] | np.ndarray, start: int, stop: int) -> np.ndarray:
        pages, offsets = self._places(page_ids, start, stop)
        wrong = np.flatnonzero(self._positions[pages, offsets] != np.arange(start, stop))
        if len(wrong):
            raise ValueError(
                f"position {start + wrong[0]} is read from page {pages[wrong[0]]}, which holds position "
                f"{self._positions[pages[wrong[0]], offsets[wrong[0]]]} there"
            )
        return self._contributions[pages, offsets]

    def _import(self, pages: PageImport) -> None:
        if pages.kv.shape[:2] + pages.kv.shape[3:] != (1, 2, 1, 1):
            raise ValueError(f"expected pages of shape [1, 2, tokens, 1, 1], got {pages.kv.shape}")
        self._check_pages(pages.page_ids)
        where = self._places(pages.page_ids, pages.start, pages.start + pages.kv.shape[2])
        self._contributions[where] = pages.kv[0, 0, :, 0, 0].astype(np.int64)
        self._positions[where] = pages.kv[0, 1, :, 0, 0].astype(np.int64)

    def _export(self, pages: PageExport) -> np.ndarray:
        self._check_pages(pages.page_ids)
        contributions = self._read(pages.page_ids, pages.start, pages.stop)
        kv = np.stack([contributions, np.arange(pages.start, pages.stop)]).astype(np.float32)
        return kv[None, :, :, None, None]


def load_fake_engine(config: EngineConfig, on_progress: Callable[[str, int, int], None]) -> FakeEngine:
    """Engine factory, for `WorkerLaunch.factory = "tests.fakes:load_fake_engine"`.

    Options come in `config.model_path`, as "fake?step_ms=5&crash_at=7":
      vocab          vocabulary size
      step_ms        time of a step; row_ms: and of each of its rows
      load_ms        time that loading takes; warm_ms: and warming up
      load_error     name of the error class that loading raises
      fail_at        number of the step, from 1, that raises
      fail_token     a step that is given this token id raises
      crash_at       number of the step at which the process kills itself
      hang_at        number of the step that never ends
      once           path of a file: whatever goes wrong does so only while it does not exist, and creates it
    """
    options = dict(parse_qsl(config.model_path.partition("?")[2], strict_parsing=True))

    def number(name: str, default: float = -1) -> float:
        return float(options.pop(name, default))

    def happens() -> bool:
        if once is None:
            return True
        if once.exists():
            return False
        once.touch()
        return True

    once = Path(options.pop("once")) if "once" in options else None
    fail_at, crash_at, hang_at = (number(n) for n in ("fail_at", "crash_at", "hang_at"))
    fail_token, refuse_token = number("fail_token"), number("refuse_token")
    engine = FakeEngine(
        vocab_size=int(number("vocab", FAKE_VOCAB)),
        num_pages=config.cache.num_pages,
        page_size=config.cache.page_size,
        max_streams=config.scheduler.max_streams,
        context=config.scheduler.context,
        step_time_s=number("step_ms", 0) / 1e3,
        row_time_s=number("row_ms", 0) / 1e3,
    )
    load_s, warm_s = number("load_ms", 0) / 1e3, number("warm_ms", 0) / 1e3
    load_error = options.pop("load_error", None)
    if options:
        raise errors.ConfigError(f"the fake engine knows no option {', '.join(options)}")

    def given(plan: Plan) -> set[int]:
        return {token for work in plan.work for token in work.token_ids or ()}

    def dispatch(plan: Plan) -> StepAtWait:
        if refuse_token in given(plan):
            raise RuntimeError("the fake device refused a step")
        return StepAtWait(plan, engine.step)

    def before_step(step: int, plan: Plan) -> None:
        if step == crash_at and happens():
            os.kill(os.getpid(), signal.SIGKILL)
        if step == hang_at and happens():
            time.sleep(3600)
        if (step == fail_at or fail_token in given(plan)) and happens():
            raise RuntimeError(f"the fake device failed step {step}")

    def warm_up(on_progress: Callable[[int, int], None]) -> None:
        for done in range(1, 4):
            time.sleep(warm_s / 3)
            on_progress(done, 3)

    engine.before_step = before_step
    engine.dispatch = dispatch
    engine.warm_up = warm_up
    for done in range(1, 3):
        time.sleep(load_s / 2)
        on_progress("load", done, 2)
    if load_error is not None and happens():
        raise getattr(errors, load_error)("the fake checkpoint cannot be read")
    return engine
