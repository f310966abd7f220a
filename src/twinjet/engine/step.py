"""One step on its way through the device: what was asked for, when it is done, what it gave."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from twinjet.core.plan import Plan, StepOutput
from twinjet.engine.kv_cache import Gathered
from twinjet.ops.ops import StepClock


@dataclass(slots=True)
class EngineStep:
    """Implements `interface.DispatchedStep`."""

    plan: Plan
    num_padding_rows: int
    samples: jax.Array | None
    """[S, 2 + 2 n] int32 as `run_step` packs them; None: the plan has no rows."""
    gathered: Sequence[Gathered]
    """The plan's exports."""
    finish: Callable[[jax.Array], tuple[np.ndarray, StepClock | None]]
    """`Ops.finish` of this step."""
    dispatched_s: float
    table: np.ndarray | None = None
    """`samples` on the host."""
    clock: StepClock | None = None

    @property
    def step_id(self) -> int:
        return self.plan.step_id

    def wait(self) -> None:
        if self.samples is not None:
            self.table, self.clock = self.finish(self.samples)
        for pages in self.gathered:
            pages.wait()
        if self.clock is None:
            self.clock = StepClock(self.dispatched_s, time.monotonic(), None)

    def output(self) -> StepOutput:
        clock = self.clock
        if clock is None:
            raise RuntimeError(f"step {self.step_id} was not waited for")
        sampling = [work for work in self.plan.work if work.samples]
        token_ids = np.empty(0, np.int32)
        logprobs = top_ids = top_logprobs = None
        if self.table is not None and sampling:
            table = self.table[: len(sampling)]
            token_ids = table[:, 0]
            if any(work.num_logprobs is not None for work in sampling):
                n = (table.shape[1] - 2) // 2
                logprobs = np.ascontiguousarray(table[:, 1]).view(np.float32)
                top_ids = table[:, 2 : 2 + n]
                top_logprobs = np.ascontiguousarray(table[:, 2 + n :]).view(np.float32)
        return StepOutput(
            self.step_id,
            token_ids,
            logprobs,
            top_ids,
            top_logprobs,
            tuple(pages.to_host() for pages in self.gathered),
            clock.started_s,
            clock.ended_s,
            clock.busy_s,
            self.num_padding_rows,
        )
