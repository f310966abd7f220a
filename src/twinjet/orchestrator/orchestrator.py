"""The orchestrator: engines started and watched, requests taken in, messages passed on to who handles them.

Lives in the server process, on one event loop. What happens to a request is in `dispatch`, what happens to
a process in `supervisor`.
"""

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from twinjet.core.config import EngineConfig
from twinjet.core.errors import ConfigError, EngineDead, InvalidRequest, Overloaded
from twinjet.core.types import EngineInfo, Request
from twinjet.orchestrator.admission import check_request
from twinjet.orchestrator.dispatch import Dispatcher, EngineFault
from twinjet.orchestrator.environment import worker_command, worker_environment
from twinjet.orchestrator.health import judge
from twinjet.orchestrator.interface import Health, OrchestratorStats
from twinjet.orchestrator.journal import ReplayLimits
from twinjet.orchestrator.output import TokenStream
from twinjet.orchestrator.pools import ROLES, Engine, EnginePool
from twinjet.orchestrator.supervisor import RestartPolicy, Supervisor
from twinjet.orchestrator.watchdog import Patience, Watchdog
from twinjet.wire.launch import DEFAULT_FACTORY, WorkerLaunch
from twinjet.wire.messages import (
    Failed,
    PagesExported,
    PagesImported,
    Progress,
    Ready,
    SequenceEnded,
    Shutdown,
    Stats,
    StepTokens,
    ToEngine,
    ToOrchestrator,
)
from twinjet.wire.pages import pages_prefix, sweep
from twinjet.wire.sockets import ServerSocket

log = logging.getLogger(__name__)

OnProgress = Callable[[int, str, int, int], None]
"""(engine_id, stage, done, total)."""

_DRAIN_POLL_S = 0.02


