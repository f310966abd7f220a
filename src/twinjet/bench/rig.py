"""A scheduler and a device thread, driven as the engine process's loop drives them, with clocks. Knows no tests.

As there, the next plans are ready before the device ends a step: what the host does lies beside the steps, and the
wall clock shows what does not.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from twinjet.core.config import EngineConfig
from twinjet.core.errors import EngineDead, StepFailed, TwinjetError
from twinjet.core.plan import StepOutput
from twinjet.engine.interface import SteppingEngine
from twinjet.scheduler.scheduler import Scheduler
from twinjet.scheduler.sequence import SequenceSpec
from twinjet.worker.device_thread import (
    DeviceEvent,
    DeviceThread,
    EngineWarm,
    LoadEngine,
    StartFailed,
    StartProgressed,
    StepCrashed,
    StepDone,
)

STOP_S = 3.0
"""How long `close` waits for the running step."""


@dataclass(slots=True)
class Phase:
    """Consecutive steps, summed."""

    num_steps: int = 0
    num_rows: int = 0
    """Tokens computed; padding is not counted."""
    device_s: float = 0.0
    """Sum of the steps' own times."""
    wall_s: float = 0.0
    kernel_s: float | None = 0.0
    """Time in the device's kernels; None where the device does not tell."""

    def add(self, output: StepOutput, num_rows: int) -> None:
        self.num_steps += 1
        self.num_rows += num_rows
        self.device_s += output.ended_s - output.started_s
        if self.kernel_s is not None:
            self.kernel_s = None if output.kernel_s is None else self.kernel_s + output.kernel_s


@dataclass(frozen=True, slots=True)
class Timing:
    """A run of several sequences: up to the step in which the last one gets its first token, and after it."""

    prefill: Phase
    """By the wall clock from the moment at which the sequences come."""
    decode: Phase
    """By the wall clock from the end of the last prefill step on the device."""


class Rig:
    """One engine, warm for as long as the rig is open."""

    def __init__(self, config: EngineConfig, load: LoadEngine) -> None:
        """`load` runs on the device thread."""
        self._config = config
        self._scheduler = Scheduler(config.scheduler, config.cache)
        self._engine: SteppingEngine | None = None
        self._events: SimpleQueue[DeviceEvent] = SimpleQueue()
        self._device = DeviceThread(load, self._events.put)
        self._planned_rows: dict[int, int] = {}
        """Rows of each plan in flight, by step id."""

    def start(self, on_progress: Callable[[str, int, int], None]) -> SteppingEngine:
        """Load and warm up; on_progress(stage, done, total).

        Raises: CheckpointError, ConfigError, EngineDead.
        """
        self._device.start()
        while True:
            match self._events.get():
                case StartProgressed(stage, done, total):
                    on_progress(stage, done, total)
                case EngineWarm(engine):
                    self._engine = engine
                    return engine
                case StartFailed(error):
                    if isinstance(error, TwinjetError):
                        raise error
                    raise EngineDead(f"the engine did not start: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Let the running step end, if it does within a few seconds."""
        self._device.stop(STOP_S)

    def run(self, specs: Sequence[SequenceSpec]) -> Timing:
        """Run sequences that come at once to their ends.

        Raises:
            ContextTooLong, InvalidRequest: of one that could never run.
            StepFailed: the device gave up; the rig is of no more use.
        """
        prefill, decode = Phase(), Phase()
        began_s = time.monotonic()
        for spec in specs:
            self._scheduler.add(spec, began_s)
        without_token = {spec.sequence_id for spec in specs}
        self._submit_plans()
        while self._scheduler.has_work:
            output = self._next_output()
            emissions = self._scheduler.complete(output).emissions
            self._submit_plans()
            phase = prefill if without_token else decode
            without_token.difference_update(emission.sequence_id for emission in emissions)
            phase.add(output, self._planned_rows.pop(output.step_id))
            phase.wall_s = time.monotonic() - began_s
            if phase is prefill and not without_token:
                began_s = output.ended_s
        return Timing(prefill, decode)

    def _submit_plans(self) -> None:
        if self._engine is None:
            raise RuntimeError("the rig was not started")
        while self._scheduler.num_in_flight < self._config.pipeline_depth:
            plan = self._scheduler.schedule(time.monotonic())
            if plan is None:
                return
            self._planned_rows[plan.step_id] = plan.num_rows
            self._device.watch(self._engine.dispatch(plan))

    def _next_output(self) -> StepOutput:
        match self._events.get():
            case StepDone(step):
                return step.output()
            case StepCrashed(step_id, error):
                raise StepFailed(f"step {step_id} failed: {type(error).__name__}: {error}") from error
            case event:
                raise RuntimeError(f"a warm device thread posted {event}")
