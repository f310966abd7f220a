"""The loop of an engine process: messages in, plans to the device, tokens out.

It holds a scheduler and a device thread and knows what each message of the wire asks of them. It does not know the
device, nor how a sequence is scheduled. Everything here runs on one thread; the device and the transfer thread post
events and wake it.

At a step's end the device gets its next plan first; then the tokens are sent.
"""

import logging
import os
import time
import traceback
from collections import deque
from dataclasses import dataclass, replace
from functools import partial

from twinjet.core.errors import CheckpointError, ConfigError, RequestError, StepFailed, TransferFailed, TwinjetError
from twinjet.core.plan import StepOutput
from twinjet.engine.interface import DispatchedStep, SteppingEngine
from twinjet.scheduler.cost_model import MeasuredStep, fit
from twinjet.scheduler.pace import forecast, make_pace
from twinjet.scheduler.scheduler import Scheduler
from twinjet.scheduler.sequence import Exported, ImportedPages, SequenceSpec
from twinjet.wire.launch import WorkerLaunch
from twinjet.wire.messages import (
    Abort,
    Failed,
    PagesExported,
    PagesImported,
    Progress,
    Ready,
    ReleasePages,
    SequenceEnded,
    Shutdown,
    Stats,
    Submit,
    ToEngine,
)
from twinjet.wire.pages import PageStore, pages_prefix
from twinjet.wire.sockets import EngineSocket
from twinjet.worker import garbage
from twinjet.worker.calibrate import measure_steps
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
from twinjet.worker.meter import StepMeter
from twinjet.worker.transfers import ExpectedPages, PagesFetched, PagesStored, TransferEvent, TransferThread
from twinjet.worker.translate import sequence_spec, step_tokens

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.5
"""Between two `Stats`, idle or not."""

STOP_S = 3.0
"""How long a clean stop waits for the running step."""


