"""An engine without arithmetic: a step ends when its time is over, and its tokens are plain words, or tell the time.

Engine factory for `WorkerLaunch.factory`. The environment has the milliseconds of a step, `SIMULATED_STEP_MS`, those
that each prompt row adds, `SIMULATED_ROW_MS`, and what tokens are, `SIMULATED_TOKENS`: `words`, the default, or
`clock`. Tokens of `clock` are the end of their step in ticks of the monotonic clock, which all processes share. Some of
them are parts of a character, so their text may be held back; the server sends every id at once all the same.
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
FIRST_TOKEN = 1000
"""From here on no token of SmolLM2 is special, so none ends an answer."""
TICK_S = 1e-4
NUM_TICKS = 40_000
"""Tokens that tell the time repeat after so many ticks, 4 s."""
_NUM_WORDS = 997
_PR_SET_TIMERSLACK = 29


class SimulatedEngine:
    """Implements `engine.interface.SteppingEngine`."""

    vocab_size = VOCAB_SIZE
    backend = "simulated"
    kv_shape = (1, 1, 1)
    compiles_total = 0

    def __init__(self, step_s: float, row_s: float, *, tells_time: bool = False) -> None:
        self._step_s, self._row_s, self._tells_time = step_s, row_s, tells_time
        self._ended_s = 0.0

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        # On the device thread: sleeps of this thread end within a microsecond of their time, not 50.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
        on_progress(1, 1)

    def dispatch(self, plan: Plan) -> "SimulatedStep":
        prompt_rows = sum(work.num_tokens for work in plan.work if work.token_ids is not None)
        started_s = max(time.monotonic(), self._ended_s)
        self._ended_s = started_s + self._step_s + self._row_s * prompt_rows
        positions = np.array([work.start for work in plan.work if work.samples], np.int32)
        if self._tells_time:
            # Ends lie on ticks, so that the ids tell them exactly: steps that follow each other would all be off alike.
            ticks = round(self._ended_s / TICK_S)
            self._ended_s = ticks * TICK_S
            tokens = np.full_like(positions, FIRST_TOKEN + ticks % NUM_TICKS)
        else:
            tokens = positions * 7 % _NUM_WORDS + FIRST_TOKEN
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


def token_age_s(token_id: int, now_s: float) -> float:
    """Seconds from the end of its step, which a token of `clock` tells, to `now_s`; ages from -0.1 to 3.9 s are right.

    Raises: ValueError, if it is no such token.
    """
    tick = token_id - FIRST_TOKEN
    if not 0 <= tick < NUM_TICKS:
        raise ValueError(f"expected a token id that tells the time, from {FIRST_TOKEN} on, got {token_id}")
    return ((now_s / TICK_S - tick + 1000) % NUM_TICKS - 1000) * TICK_S


def load(config: EngineConfig, on_progress: Callable[[str, int, int], None]) -> SimulatedEngine:
    step_s, row_s = (float(os.environ[f"SIMULATED_{name}_MS"]) / 1e3 for name in ("STEP", "ROW"))
    return SimulatedEngine(step_s, row_s, tells_time=os.environ.get("SIMULATED_TOKENS") == "clock")
