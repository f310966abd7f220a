"""What the server and the Python API need from an orchestrator; a fake of it serves their tests."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from twinjet.core.types import EngineInfo, Request, TokenEvent
from twinjet.wire.messages import Stats


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine, seen from the orchestrator."""

    engine_id: int
    role: str
    """"both", "prefill" or "decode": a routing preference."""
    state: str
    """"starting", "ready", "restarting" or "dead"."""
    pid: int | None
    incarnation: int
    restarts: int
    stats: Stats | None
    """Its latest report; None before the first."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests make progress."""

    ok: bool
    reason: str
    """Why not, for a person; "ok" otherwise."""


@dataclass(frozen=True, slots=True)
class OrchestratorStats:
    """Everything the metrics page shows about engines."""

    engines: tuple[EngineStatus, ...]
    num_requests: int
    """Accepted and not ended."""
    replays_total: int
    """Sequences started anew because their engine died."""
    transfers_total: int = 0
    transfer_bytes_total: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class Orchestrating(Protocol):
    """The one seam between requests and engines; the same for one engine or many."""

    @property
    def info(self) -> EngineInfo:
        """The engines' common limits. Raises Overloaded until started."""
        ...

    def submit(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Start a request now and stream its events, the last of which has a `finish_reason`.

        Closing the iterator early (`aclose`, or cancelling the task that reads it) aborts the request.

        Raises:
            InvalidRequest, ContextTooLong: the request can never run here.
            Overloaded: too many wait, the first token is not expected in time, or the server is draining.
            EngineDead: no engine is left.
        All are raised by the call itself, before anything is streamed.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request with `cancelled`. Unknown ids are ignored."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Accept nothing more, wait for what runs; False if some was left (and aborted) after `timeout_s`."""
        ...

    async def stop(self) -> None:
        """End all engine processes; running requests end with `error`."""
        ...

    def stats(self) -> OrchestratorStats: ...

    def health(self) -> Health: ...
