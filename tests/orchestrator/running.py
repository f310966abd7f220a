"""Orchestrators over real child processes, for the tests here."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import psutil

from tests.fakes import load_fake_engine
from twinjet.core.config import CacheConfig, EngineConfig, SchedulerConfig
from twinjet.core.types import Request, SamplingParams, TokenEvent, TokenLogprobs
from twinjet.orchestrator.orchestrator import Orchestrator
from twinjet.orchestrator.supervisor import RestartPolicy
from twinjet.orchestrator.watchdog import Patience
from twinjet.wire import pages as pages_module
from twinjet.wire.pages import pages_prefix

FAKE = f"{load_fake_engine.__module__}:{load_fake_engine.__name__}"

SCRIPTED = (sys.executable, "-m", "tests.orchestrator.scripted_worker")

IMPATIENT = Patience(heartbeat_s=2.0, stall_s=1.0, stall_kill_s=2.0, start_s=10.0, recovery_s=10.0)
"""Still generous to a worker that reports twice a second on a busy machine."""


def config(model: str = "fake", *, max_streams: int = 16, context: int = 256) -> EngineConfig:
    return EngineConfig(
        model_path=model,
        cache=CacheConfig(page_size=4, num_pages=1024, dtype="float32"),
        scheduler=SchedulerConfig(max_streams=max_streams, context=context, token_budget=32),
        exact=True,
        threads=1,
    )


@contextlib.asynccontextmanager
async def running(
    model: str = "fake", *, factory: str = FAKE, engine: EngineConfig | None = None, **options: Any
) -> AsyncIterator[Orchestrator]:
    """A started orchestrator, stopped at the end; leaves no process behind, or fails."""
    before = set(psutil.Process().children())
    settings = config(model) if engine is None else replace(engine, model_path=model)
    orchestrator = Orchestrator(settings, factory=factory, **options)
    try:
        await orchestrator.start()
        yield orchestrator
    finally:
        await orchestrator.stop()
    left = set(psutil.Process().children()) - before
    assert not left, f"these processes are left over: {left}"


@contextlib.asynccontextmanager
async def running_scripted(script: str, *, patience: Patience = IMPATIENT) -> AsyncIterator[Orchestrator]:
    """An orchestrator whose engines follow `scripted_worker`."""
    quick = RestartPolicy(shutdown_s=0.3, terminate_s=1.0, backoff_s=0.05)
    async with running(script, command=SCRIPTED, patience=patience, restart_policy=quick) as orchestrator:
        yield orchestrator


@dataclass
class Outcome:
    """All that a request gave."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    error: str | None


def request(request_id: str, prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 20, **fields) -> Request:
    return Request(request_id, prompt, max_tokens, SamplingParams(temperature=0.0), **fields)


async def collect(
    stream: AsyncIterator[TokenEvent], on_event: Callable[[TokenEvent], None] = lambda event: None
) -> Outcome:
    """Read to the end, however long the stream; fails if there is anything but one end."""
    outcome = Outcome([], [], None, None)
    async for event in stream:
        assert outcome.finish_reason is None, "an event came after the last one"
        on_event(event)
        outcome.tokens += event.token_ids
        outcome.logprobs += event.logprobs or ()
        outcome.finish_reason, outcome.error = event.finish_reason, event.error
    assert outcome.finish_reason is not None
    return outcome


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def engine_pid(orchestrator: Orchestrator, engine_id: int = 0) -> int:
    pid = orchestrator.stats().engines[engine_id].pid
    assert pid is not None
    return pid


def is_idle(orchestrator: Orchestrator) -> bool:
    """Whether every engine's latest report says that nothing is running, waiting or held."""
    reports = [engine.stats for engine in orchestrator.stats().engines]
    return all(r is not None and r.num_running == r.num_waiting == r.pages_used == 0 for r in reports)


def segments(orchestrator: Orchestrator) -> list[str]:
    """What its engines have in shared memory, also after its end. Those of other servers here do not count."""
    assert orchestrator._socket is not None
    prefix = pages_prefix(orchestrator._socket.endpoint)
    return [path.name for path in pages_module._directory().glob(f"{prefix}*")]
