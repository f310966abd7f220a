"""The server's side of the wire, as little of it as the worker's tests need, and workers to talk to."""

import asyncio
import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from tests.fakes import FAKE_VOCAB, load_fake_engine
from twinjet.core.config import CacheConfig, EngineConfig, SchedulerConfig
from twinjet.wire import pages as pages_module
from twinjet.wire.launch import WorkerLaunch, dump_launch
from twinjet.wire.messages import (
    Failed,
    PagesExported,
    PagesHandle,
    PagesImported,
    Progress,
    Ready,
    SequenceEnded,
    Stats,
    StepTokens,
    Submit,
    ToEngine,
    ToOrchestrator,
)
from twinjet.wire.pages import pages_prefix
from twinjet.wire.sockets import EngineSocket, ServerSocket
from twinjet.worker.loop import WorkerLoop

ROOT = Path(__file__).parents[2]
FACTORY = "tests.fakes:load_fake_engine"


def fake_config(
    options: str = "",
    *,
    page_size: int = 8,
    num_pages: int = 128,
    max_streams: int = 8,
    context: int = 256,
    token_budget: int = 32,
    pipeline_depth: int = 2,
    calibration_s: float = 0.0,
    itl_target_ms: float | None = None,
) -> EngineConfig:
    return EngineConfig(
        model_path=f"fake?{options}" if options else "fake",
        cache=CacheConfig(page_size, num_pages, "float32"),
        scheduler=SchedulerConfig(max_streams, context, token_budget, itl_target_ms=itl_target_ms),
        exact=True,
        threads=1,
        pipeline_depth=pipeline_depth,
        calibration_s=calibration_s,
    )


def submit(
    sequence_id: int,
    prompt: list[int],
    n: int,
    *,
    stop: tuple[int, ...] = (),
    num_logprobs: int | None = None,
    export: bool = False,
    pages: list[PagesHandle] | None = None,
) -> Submit:
    return Submit(
        sequence_id=sequence_id,
        token_ids=np.array(prompt, "<i4").tobytes(),
        max_new_tokens=n,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        choice=0,
        stop_token_ids=list(stop),
        num_logprobs=num_logprobs,
        export_pages=export,
        pages=pages or [],
    )