class WorkerLoop:
    """Serves one engine until it is told to stop, or fails."""

    def __init__(self, launch: WorkerLaunch, socket: EngineSocket, load: LoadEngine) -> None:
        """`socket` stays the caller's; `load` runs on the device thread."""
        config = launch.config
        self._config = config
        self._socket = socket
        self._scheduler = Scheduler(config.scheduler, config.cache)
        self._engine: SteppingEngine | None = None
        self._events: deque[DeviceEvent | TransferEvent] = deque()
        measure = partial(measure_steps, config=config) if config.calibration_s else None
        self._device = DeviceThread(load, self._post, measure)
        prefix = pages_prefix(launch.endpoint, launch.engine_id, launch.incarnation)
        self._transfers = TransferThread(PageStore(prefix), self._post)
        self._fetching: dict[int, SequenceSpec] = {}
        """Sequences that wait for pages of another engine."""
        self._stop_requested = False
        self._exit_code: int | None = None
        self._next_stats_s = 0.0
        self._step_began_s = 0.0
        """When the oldest plan in flight came to be run, if there is one."""
        self._settled = False
        """Idle, and the idle-time work is done."""
        self._meter = StepMeter()

    def request_stop(self) -> None:
        """Finish the running step and return from `run`. From any thread, or a signal handler."""
        self._stop_requested = True
        self._socket.wake()

    def run(self) -> int:
        """Serve; returns the process's exit code: 0 if told to stop, 1 after a failure, which was reported."""
        self._device.start()
        self._transfers.start()
        try:
            while self._exit_code is None:
                self._take_events()
                self._take_messages()
                self._submit_plans()
                self._report_stats()
                if self._stop_requested:
                    self._exit_code = 0
                elif not self._events:
                    self._socket.wait(self._next_stats_s - time.monotonic())
        except Exception as error:
            self._give_up(error)
        self._stop()
        return self._exit_code or 0

    def _post(self, event: DeviceEvent | TransferEvent) -> None:
        self._events.append(event)
        self._socket.wake()

    # --- the device -----------------------------------------------------------------------------

    def _take_events(self) -> None:
        while self._events and self._exit_code is None:
            match self._events.popleft():
                case StepDone(step):
                    self._complete(step)
                case StepCrashed(step_id, error):
                    self._fail_step(step_id, error)
                case StartProgressed(stage, done, total):
                    self._socket.send(Progress(stage, done, total))
                case EngineWarm(engine, warmup_s, measured):
                    self._become_ready(engine, warmup_s, measured)
                case StartFailed(error):
                    self._give_up(error)
                case PagesFetched(sequence_id, imports, error):
                    self._add_with_pages(sequence_id, imports, error)
                case PagesStored(sequence_id, handles, error):
                    if error is not None:
                        log.error("%s", error)
                    # Without pages: whoever goes on computes them.
                    self._socket.send(PagesExported(sequence_id, list(handles)))

    def _become_ready(self, engine: SteppingEngine, warmup_s: float, measured: list[MeasuredStep]) -> None:
        limits, cache = self._config.scheduler, self._config.cache
        self._engine = engine
        expected = None
        if measured:
            pace = make_pace(fit(measured), limits, cache)
            self._scheduler.keep_pace(pace)
            self._meter.pace = pace
            expected = forecast(pace, limits, self._config.pipeline_depth)
        garbage.settle()
        ready = Ready(
            pid=os.getpid(),
            vocab_size=engine.vocab_size,
            context=limits.context,
            max_streams=limits.max_streams,
            num_pages=cache.num_pages,
            page_size=cache.page_size,
            token_budget=limits.token_budget,
            backend=engine.backend,
            kv_dtype=cache.dtype,
            warmup_s=warmup_s,
            forecast=expected,
        )
        self._socket.send(ready)
        log.debug("ready: %s, warm after %.1f s, pid %d", ready.backend, warmup_s, ready.pid)

    def _submit_plans(self) -> None:
        if self._engine is None or self._stop_requested:
            return
        while self._scheduler.num_in_flight < self._config.pipeline_depth:
            plan = self._scheduler.schedule(time.monotonic())
            if plan is None:
                return
            self._settled = False
            if self._scheduler.num_in_flight == 1:
                self._step_began_s = time.monotonic()
            try:
                self._device.watch(self._engine.dispatch(plan))
            except Exception as error:
                self._device.watch(_NotDispatched(plan.step_id, error))

    def _complete(self, done: DispatchedStep) -> None:
        try:
            output = done.output()
        except Exception as error:
            self._fail_step(done.step_id, error)
            return
        try:
            step = self._scheduler.complete(output)
        except ValueError as error:
            self._fail_step(done.step_id, error)
            return
        self._step_began_s = time.monotonic()
        more_work = self._scheduler.has_work
        self._submit_plans()
        self._meter.add(output, step, more_work=more_work)
        if step.emissions:
            self._socket.send(step_tokens(output.step_id, step.emissions, output.ended_s))
        by_sequence: dict[int, list[Exported]] = {}
        for export in step.exports:
            by_sequence.setdefault(export.sequence_id, []).append(export)
        for sequence_id, exports in by_sequence.items():
            self._transfers.store(sequence_id, exports)

    def _fail_step(self, step_id: int, error: BaseException) -> None:
        """End the step's own sequences; the others are for the orchestrator to run elsewhere, or here after a restart.

        This process cannot go on: the step may have consumed the device's state.
        """
        text = f"step {step_id} failed: {_describe(error)}"
        for sequence_id in self._scheduler.fail(step_id):
            self._socket.send(SequenceEnded(sequence_id, "error", text))
        failure = StepFailed(text)
        failure.__cause__ = error
        self._give_up(failure)

    def _give_up(self, error: BaseException) -> None:
        """Report a failure and end the loop."""
        expected = isinstance(error, TwinjetError)
        text = str(error) if expected else _describe(error)
        told = self._socket.send_if_room(Failed(type(error).__name__ if expected else "EngineError", text))
        if isinstance(error, CheckpointError | ConfigError):
            # Not a bug but news for the person who started this, which the server process delivers in one line.
            if not told:
                log.error("%s", text)
        elif not expected or error.__cause__ is not None:
            log.error("%s", "".join(traceback.format_exception(error)).rstrip())
        else:
            log.error("%s", text)
        self._exit_code = 1

    # --- messages -------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        """Handle what has come, until the device or a transfer has news, which goes first."""
        while self._exit_code is None and not self._stop_requested:
            message = self._socket.recv()
            if message is None:
                return
            self._handle(message)
            if self._events:
                return

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(sequence_id):
                if self._fetching.pop(sequence_id, None) is not None or self._scheduler.abort(sequence_id):
                    self._socket.send(SequenceEnded(sequence_id, "cancelled"))
            case ReleasePages(name):
                self._transfers.free(name)
            case Shutdown():
                self._stop_requested = True

    def _submit(self, message: Submit) -> None:
        if self._engine is None:
            self._refuse(message.sequence_id, "the engine is still starting")
            return
        try:
            spec = sequence_spec(message, self._engine.vocab_size)
        except RequestError as error:
            self._refuse(message.sequence_id, str(error))
            return
        if not message.pages:
            self._add(spec)
            return
        expected = ExpectedPages(self._engine.kv_shape, self._config.cache.dtype, len(spec.token_ids) - 1)
        self._fetching[spec.sequence_id] = spec
        self._transfers.fetch(spec.sequence_id, message.pages, expected)

    def _add_with_pages(
        self, sequence_id: int, imports: tuple[ImportedPages, ...], error: TransferFailed | None
    ) -> None:
        spec = self._fetching.pop(sequence_id, None)
        if spec is None:
            return
        if error is not None:
            log.error("%s; they are computed here instead", error)
        self._socket.send(PagesImported(sequence_id, error is None))
        self._add(replace(spec, imports=imports))

    def _add(self, spec: SequenceSpec) -> None:
        try:
            self._scheduler.add(spec, time.monotonic())
        except RequestError as error:
            self._refuse(spec.sequence_id, str(error))

    def _refuse(self, sequence_id: int, text: str) -> None:
        self._socket.send(SequenceEnded(sequence_id, "error", text))

    # --- between steps --------------------------------------------------------------------------

    def _report_stats(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_stats_s:
            return
        self._next_stats_s = now_s + STATS_INTERVAL_S
        if self._engine is None:
            return
        figures, expected_ms = self._scheduler.stats(), self._scheduler.next_predicted_ms
        self._socket.send_if_room(
            Stats(
                num_running=figures.num_running,
                num_waiting=figures.num_waiting + len(self._fetching),
                pages_used=figures.pages_used,
                pages_cached=figures.pages_cached,
                waiting_tokens=figures.waiting_tokens,
                cost_drift=figures.cost_drift,
                num_skipped=figures.num_skipped + len(self._fetching),
                steps_total=figures.steps_total,
                rows_total=figures.rows_total,
                padding_rows_total=self._meter.padding_rows_total,
                wasted_rows_total=figures.wasted_rows_total,
                preemptions_total=figures.preemptions_total,
                prefix_queries_total=figures.prefix_queries_total,
                prefix_hits_total=figures.prefix_hits_total,
                prefix_evictions_total=figures.prefix_evictions_total,
                compiles_total=self._engine.compiles_total,
                busy_s_total=self._meter.busy_s_total,
                predicted_s_total=self._meter.predicted_s_total,
                stall_bound_violations_total=self._meter.stall_bound_violations_total,
                step_durations=self._meter.steps(),
                gap_durations=self._meter.gaps(),
                step_age_s=now_s - self._step_began_s if self._scheduler.num_in_flight else 0.0,
                step_expected_s=None if expected_ms is None else expected_ms / 1e3,
            )
        )
        if self._scheduler.has_work:
            garbage.collect_young()
        elif not self._settled:
            self._settled = True
            self._scheduler.check_integrity()
            garbage.collect_all()

    def _stop(self) -> None:
        """Send what the running step gives, and leave nothing in shared memory."""
        if not self._device.stop(STOP_S if self._engine is not None else 0.0) and self._engine is not None:
            log.error("the running step has not ended within %.0f s; leaving without it", STOP_S)
        if self._exit_code == 0:
            for event in list(self._events):
                if isinstance(event, StepDone):
                    self._complete(event.step)
        self._transfers.stop(STOP_S)


@dataclass(frozen=True, slots=True)
class _NotDispatched:
    """Implements `DispatchedStep` for a plan that the engine refused: it fails when its turn comes, as any other."""

    step_id: int
    error: Exception

    def wait(self) -> None:
        raise self.error

    def output(self) -> StepOutput:
        raise self.error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
