"""How long after the end of a step on the device its tokens are at the client.

    python -m benchmarks.token_delivery [--steps-ms 25,8,4] [--requests 320]

The real server, orchestrator, wire, worker and scheduler over the simulated device, whose tokens tell when their step
ended. A step takes a set time, and each prompt row 0.3 ms more. 16 closed-loop streams of about 128 prompt and 64
output tokens are read by one process, which only notes when each piece came; they are taken apart when all have ended.
Latency is from the end of the step to that moment. Beside it:

- `floor`: at the same pace, 16 connections of that process send a message of a chunk's size each to a plain echo in the
  same event loop: from then until each is back. What a loop and the loopback device take without a server.
- `server`: the server's own histogram of the time from the step's end to handing the bytes to the socket, if it has
  one. Values are spread evenly over their bucket.
"""

import argparse
import asyncio
import gc
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any, cast

import uvloop

from benchmarks.load import Settings, make_prompt, spread_ms
from benchmarks.metrics_page import REPORT_S, Gain, read_page
from benchmarks.provenance import report, write_json
from benchmarks.simulated import token_age_s
from benchmarks.simulated.server import simulated_server

ROW_MS = 0.3
NUM_STREAMS, PROMPT_WORDS, MAX_TOKENS = 16, 128, 64
CHUNK_BYTES = 300
"""About what a chunk of one token has."""
FLOOR_S = 3.0
TIMEOUT_S = 600.0
DELIVERY_HISTOGRAM = "token_delivery_seconds"

_TOKEN_IDS = re.compile(rb'"token_ids":\[([0-9,]+)\]')
_END = b"\r\n0\r\n\r\n"
"""Of an answer in HTTP chunks: events end in an empty line, so nothing in them looks like it."""

Pieces = list[tuple[float, bytes]]
"""(when it was read by the monotonic clock, what was read)."""


@dataclass(slots=True)
class Arrivals:
    """What a client process saw."""

    first_s: list[float] = field(default_factory=list)
    """Age of each request's first token when it came."""
    later_s: list[float] = field(default_factory=list)
    num_bytes: int = 0
    num_pieces: int = 0
    """Reads from a socket."""
    cpu_s: float = 0.0
    """Processor time of the process while requests ran."""


# --- the client process ---------------------------------------------------------------------------