class Server:
    """Collects what engines say. Use as `async with`."""

    def __init__(self) -> None:
        self.socket = ServerSocket()
        self.log: list[tuple[int, ToOrchestrator]] = []
        """All messages, with the engine's id, in order."""
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        """How each sequence ended: a finish of `StepTokens`, or a reason of `SequenceEnded`."""
        self.texts: dict[int, str] = {}
        self._changed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Server":
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *args: object) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        self.socket.close()

    async def _read(self) -> None:
        while True:
            engine_id, _, message = await self.socket.recv()
            self.log.append((engine_id, message))
            match message:
                case StepTokens():
                    for sequence_id, token_id, finish in zip(
                        message.sequence_ids, message.token_ids, message.finish, strict=True
                    ):
                        assert sequence_id not in self.ends, f"a token of {sequence_id} after its end"
                        self.tokens.setdefault(sequence_id, []).append(token_id)
                        if finish:
                            self.ends[sequence_id] = finish
                case SequenceEnded(sequence_id, reason, text):
                    assert sequence_id not in self.ends, f"{sequence_id} ended twice"
                    self.ends[sequence_id] = reason
                    self.texts[sequence_id] = text
            self._changed.set()

    def send(self, message: ToEngine, engine_id: int = 0, incarnation: int = 0) -> None:
        assert self.socket.send(engine_id, incarnation, message), "no such engine"

    def of(self, kind: type, engine_id: int = 0) -> list:
        return [message for sender, message in self.log if sender == engine_id and isinstance(message, kind)]

    async def until(self, condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        async def wait() -> None:
            while not condition():
                self._changed.clear()
                if self._reader is not None and self._reader.done():
                    self._reader.result()
                await self._changed.wait()

        assert self._reader is not None
        waiting = asyncio.ensure_future(wait())
        await asyncio.wait({waiting, self._reader}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._reader.done():
            self._reader.result()
        if not waiting.done():
            waiting.cancel()
            raise TimeoutError(f"it did not come about; last messages: {self.log[-5:]}")
        await waiting

    async def until_ready(self, engine_id: int = 0) -> Ready:
        await self.until(lambda: self.of(Ready, engine_id) or self.of(Failed, engine_id))
        assert not self.of(Failed, engine_id), self.of(Failed, engine_id)
        return self.of(Ready, engine_id)[0]

    async def until_ended(self, *sequence_ids: int) -> None:
        await self.until(lambda: all(sequence_id in self.ends for sequence_id in sequence_ids))

    async def exported(self, sequence_id: int, engine_id: int = 0) -> list[PagesHandle]:
        def found() -> list[PagesExported]:
            return [m for m in self.of(PagesExported, engine_id) if m.sequence_id == sequence_id]

        await self.until(found)
        return found()[0].pages

    async def imported(self, sequence_id: int, engine_id: int = 0) -> bool:
        def found() -> list[PagesImported]:
            return [m for m in self.of(PagesImported, engine_id) if m.sequence_id == sequence_id]

        await self.until(found)
        return found()[0].ok

    async def fresh_stats(self, engine_id: int = 0) -> Stats:
        seen = len(self.of(Stats, engine_id))
        # The next one may have been on its way; the one after it was made later than this call.
        await self.until(lambda: len(self.of(Stats, engine_id)) >= seen + 2)
        return self.of(Stats, engine_id)[-1]

    def progress(self, engine_id: int = 0) -> list[tuple[str, int, int]]:
        return [(m.stage, m.done, m.total) for m in self.of(Progress, engine_id)]


class ThreadWorker:
    """A worker loop on a thread of this process."""

    def __init__(self, server: Server, config: EngineConfig, engine_id: int = 0) -> None:
        launch = WorkerLaunch(engine_id, 0, server.socket.endpoint, config, FACTORY)
        self.exit_code: int | None = None
        self.socket = EngineSocket(launch.endpoint, engine_id, 0)
        self.loop = WorkerLoop(launch, self.socket, partial(load_fake_engine, config))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.exit_code = self.loop.run()

    def close(self) -> None:
        """Stop, if it has not."""
        self.loop.request_stop()
        self._thread.join(10)
        self.socket.close()

    async def stopped(self, timeout_s: float = 10.0) -> int | None:
        """The exit code, once the loop has returned."""
        await asyncio.to_thread(self._thread.join, timeout_s)
        return self.exit_code


@contextlib.contextmanager
def thread_worker(server: Server, config: EngineConfig, engine_id: int = 0) -> Iterator[ThreadWorker]:
    worker = ThreadWorker(server, config, engine_id)
    try:
        yield worker
    finally:
        worker.close()
        gc.unfreeze()
        gc.enable()


def child_environment(path: str = "") -> dict[str, str]:
    """For a child that finds `tests`, and what lies in `path`."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), path]))}


def spawn_worker(
    endpoint: str, config: EngineConfig, engine_id: int = 0, factory: str = FACTORY, path: str = ""
) -> subprocess.Popen[bytes]:
    """A real engine process, whose standard error is captured; `path` may hold its factory."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "twinjet.worker"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(path),
    )
    assert process.stdin is not None
    process.stdin.write(dump_launch(WorkerLaunch(engine_id, 0, endpoint, config, factory)))
    process.stdin.flush()
    return process


@contextlib.contextmanager
def process_worker(
    server: Server, config: EngineConfig, engine_id: int = 0, factory: str = FACTORY, path: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    process = spawn_worker(server.socket.endpoint, config, engine_id, factory, path)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stderr):
            if stream is not None:
                stream.close()


async def exit_of(process: subprocess.Popen[bytes], timeout_s: float = 10.0) -> tuple[int, str]:
    """(exit code, standard error)."""
    code = await asyncio.to_thread(process.wait, timeout_s)
    assert process.stderr is not None
    return code, process.stderr.read().decode()


def gone_within(pid: int, timeout_s: float) -> bool:
    """Whether a process, not a child of this one, ends in time."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def random_prompt(rng: random.Random, most: int = 100) -> list[int]:
    return [rng.randrange(FAKE_VOCAB) for _ in range(rng.randint(1, most))]


def segments(server: Server) -> list[Path]:
    return list(pages_module._directory().glob(f"{pages_prefix(server.socket.endpoint)}*"))


async def assert_at_rest(server: Server, engine_id: int = 0) -> None:
    stats = await server.fresh_stats(engine_id)
    assert (stats.num_running, stats.num_waiting, stats.pages_used, stats.waiting_tokens) == (0, 0, 0, 0)
