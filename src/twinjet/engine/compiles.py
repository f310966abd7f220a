"""Counts the programs that XLA compiles in this process: after warm-up, each one is a bug."""

import jax.monitoring

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Programs compiled, or taken from the persistent cache, since the last `reset`."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def reset(self) -> None:
        self.count = 0

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1
