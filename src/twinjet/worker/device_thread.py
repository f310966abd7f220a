"""The thread that waits for the device: for the engine to load and to warm up, then for one step after the other.

Steps come dispatched, so the device goes from one to the next without it; what it has to say it posts, and goes on.
After a step that raised it waits for nothing more, because the step may have consumed the device's state.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

from twinjet.engine.interface import DispatchedStep, SteppingEngine
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
    step: DispatchedStep


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
    """Tells of each step when it is done."""

    def __init__(
        self, load: LoadEngine, post: Callable[[DeviceEvent], None], measure: MeasureEngine | None = None
    ) -> None:
        """`post` is called from the thread; it must not block. `measure` gets the warm engine before any plan."""
        self._load = load
        self._measure = measure
        self._post = post
        self._steps: SimpleQueue[DispatchedStep | None] = SimpleQueue()
        # A daemon: a step that never ends must not keep the process from exiting.
        self._thread = Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, step: DispatchedStep) -> None:
        """Steps must come in the order in which they were dispatched."""
        self._steps.put(step)

    def stop(self, timeout_s: float) -> bool:
        """Let all dispatched steps end; False if they have not within `timeout_s`."""
        self._steps.put(None)
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
        while (step := self._steps.get()) is not None:
            try:
                step.wait()
            except BaseException as error:
                self._post(StepCrashed(step.step_id, error))
                return
            self._post(StepDone(step))
