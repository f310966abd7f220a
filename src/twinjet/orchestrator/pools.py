"""What is known about each engine: its state, limits, latest report, and whether it moves. Starts and sends nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from twinjet.core.types import EngineInfo
from twinjet.orchestrator.interface import EngineStatus
from twinjet.wire.messages import Ready, Stats

ROLES = ("both", "prefill", "decode")

EngineState = Literal["starting", "ready", "restarting", "dead"]


@dataclass(eq=False, slots=True)
class Engine:
    """One engine through all its incarnations."""

    engine_id: int
    role: str
    state: EngineState = "starting"
    pid: int | None = None
    incarnation: int = 0
    restarts: int = 0
    listening: bool = False
    """Its present incarnation runs and is believed; false from the moment it is given up."""
    info: EngineInfo | None = None
    stats: Stats | None = None
    progress: str = "starting"
    """How far start-up is, for people."""
    last_loss: str = ""
    """Why it was last lost, for people."""
    silent_ticks: int = 0
    """Ticks of the watchdog since its last message."""
    idle_ticks: int = 0
    """Ticks since anything moved while it had work. Ticks, not seconds: when this process itself was
    suspended or busy, a clock would blame the engines."""

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def begin(self, pid: int) -> None:
        """A new process was started."""
        self.pid = pid
        self.listening = True
        self.silent_ticks = self.idle_ticks = 0
        self.stats = None

    def become_ready(self, ready: Ready) -> None:
        self.state = "ready"
        self.idle_ticks = 0
        self.info = EngineInfo(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            pid=ready.pid,
            vocab_size=ready.vocab_size,
            context=ready.context,
            max_streams=ready.max_streams,
            num_pages=ready.num_pages,
            page_size=ready.page_size,
            token_budget=ready.token_budget,
            backend=ready.backend,
            kv_dtype=ready.kv_dtype,
            warmup_s=ready.warmup_s,
            forecast=ready.forecast,
        )

    def report(self, stats: Stats) -> None:
        if self.stats is None or stats.steps_total != self.stats.steps_total:
            self.idle_ticks = 0
        self.stats = stats

    def lose(self, reason: str) -> None:
        self.listening = False
        self.pid = None
        self.last_loss = reason
        if self.state == "ready":
            self.state = "restarting"

    def status(self) -> EngineStatus:
        return EngineStatus(
            engine_id=self.engine_id,
            role=self.role,
            state=self.state,
            pid=self.pid,
            incarnation=self.incarnation,
            restarts=self.restarts,
            stats=self.stats,
        )


class EnginePool:
    """All engines of this orchestrator; their ids are their places."""

    def __init__(self, roles: tuple[str, ...]) -> None:
        self._engines = [Engine(engine_id, role) for engine_id, role in enumerate(roles)]

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def __getitem__(self, engine_id: int) -> Engine:
        return self._engines[engine_id]

    def believed(self, engine_id: int, incarnation: int) -> Engine | None:
        """The engine, if it exists and this is its running incarnation; None for strangers and the dead."""
        if not 0 <= engine_id < len(self._engines):
            return None
        engine = self._engines[engine_id]
        return engine if engine.listening and engine.incarnation == incarnation else None

    def ready(self) -> list[Engine]:
        return [engine for engine in self._engines if engine.ready]

    def all_dead(self) -> bool:
        return all(engine.state == "dead" for engine in self._engines)
