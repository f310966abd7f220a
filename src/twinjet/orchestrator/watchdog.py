"""Which engines are stuck. Counts ticks; knows no processes and kills nothing itself.

Ticks, not seconds: after this process was suspended or its loop was busy, a clock would blame the engines.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from twinjet.core.errors import ConfigError
from twinjet.orchestrator.pools import Engine


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what, in seconds."""

    heartbeat_s: float = 15.0
    """A ready engine that is silent for longer is killed and replaced."""
    stall_s: float = 30.0
    """Health turns red when an engine has work and nothing has moved for longer."""
    stall_kill_s: float = 120.0
    """An engine that has work and has not moved for longer is killed and replaced."""
    start_s: float = 600.0
    """A starting engine that reports no progress for longer is killed."""
    recovery_s: float = 120.0
    """When no engine is ready and none gets on with its start for this long, requests end with `error`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(f"{field.name} must be over 0 seconds, got {getattr(self, field.name)}")

    @property
    def tick_s(self) -> float:
        return min(1.0, *(getattr(self, field.name) / 4 for field in fields(self)))


class Watchdog:
    """Judges engines at each tick."""

    def __init__(self, patience: Patience, has_work: Callable[[Engine], bool]) -> None:
        self._patience = patience
        self._has_work = has_work

    def tick(self, engine: Engine) -> str | None:
        """Why the engine must be replaced, if so. Call once in `tick_s` for each engine."""
        if not engine.listening:
            return None
        patience = self._patience
        engine.silent_ticks += 1
        engine.idle_ticks = engine.idle_ticks + 1 if self._has_work(engine) else 0
        silent_s = engine.silent_ticks * patience.tick_s
        if not engine.ready:
            if silent_s > patience.start_s:
                return f"no progress in {silent_s:.0f} s while starting ({engine.progress})"
        elif silent_s > patience.heartbeat_s:
            return f"no message in {silent_s:.0f} s"
        elif self.stalled_s(engine) > patience.stall_kill_s:
            return f"it has work, but nothing has moved for {self.stalled_s(engine):.0f} s"
        return None

    def stalled_s(self, engine: Engine) -> float:
        """How long the engine has had work without moving."""
        return engine.idle_ticks * self._patience.tick_s
