"""What the worker needs from an engine; `tests/fakes.py` has one of hand-computable arithmetic."""

from collections.abc import Callable
from typing import Protocol

from twinjet.core.plan import Plan, StepOutput


class SteppingEngine(Protocol):
    """A device and the KV state on it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def backend(self) -> str:
        """Name of the ops that run, for people."""
        ...

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """(L, K, H) of its canonical pages: what it exports, and all that it can import."""
        ...

    @property
    def compiles_total(self) -> int:
        """Programs compiled since warm-up ended."""
        ...

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Compile every program; `on_progress(done, total)` after each."""
        ...

    def step(self, plan: Plan) -> StepOutput:
        """Run one plan to its end and return what the host needs. Blocks, with the GIL released while computing.

        Order within: imports, rows, exports. Called from one thread only.
        """
        ...
