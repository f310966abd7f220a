"""Whether requests make progress, from what is known of the engines."""

from twinjet.orchestrator.interface import Health
from twinjet.orchestrator.pools import Engine, EnginePool
from twinjet.orchestrator.watchdog import Patience, Watchdog

OVERDUE_FACTOR = 10.0
"""Health turns red when a step takes longer than this many times its prediction,"""
OVERDUE_LEAST_S = 3.0
"""and longer than this: a short step may be held up by whatever else the machine does."""


def judge(pool: EnginePool, watchdog: Watchdog, patience: Patience) -> Health:
    """Red while no engine is ready, or one of them has work and does not move, or not nearly as fast as foretold."""
    ready = pool.ready()
    if not ready:
        states = [f"engine {e.engine_id} is {e.state} ({e.last_loss or e.progress})" for e in pool]
        return Health(False, "no engine is ready: " + ", ".join(states))
    for engine in ready:
        if (overdue := _overdue(engine)) is not None:
            return Health(False, overdue)
        stalled_s = watchdog.stalled_s(engine)
        if stalled_s > patience.stall_s:
            return Health(
                False, f"engine {engine.engine_id} has work, but nothing has moved for {stalled_s:.0f} seconds"
            )
    return Health(True, "ok")


def _overdue(engine: Engine) -> str | None:
    """Why the engine's present step takes too long, if it does."""
    stats = engine.stats
    if stats is None or stats.step_expected_s is None:
        return None
    if stats.step_age_s <= max(OVERDUE_LEAST_S, OVERDUE_FACTOR * stats.step_expected_s):
        return None
    return (
        f"a step of engine {engine.engine_id} has been running for {stats.step_age_s:.1f} seconds, "
        f"and should take {stats.step_expected_s:.2f}"
    )
