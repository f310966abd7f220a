"""An engine without arithmetic: a step ends when its time is over, and its tokens mean nothing.

Engine factory for `WorkerLaunch.factory`. The environment has the milliseconds of a step, `SIMULATED_STEP_MS`, and
those that each prompt row adds, `SIMULATED_ROW_MS`.
"""

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from twinjet.core.config import EngineConfig
from twinjet.core.plan import Plan, StepOutput

VOCAB_SIZE = 49152
"""Of SmolLM2, whose tokenizer the server uses."""
_FIRST_TOKEN, _NUM_TOKENS = 1000, 997
"""Plain words: none of them ends an answer."""
_PR_SET_TIMERSLACK = 29


class SimulatedEngine:
    """Implements `engine.interface.SteppingEngine`."""

    vocab_size = VOCAB_SIZE
    backend = "simulated"
    kv_shape = (1, 1, 1)
    compiles_total = 0

    def __init__(self, step_s: float, row_s: float) -> None:
        self._step_s, self._row_s = step_s, row_s
        self._ended_s = 0.0

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        # On the device thread: sleeps of this thread end within a microsecond of their time, not 50.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
        on_progress(1, 1)

    def dispatch(self, plan: Plan) -> "SimulatedStep":
        prompt_rows = sum(work.num_tokens for work in plan.work if work.token_ids is not None)
        started_s = max(time.monotonic(), self._ended_s)
        self._ended_s = started_s + self._step_s + self._row_s * prompt_rows
        positions = [work.start for work in plan.work if work.samples]
        tokens = np.array(positions, np.int32) * 7 % _NUM_TOKENS + _FIRST_TOKEN
        return SimulatedStep(StepOutput(plan.step_id, tokens, started_s=started_s, ended_s=self._ended_s))


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Implements `engine.interface.DispatchedStep`: begins where the one before ends, and is over when its time is."""

    result: StepOutput

    @property
    def step_id(self) -> int:
        return self.result.step_id

    def wait(self) -> None:
        time.sleep(max(0.0, self.result.ended_s - time.monotonic()))

    def output(self) -> StepOutput:
        return self.result


def load(config: EngineConfig, on_progress: Callable[[str, int, int], None]) -> SimulatedEngine:
    return SimulatedEngine(float(os.environ["SIMULATED_STEP_MS"]) / 1e3, float(os.environ["SIMULATED_ROW_MS"]) / 1e3)
