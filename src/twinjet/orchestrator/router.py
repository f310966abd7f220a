"""Which engine an entry goes to. Roles are preferences: where no engine of the wished role lives, any other serves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinjet.orchestrator.journal import Entry
from twinjet.orchestrator.pools import Engine


@dataclass(frozen=True, slots=True)
class Route:
    """Where to, and whether another engine is to go on after the first token."""

    engine: Engine
    exports: bool


def route(entry: Entry, engines: Sequence[Engine], load: Callable[[Engine], int]) -> Route | None:
    """The least loaded engine of the best role.

    Args:
        engines: those that may be used now.
        load: rows that an engine still has to compute.

    Returns: None if there are no engines.
    """
    if not engines:
        return None

    def least_loaded(*roles: str) -> Engine:
        return min([e for e in engines if e.role in roles] or engines, key=lambda e: (load(e), e.engine_id))

    if entry.held is not None:
        return Route(least_loaded("decode", "both"), exports=False)
    engine = least_loaded("prefill", "both")
    # Nothing is handed over where the first token is also the last, or where there is nobody to hand it to.
    exports = engine.role == "prefill" and entry.remaining > 1 and any(e.role == "decode" for e in engines)
    return Route(engine, exports)