class Orchestrator:
    """Implements `interface.Orchestrating` with engine processes on this host."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        roles: tuple[str, ...] = ("both",),
        factory: str = DEFAULT_FACTORY,
        max_waiting: int = 512,
        patience: Patience | None = None,
        replay_limits: ReplayLimits | None = None,
        restart_policy: RestartPolicy | None = None,
        jax_platforms: str | None = "cpu",
        command: Sequence[str] | None = None,
    ) -> None:
        """
        Args:
            config: the same for all engines.
            roles: one for each engine: "both", "prefill" or "decode".
            factory: `module:function` that makes an engine in its process.
            max_waiting: requests accepted beyond what all engines' slots hold; more are `Overloaded`.
            jax_platforms: what JAX may use in the engine processes; None leaves it to the environment and to JAX.
            command: what starts an engine process; None: this interpreter with `twinjet.worker`.

        Raises: ConfigError.
        """
        if not roles or any(role not in ROLES for role in roles):
            raise ConfigError(f"each engine has a role of {', '.join(ROLES)}, got {', '.join(roles) or 'no engine'}")
        if max_waiting < 0:
            raise ConfigError(f"max_waiting must not be negative, got {max_waiting}")
        self._config = config
        self._factory = factory
        self._max_waiting = max_waiting
        self._patience = patience or Patience()
        self._restart_policy = restart_policy or RestartPolicy()
        self._jax_platforms = jax_platforms
        self._command = command or worker_command()
        self._pool = EnginePool(roles)
        self._dispatcher = Dispatcher(self._pool, self._send, replay_limits)
        self._watchdog = Watchdog(self._patience, self._dispatcher.has_work)
        self._supervisors: list[Supervisor] = []
        self._socket: ServerSocket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._on_progress: OnProgress | None = None
        self._info: EngineInfo | None = None
        self._phase = "new"
        """"new", "starting", "serving", "draining" or "stopped"."""
        self._broken = ""
        """What stopped this object's own tasks; empty while they run."""
        self._outage_ticks = 0
        self._stale_messages = 0

    # --- life -------------------------------------------------------------------------------------

    async def start(self, on_progress: OnProgress | None = None) -> None:
        """Start all engines; returns when all are ready.

        Raises: CheckpointError, ConfigError, EngineDead. Nothing is left running then.
        """
        if self._phase != "new":
            raise RuntimeError(f"an orchestrator starts once; this one is {self._phase}")
        self._phase = "starting"
        self._on_progress = on_progress
        try:
            # A server that was killed could not clean up; what is in use is locked and stays.
            sweep("twinjet-")
            self._socket = ServerSocket()
            self._socket.on_bad_frame = self._bad_frame
            # Handed on, not read: what engines are to do is in their configuration.
            environment = worker_environment(os.environ, self._jax_platforms)
            self._supervisors = [self._supervisor(engine, self._socket.endpoint, environment) for engine in self._pool]
            self._tasks = [self._spawn(self._receive(self._socket), "receive"), self._spawn(self._watch(), "watch")]
            await asyncio.gather(*(supervisor.start() for supervisor in self._supervisors))
        except BaseException:
            await self.stop()
            raise
        infos = [engine.info for engine in self._pool if engine.info is not None]
        self._info = min(infos, key=lambda info: info.context)
        self._on_progress = None
        # A drain may have begun meanwhile.
        if self._phase == "starting":
            self._phase = "serving"

    async def drain(self, timeout_s: float) -> bool:
        if self._phase != "stopped":
            self._phase = "draining"
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self._dispatcher.num_requests:
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                self._dispatcher.end_all("cancelled")
                return False
            await asyncio.sleep(min(_DRAIN_POLL_S, left_s))
        return True

    async def stop(self) -> None:
        if self._phase == "stopped":
            return
        self._phase = "stopped"
        self._dispatcher.end_all("error", "the server is stopping")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in self._pool:
            if engine.ready and self._socket is not None:
                self._socket.send(engine.engine_id, engine.incarnation, Shutdown())
        await asyncio.gather(*(supervisor.stop() for supervisor in self._supervisors))
        if self._socket is not None:
            sweep(pages_prefix(self._socket.endpoint))
            self._socket.close()

    # --- requests ---------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Raises: Overloaded, before the start has finished."""
        if self._info is None:
            raise Overloaded("the engines are still starting; try again when /health is 200", retry_after_s=5.0)
        return self._info

    def submit(self, request: Request) -> TokenStream:
        check_request(request, self.info)
        if self._dispatcher.has(request.request_id):
            raise InvalidRequest(f"a request with the id {request.request_id!r} is running; ids must be unique")
        self._check_capacity()
        self._check_deadline(request)
        entry = self._dispatcher.submit(request)
        return TokenStream(entry.output, functools.partial(self._dispatcher.abort_entry, entry))

    def _check_capacity(self) -> None:
        if self._phase != "serving":
            raise Overloaded(f"the server is {self._phase} and takes no new requests; send it to another")
        if self._broken or self._pool.all_dead():
            raise EngineDead(self._broken or self._outage())
        if self._outage_s > self._patience.recovery_s:
            raise Overloaded(self._outage(), retry_after_s=10.0)
        num_slots = sum(engine.info.max_streams for engine in self._pool if engine.info is not None)
        if self._dispatcher.num_requests >= self._max_waiting + num_slots:
            raise Overloaded(
                f"{self._dispatcher.num_requests} requests are here already, of which {num_slots} can run at once "
                f"and {self._max_waiting} may wait; try again later",
                self._retry_after_s([self._dispatcher.expected_wait_s(engine) for engine in self._pool.ready()]),
            )

    def _check_deadline(self, request: Request) -> None:
        """Refuse now what would only fail later."""
        if request.deadline_s is None:
            return
        engines = [engine for engine in self._pool.ready() if engine.role != "decode"] or self._pool.ready()
        expected = [self._dispatcher.expected_ttft_s(engine, len(request.prompt_ids)) for engine in engines]
        known = [ttft for ttft in expected if ttft is not None]
        if known and min(known) > request.deadline_s:
            raise Overloaded(
                f"the first token is expected in {min(known):.2f} s, and needed within {request.deadline_s:.2f} s; "
                "try again later, or allow more time",
                max(1.0, min(known) - request.deadline_s),
            )

    @staticmethod
    def _retry_after_s(waits_s: Sequence[float | None]) -> float:
        return max(1.0, min((wait for wait in waits_s if wait is not None), default=1.0))

    def abort(self, request_id: str) -> None:
        self._dispatcher.abort(request_id)

    # --- reports ----------------------------------------------------------------------------------

    def stats(self) -> OrchestratorStats:
        counters = self._dispatcher.counters
        return OrchestratorStats(
            engines=tuple(engine.status() for engine in self._pool),
            num_requests=self._dispatcher.num_requests,
            replays_total=counters.replays,
            transfers_total=counters.transfers,
            transfer_bytes_total=counters.transfer_bytes,
            extra={
                "transfer_failures_total": counters.transfer_failures,
                "requests_given_up_total": counters.given_up,
                "sequence_errors_total": counters.sequence_errors,
                "stale_messages_total": self._stale_messages,
                "stranger_messages_total": 0 if self._socket is None else self._socket.strangers_total,
            },
        )

    def health(self) -> Health:
        if self._phase in ("new", "starting"):
            starting = [f"engine {e.engine_id}: {e.progress}" for e in self._pool if not e.ready]
            return Health(False, "starting; " + ", ".join(starting))
        if self._phase == "stopped":
            return Health(False, "stopped")
        if self._broken:
            return Health(False, self._broken)
        return judge(self._pool, self._watchdog, self._patience)

    # --- engines ----------------------------------------------------------------------------------

    def _supervisor(self, engine: Engine, endpoint: str, environment: dict[str, str]) -> Supervisor:
        def launch(incarnation: int) -> WorkerLaunch:
            return WorkerLaunch(engine.engine_id, incarnation, endpoint, self._config, self._factory)

        def sweep_incarnation(incarnation: int) -> None:
            sweep(pages_prefix(endpoint, engine.engine_id, incarnation))

        return Supervisor(
            engine,
            self._command,
            environment,
            launch,
            self._restart_policy,
            on_lost=self._dispatcher.engine_lost,
            on_dead=self._engine_dead,
            sweep=sweep_incarnation,
        )

    def _engine_dead(self, engine: Engine) -> None:
        if self._pool.all_dead():
            self._dispatcher.end_pending(self._outage())

    def _outage(self) -> str:
        losses = [f"engine {e.engine_id}: {e.last_loss or e.progress}" for e in self._pool if not e.ready]
        return "no engine is left to run requests; " + ", ".join(losses)

    @property
    def _outage_s(self) -> float:
        return self._outage_ticks * self._patience.tick_s

    def _condemn(self, engine: Engine, incarnation: int, reason: str) -> None:
        self._supervisors[engine.engine_id].condemn(incarnation, reason)

    def _send(self, engine: Engine, message: ToEngine) -> None:
        if self._socket is None or not self._socket.send(engine.engine_id, engine.incarnation, message):
            # Not now: whoever sends is in the middle of something.
            asyncio.get_running_loop().call_soon(
                self._condemn, engine, engine.incarnation, "it is not connected, or takes no messages"
            )

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._patience.tick_s)
            for engine in self._pool:
                reason = self._watchdog.tick(engine)
                if reason is not None:
                    self._condemn(engine, engine.incarnation, reason)
            # The first start has its own limits.
            down = self._info is not None and not self._pool.ready()
            self._outage_ticks = self._outage_ticks + 1 if down else 0
            if self._outage_s > self._patience.recovery_s:
                self._dispatcher.end_pending(self._outage())

    # --- messages ---------------------------------------------------------------------------------

    async def _receive(self, socket: ServerSocket) -> None:
        while True:
            engine_id, incarnation, message = await socket.recv()
            engine = self._pool.believed(engine_id, incarnation)
            if engine is None:
                self._stale_messages += 1
                continue
            try:
                self._handle(engine, message)
            except EngineFault as fault:
                self._condemn(engine, incarnation, str(fault))
            except Exception:
                # A bug here. Its engine is replaced, which puts its requests into a known state; the others go on.
                log.exception("a message of engine %d could not be handled", engine_id)
                self._condemn(engine, incarnation, f"its {type(message).__name__} message could not be handled")

    def _bad_frame(self, engine_id: int, incarnation: int, problem: str) -> None:
        engine = self._pool.believed(engine_id, incarnation)
        if engine is not None:
            # Tokens may have been in it, so its streams cannot go on.
            self._condemn(engine, incarnation, f"it sent what cannot be read: {problem}")

    def _handle(self, engine: Engine, message: ToOrchestrator) -> None:
        engine.silent_ticks = 0
        match message:
            case StepTokens():
                engine.idle_ticks = 0
                self._dispatcher.step_tokens(engine, message)
            case Stats():
                engine.report(message)
            case SequenceEnded():
                engine.idle_ticks = 0
                self._dispatcher.sequence_ended(engine, message)
            case PagesExported():
                engine.idle_ticks = 0
                self._dispatcher.pages_exported(engine, message)
            case PagesImported():
                engine.idle_ticks = 0
                self._dispatcher.pages_imported(engine, message)
            case Progress():
                # On its way: who waits may go on waiting.
                self._outage_ticks = 0
                engine.progress = f"{message.stage} {message.done}/{message.total}"
                if self._on_progress is not None:
                    self._on_progress(engine.engine_id, message.stage, message.done, message.total)
            case Ready():
                self._supervisors[engine.engine_id].ready(message)
                self._outage_ticks = 0
                self._dispatcher.engine_ready()
            case Failed():
                self._supervisors[engine.engine_id].failed(message)

    def _spawn(self, loop: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await loop
            except Exception as error:
                # Nothing moves without these tasks: say so, rather than let clients wait.
                log.exception("the orchestrator's task %r ended", name)
                self._broken = f"the orchestrator's task {name!r} ended: {error}"
                self._dispatcher.end_all("error", self._broken)

        return asyncio.create_task(guarded(), name=name)
