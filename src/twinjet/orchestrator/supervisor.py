"""One engine's process: started, watched, started again, ended. Knows no requests and reads no socket."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinjet.core.errors import CheckpointError, ConfigError, EngineDead, TwinjetError
from twinjet.orchestrator.pools import Engine
from twinjet.wire.launch import WorkerLaunch, dump_launch
from twinjet.wire.messages import Failed, Ready

log = logging.getLogger(__name__)

_HOPELESS = {error.__name__: error for error in (CheckpointError, ConfigError)}
"""Failures of a first start that a second try cannot mend."""

_LAST_WORDS_S = 0.5
"""How long after a process's exit its last message may still be on its way."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often and how fast a lost engine is started again."""

    max_failed_starts: int = 3
    """Starts in a row that end before the engine is ready; then it is dead for good."""
    backoff_s: float = 0.25
    """Pause before the second restart in a row; doubles with each. The first is at once."""
    max_backoff_s: float = 10.0
    stable_s: float = 30.0
    """An engine that was ready for this long is restarted at once again."""
    shutdown_s: float = 5.0
    """How long a process may take to leave when asked to; SIGTERM follows."""
    terminate_s: float = 2.0
    """How long it may take after SIGTERM; SIGKILL follows."""

    def pause_s(self, losses_in_a_row: int) -> float:
        if losses_in_a_row <= 1:
            return 0.0
        return min(self.max_backoff_s, self.backoff_s * 2.0 ** (losses_in_a_row - 2))


class Supervisor:
    """Keeps the process of one engine alive and its record up to date."""

    def __init__(
        self,
        engine: Engine,
        command: Sequence[str],
        environment: dict[str, str],
        launch: Callable[[int], WorkerLaunch],
        policy: RestartPolicy,
        *,
        on_lost: Callable[[Engine, str], None],
        on_dead: Callable[[Engine], None],
        sweep: Callable[[int], None],
    ) -> None:
        """
        Args:
            command: starts a process that reads orders on its standard input, as `wire.launch` says.
            launch: start-up orders for an incarnation.
            on_lost: called once for each lost incarnation, at once, with the reason.
            on_dead: called when the engine is given up for good.
            sweep: removes what an ended incarnation has left in shared memory.
        """
        self.engine = engine
        self._command = tuple(command)
        self._environment = environment
        self._launch = launch
        self._policy = policy
        self._on_lost = on_lost
        self._on_dead = on_dead
        self._sweep = sweep
        self._process: asyncio.subprocess.Process | None = None
        self._failed: Failed | None = None
        self._said_failed = asyncio.Event()
        self._ready_at_s: float | None = None
        self._first_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> "asyncio.Future[None]":
        """Begin; the result is done when the engine is ready for the first time.

        It raises CheckpointError, ConfigError or EngineDead if that will never be.
        """
        self._task = asyncio.create_task(self._run(), name=f"engine {self.engine.engine_id}")
        return self._first_start

    def ready(self, message: Ready) -> None:
        """The present incarnation is warm."""
        self.engine.become_ready(message)
        self._ready_at_s = asyncio.get_running_loop().time()
        if not self._first_start.done():
            self._first_start.set_result(None)

    def failed(self, message: Failed) -> None:
        """The present incarnation said that it cannot go on; it is given a moment to leave by itself."""
        self._failed = message
        self._said_failed.set()
        self._lose(f"{message.kind}: {message.text}")
        if self._process is not None:
            asyncio.get_running_loop().call_later(self._policy.shutdown_s, _signal, self._process, signal.SIGKILL)

    def condemn(self, incarnation: int, reason: str) -> None:
        """Believe this incarnation no more and kill it. Harmless if it is gone."""
        if self.engine.incarnation != incarnation or not self.engine.listening:
            return
        log.error("engine %d is killed: %s", self.engine.engine_id, reason)
        self._lose(reason)
        if self._process is not None:
            _signal(self._process, signal.SIGKILL)

    async def stop(self) -> None:
        """End the process: a ready one was asked to by now; then it is told to; then it is made to."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        was_ready = self.engine.ready
        self.engine.state = "dead"
        self.engine.listening = False
        if not self._first_start.done():
            self._first_start.set_exception(EngineDead(f"engine {self.engine.engine_id} was stopped while starting"))
        if not self._first_start.cancelled():
            # Looked at here, for where nobody waits for it any more.
            self._first_start.exception()
        process, self._process = self._process, None
        if process is None:
            return
        for timeout_s, number in (
            (self._policy.shutdown_s if was_ready else 0.0, signal.SIGTERM),
            (self._policy.terminate_s, signal.SIGKILL),
        ):
            try:
                await asyncio.wait_for(process.wait(), timeout_s)
                break
            except TimeoutError:
                _signal(process, number)
        await self._bury(process)
        self.engine.pid = None

    async def _run(self) -> None:
        losses = failed_starts = 0
        while True:
            self._ready_at_s = None
            await self._live()
            engine = self.engine
            if self._ready_at_s is None:
                failed_starts += 1
                losses += 1
            else:
                stable = asyncio.get_running_loop().time() - self._ready_at_s >= self._policy.stable_s
                failed_starts, losses = 0, 1 if stable else losses + 1
            error = self._hopeless(failed_starts)
            if error is not None:
                engine.state = "dead"
                if self._first_start.done():
                    log.error("engine %d is given up: %s", engine.engine_id, error)
                else:  # whoever waits for the start tells of it
                    self._first_start.set_exception(error)
                self._on_dead(engine)
                return
            log.warning("engine %d is started again; it was lost: %s", engine.engine_id, engine.last_loss)
            await asyncio.sleep(self._policy.pause_s(losses))
            engine.restarts += 1

    def _hopeless(self, failed_starts: int) -> TwinjetError | None:
        """Why the engine is not to be started again, if so."""
        if self._failed is not None and self._failed.kind in _HOPELESS and not self._first_start.done():
            return _HOPELESS[self._failed.kind](self._failed.text)
        if failed_starts >= self._policy.max_failed_starts:
            return EngineDead(
                f"engine {self.engine.engine_id} failed to start {failed_starts} times in a row, "
                f"the last time: {self.engine.last_loss}"
            )
        return None

    async def _live(self) -> None:
        """One incarnation, from start to exit."""
        engine = self.engine
        engine.incarnation += 1
        engine.progress = "starting"
        self._failed = None
        self._said_failed.clear()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=2,  # Standard output is this process's own, and may be a report.
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for this process to hear, and to drain first.
            )
        except OSError as error:
            engine.last_loss = f"cannot start {self._command[0]}: {error}"
            return
        self._process = process
        engine.begin(process.pid)
        if process.stdin is not None:
            process.stdin.write(dump_launch(self._launch(engine.incarnation)))
            with contextlib.suppress(ConnectionError):
                await process.stdin.drain()
        # Standard input stays open: its end tells the child that this process is gone.
        code = await process.wait()
        if engine.listening and not engine.ready:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._said_failed.wait(), _LAST_WORDS_S)
        if engine.listening:
            self._lose(_describe_exit(code))
        await self._bury(process)
        self._process = None

    def _lose(self, reason: str) -> None:
        if self.engine.listening:
            self.engine.lose(reason)
            self._on_lost(self.engine, reason)

    async def _bury(self, process: asyncio.subprocess.Process) -> None:
        """Wait for a process that is ending, and remove what it left."""
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(ConnectionError):
                await process.stdin.wait_closed()
        self._sweep(self.engine.incarnation)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"its process exited with code {code}"
    try:
        return f"its process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was ended by signal {-code}"
