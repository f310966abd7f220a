"""The thread that owns the engine: loads it, warms it up, and runs plans in the order they come.

It never waits for the loop thread while a plan is queued; what it has to say it posts, and goes on. After a step that
raised it runs nothing more, because the step may have consumed the device's state.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from twinjet.core.plan import Plan, StepOutput
from twinjet.engine.interface import SteppingEngine
from twinjet.scheduler.cost_model import MeasuredStep
from twinjet.worker.process import name_thread


@dataclass(frozen=True, slots=True)
class StartProgressed:
    """Start-up is `done` of `total` units into `stage`."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The engine did not come up; the thread has ended."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class EngineWarm:
    """Plans can be run from now on."""

    engine: SteppingEngine
    warmup_s: float
    """Measuring included."""
    measured: list[MeasuredStep]
    """Steps for a cost model; none, where none were asked for."""


@dataclass(frozen=True, slots=True)
class StepDone:
    output: StepOutput


@dataclass(frozen=True, slots=True)
class StepCrashed:
    """A step raised; the thread has ended."""

    step_id: int
    error: BaseException


DeviceEvent = StartProgressed | StartFailed | EngineWarm | StepDone | StepCrashed

LoadEngine = Callable[[Callable[[str, int, int], None]], SteppingEngine]
"""Takes on_progress(stage, done, total), returns an engine not yet warm."""

MeasureEngine = Callable[[SteppingEngine], list[MeasuredStep]]


class DeviceThread:
    """Runs plans one after the other."""

    def __init__(
        self, load: LoadEngine, post: Callable[[DeviceEvent], None], measure: MeasureEngine | None = None
    ) -> None:
        """`post` is called from the thread; it must not block. `measure` gets the warm engine before any plan."""
        self._load = load
        self._measure = measure
        self._post = post
        self._plans: SimpleQueue[Plan | None] = SimpleQueue()
        # A daemon: a step that never ends must not keep the process from exiting.
        self._thread = Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, plan: Plan) -> None:
        self._plans.put(plan)

    def stop(self, timeout_s: float) -> bool:
        """Drop what is queued, and let the running step end; False if it has not within `timeout_s`."""
        try:
            while True:
                self._plans.get_nowait()
        except Empty:
            self._plans.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        name_thread("device")
        try:
            engine = self._load(lambda stage, done, total: self._post(StartProgressed(stage, done, total)))
            begin_s = time.monotonic()
            engine.warm_up(lambda done, total: self._post(StartProgressed("compile", done, total)))
            measured = [] if self._measure is None else self._measure(engine)
        except BaseException as error:
            self._post(StartFailed(error))
            return
        self._post(EngineWarm(engine, time.monotonic() - begin_s, measured))
        while (plan := self._plans.get()) is not None:
            try:
                output = engine.step(plan)
            except BaseException as error:
                self._post(StepCrashed(plan.step_id, error))
                return
            self._post(StepDone(output))
