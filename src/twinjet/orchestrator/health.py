"""Whether requests make progress, from what is known of the engines."""

from twinjet.orchestrator.interface import Health
from twinjet.orchestrator.pools import EnginePool
from twinjet.orchestrator.watchdog import Patience, Watchdog


def judge(pool: EnginePool, watchdog: Watchdog, patience: Patience) -> Health:
    """Red while no engine is ready, or one of them has work and does not move."""
    ready = pool.ready()
    if not ready:
        states = [f"engine {e.engine_id} is {e.state} ({e.last_loss or e.progress})" for e in pool]
        return Health(False, "no engine is ready: " + ", ".join(states))
    for engine in ready:
        stalled_s = watchdog.stalled_s(engine)
        if stalled_s > patience.stall_s:
            return Health(
                False, f"engine {engine.engine_id} has work, but nothing has moved for {stalled_s:.0f} seconds"
            )
    return Health(True, "ok")
