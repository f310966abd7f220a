"""Engine factories for tests of failures, to be named in `WorkerLaunch.factory`."""

import os
import signal
from collections.abc import Callable

from tests.fakes import FakeEngine, load_fake_engine
from twinjet.core.config import EngineConfig
from twinjet.core.plan import Plan

POISON = 666
"""A prompt with this token id kills the process that computes it."""


def load_poisonable(config: EngineConfig, on_progress: Callable[[str, int, int], None]) -> FakeEngine:
    engine = load_fake_engine(config, on_progress)

    def before_step(step: int, plan: Plan) -> None:
        # Prompts only: a generated token must not look like poison.
        if any(work.start == 0 and work.token_ids and work.token_ids[0] == POISON for work in plan.work):
            os.kill(os.getpid(), signal.SIGKILL)

    engine.before_step = before_step
    return engine