class Stream(asyncio.Protocol):
    """One connection, which sends a request after the other while there are any."""

    def __init__(self, requests: Iterator[bytes], ended: asyncio.Future[None]) -> None:
        self.answers: list[Pieces] = []
        self._requests = requests
        self._ended = ended
        self._pieces: Pieces = []
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is one by shape only
        self._send()

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.monotonic(), data))
        self._tail = (self._tail + data[-len(_END) :])[-len(_END) :]
        if self._tail == _END:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            came = b"".join(data for _, data in self._pieces)
            self._ended.set_exception(RuntimeError(f"the server closed a connection after {came[-500:]!r}: {exc}"))

    def _send(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._ended.set_result(None)
            self._transport.close()
            return
        self._pieces, self._tail = [], b""
        self.answers.append(self._pieces)
        self._transport.write(request)


def run_streams(settings: Settings) -> Arrivals:
    """All requests of `settings`; every answer has all its tokens, else RuntimeError."""
    host, _, port = settings.url.removeprefix("http://").partition(":")
    requests = iter([_request(settings, number) for number in range(settings.requests)])

    async def run() -> list[Stream]:
        loop = asyncio.get_running_loop()
        ends = [loop.create_future() for _ in range(settings.concurrency or 1)]
        async with asyncio.timeout(settings.timeout_s):
            streams = [
                (await loop.create_connection(lambda e=end: Stream(requests, e), host, int(port)))[1] for end in ends
            ]
            await asyncio.gather(*ends)
        return streams

    gc.disable()  # a collection would look like a late token
    cpu_s = time.process_time()
    streams = uvloop.run(run())
    arrivals = Arrivals(cpu_s=time.process_time() - cpu_s)
    gc.enable()
    for answer in itertools.chain.from_iterable(stream.answers for stream in streams):
        _take_apart(answer, settings.max_tokens, arrivals)
    return arrivals


def _request(settings: Settings, number: int) -> bytes:
    body = {
        "prompt": make_prompt(settings, number),
        "max_tokens": settings.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_token_ids": True,
    }
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: benchmark\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def _take_apart(answer: Pieces, num_tokens: int, arrivals: Arrivals) -> None:
    """Add an answer's tokens, each with the time of the piece that completes its event."""
    ages_s: list[float] = []
    rest = b""
    for read_s, data in answer:
        whole, separator, unfinished = (rest + data).rpartition(b"\n\n")
        rest = unfinished if separator else rest + data
        for found in _TOKEN_IDS.finditer(whole):
            ages_s += [token_age_s(int(token_id), read_s) for token_id in found[1].split(b",")]
        arrivals.num_bytes += len(data)
    if len(ages_s) != num_tokens:
        whole = b"".join(data for _, data in answer)
        raise RuntimeError(f"expected {num_tokens} tokens, got {len(ages_s)}: {whole[:300]!r} ... {whole[-300:]!r}")
    arrivals.num_pieces += len(answer)
    arrivals.first_s.append(ages_s[0])
    arrivals.later_s += ages_s[1:]


class Echo(asyncio.Protocol):
    """Sends back what it gets."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is one by shape only

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class Asker(Echo):
    """Sends a message, and notes when it is back."""

    def ask(self, message: bytes) -> asyncio.Future[float]:
        """When the answer came, by the monotonic clock."""
        self._came = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        return self._came

    def data_received(self, data: bytes) -> None:
        self._came.set_result(time.monotonic())


def run_echo(period_s: float) -> list[float]:
    """Seconds until each of `NUM_STREAMS` messages is back from an echo in the same loop, sent at once every period."""

    async def run() -> list[float]:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        askers = [(await loop.create_connection(Asker, "127.0.0.1", port))[1] for _ in range(NUM_STREAMS)]
        message = bytes(CHUNK_BYTES)
        latencies_s: list[float] = []
        for _ in range(int(FLOOR_S / period_s)):
            await asyncio.sleep(period_s)
            began_s = time.monotonic()
            came_s = await asyncio.gather(*(asker.ask(message) for asker in askers))
            latencies_s += [at_s - began_s for at_s in came_s]
        server.close()
        return latencies_s

    return uvloop.run(run())


# --- the parent -----------------------------------------------------------------------------------


def measure(step_ms: float, num_requests: int, clients: ProcessPoolExecutor) -> dict[str, Any]:
    with simulated_server(step_ms, ROW_MS, num_streams=NUM_STREAMS, tells_time=True) as server:
        warm_up = Settings(server.url, "", NUM_STREAMS, NUM_STREAMS, None, PROMPT_WORDS, MAX_TOKENS, 1, TIMEOUT_S)
        clients.submit(run_streams, warm_up).result()
        time.sleep(REPORT_S)
        before = read_page(server.url)
        arrivals = clients.submit(run_streams, replace(warm_up, requests=num_requests, seed=0)).result()
        time.sleep(REPORT_S)
        gain = Gain(before, read_page(server.url))
    num_tokens = num_requests * MAX_TOKENS
    return {
        "step_ms": step_ms,
        "first_ms": _figures(arrivals.first_s),
        "later_ms": _figures(arrivals.later_s),
        "floor_ms": _figures(clients.submit(run_echo, step_ms / 1e3).result()),
        "server": _server_figures(gain),
        "steps": int(gain.total("steps_total")),
        "duty_percent": round(gain.duty_percent, 1),
        "bytes_per_token": round(arrivals.num_bytes / num_tokens, 1),
        "reads_per_token": round(arrivals.num_pieces / num_tokens, 3),
        "client_cpu_us_per_token": round(1e6 * arrivals.cpu_s / num_tokens, 1),
    }


def _figures(values_s: list[float]) -> dict[str, float]:
    """Milliseconds."""
    spread = spread_ms(values_s)
    assert spread is not None
    return {key: round(spread[key], 3) for key in ("median", "p99", "max")}


def _server_figures(gain: Gain) -> dict[str, float] | None:
    """Milliseconds of the server's own histogram; None, if it has none, or nothing in it."""
    buckets = gain.buckets(DELIVERY_HISTOGRAM)
    if buckets is None or not buckets.num_values:
        return None
    median_s, p99_s = buckets.quantile_s(0.5), buckets.quantile_s(0.99)
    assert median_s is not None
    assert p99_s is not None
    mean_s = gain.total(f"{DELIVERY_HISTOGRAM}_sum") / buckets.num_values
    figures = {"mean": mean_s, "median": median_s, "p99": p99_s}
    return {"num_tokens": buckets.num_values} | {name: round(1e3 * value, 3) for name, value in figures.items()}


def _line(result: dict[str, Any]) -> str:
    parts = [f"step {result['step_ms']:g} ms"]
    for name in ("first", "later", "floor"):
        figures = result[f"{name}_ms"]
        parts.append(f"{name} {figures['median']:.2f} / {figures['p99']:.2f} / {figures['max']:.2f}")
    own = result["server"]
    parts.append("server: no histogram" if own is None else f"server {own['median']:.2f} / {own['p99']:.2f}")
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps-ms", default="25,8,4", help="lengths of a step")
    parser.add_argument("--requests", type=int, default=320)
    parser.add_argument("--json", metavar="FILE", help="write the results here, - for standard output")
    args = parser.parse_args()
    load_average = os.getloadavg()[0]
    shown = sys.stderr if args.json == "-" else sys.stdout
    print("ms: median / p99 / max", file=shown)
    results = []
    # Spawned and then kept: it is warm when it measures.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as clients:
        for step_ms in map(float, args.steps_ms.split(",")):
            results.append(measure(step_ms, args.requests, clients))
            print(_line(results[-1]), file=shown, flush=True)
    if args.json:
        settings = {"requests": args.requests, "row_ms": ROW_MS, "streams": NUM_STREAMS}
        write_json(args.json, report("token_delivery", load_average, {"settings": settings, "results": results}))


if __name__ == "__main__":
    main()
