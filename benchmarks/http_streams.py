"""What the HTTP side costs for each streamed chunk, over an orchestrator that ticks like an engine.

    python -m benchmarks.http_streams [--streams 16] [--rate 200] [--seconds 5]

The server process's CPU time is divided by the chunks sent; the ticking alone, read by tasks without HTTP,
is measured the same way and shown beside it. Clients run in a process of their own.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from statistics import median

import uvloop

from tests.server.fakes import FakeOrchestrator, fake_service
from twinjet.core.types import Request, TokenEvent
from twinjet.orchestrator.output import Output, TokenStream
from twinjet.server.app import create_app, run_server


class TickingOrchestrator(FakeOrchestrator):
    """One token to every running request at each tick."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.outputs: dict[str, Output] = {}
        self.tokens_total = 0
        self._tick_s = 1 / rate

    def submit(self, request: Request) -> AsyncIterator[TokenEvent]:
        output = self.outputs[request.request_id] = Output()
        return TokenStream(output, lambda: self.abort(request.request_id))

    def abort(self, request_id: str) -> None:
        if output := self.outputs.pop(request_id, None):
            output.end("cancelled")

    async def tick(self) -> None:
        due = time.monotonic()
        while True:
            due += self._tick_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            for output in self.outputs.values():
                output.push(97 + self.tokens_total % 26, None)
                self.tokens_total += 1


async def measure(orchestrator: TickingOrchestrator, seconds: float) -> float:
    """CPU microseconds for each token, over `seconds`."""
    await asyncio.sleep(0.5)
    cpu, tokens = time.process_time(), orchestrator.tokens_total
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu) / max(1, orchestrator.tokens_total - tokens) * 1e6


async def without_http(streams: int, rate: float, seconds: float) -> float:
    orchestrator = TickingOrchestrator(rate)

    async def read(number: int) -> None:
        async for _ in orchestrator.submit(Request(str(number), (1,), 1)):
            pass

    tasks = [asyncio.create_task(read(number)) for number in range(streams)]
    tasks.append(asyncio.create_task(orchestrator.tick()))
    cost = await measure(orchestrator, seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return cost


async def with_http(streams: int, rate: float, seconds: float) -> tuple[float, dict[str, float]]:
    orchestrator = TickingOrchestrator(rate)
    ports: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(
        run_server(
            create_app(fake_service(orchestrator)),
            "127.0.0.1",
            0,
            drain_timeout_s=0,
            on_listening=lambda _, port: ports.set_result(port),
            stop=stop,
        )
    )
    ticking = asyncio.create_task(orchestrator.tick())
    port = await ports
    ours, theirs = multiprocessing.Pipe()
    client = multiprocessing.get_context("spawn").Process(target=run_clients, args=(port, streams, theirs))
    client.start()
    while len(orchestrator.outputs) < streams:
        await asyncio.sleep(0.01)
    cost = await measure(orchestrator, seconds)
    for request_id in list(orchestrator.outputs):
        orchestrator.abort(request_id)
    gaps = await asyncio.to_thread(ours.recv)
    client.join()
    ticking.cancel()
    stop.set()
    await serving
    return cost, gaps


def run_clients(port: int, streams: int, report: Connection) -> None:
    """Read all streams to their ends and report the gaps between chunks in milliseconds."""

    async def read() -> list[float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"prompt": "a", "max_tokens": 190, "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        times: list[float] = []
        while piece := await reader.read(65536):
            times += [time.monotonic()] * piece.count(b"data: {")
            if b"[DONE]" in piece:
                break
        writer.close()
        return [(b - a) * 1e3 for a, b in itertools.pairwise(times)]

    async def main() -> list[list[float]]:
        return list(await asyncio.gather(*(read() for _ in range(streams))))

    gaps = sorted(gap for stream in uvloop.run(main()) for gap in stream)
    report.send({"median": median(gaps), "p99": gaps[len(gaps) * 99 // 100], "worst": gaps[-1]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rate", type=float, default=200, help="tokens per second and stream")
    parser.add_argument("--seconds", type=float, default=5)
    options = parser.parse_args()
    bare = uvloop.run(without_http(options.streams, options.rate, options.seconds))
    cost, gaps = uvloop.run(with_http(options.streams, options.rate, options.seconds))
    print(f"{options.streams} streams x {options.rate:g} tokens/s")
    print(f"CPU per chunk: {cost:.1f} us with HTTP, {bare:.1f} us of it for ticking and waking a reader")
    print("gaps seen by clients: " + ", ".join(f"{name} {value:.2f} ms" for name, value in gaps.items()))


if __name__ == "__main__":
    main()
