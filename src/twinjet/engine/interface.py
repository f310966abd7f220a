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

    def dispatch(self, plan: Plan) -> "DispatchedStep":
        """Hand a plan to the device, behind all that were dispatched before it, and come back without waiting for it.

        Order within: imports, rows, exports. Called from one thread at a time.
        """
        ...


class DispatchedStep(Protocol):
    """One plan on its way through the device."""

    @property
    def step_id(self) -> int: ...

    def wait(self) -> None:
        """Return when the device has run it, with the GIL released meanwhile. Called once, in order, from any thread.

        One that raises leaves the engine unusable.
        """
        ...

    def output(self) -> StepOutput:
        """What the host needs of a step that was waited for. From any thread."""
        ...


def run_plan(engine: SteppingEngine, plan: Plan) -> StepOutput:
    """One step from dispatch to output, with nothing beside it."""
    step = engine.dispatch(plan)
    step.wait()
    return step.output()
