"""The clients of process_split.py: readers of streams, and the sender of big prompts."""

import asyncio
import json
import signal
import time
from pathlib import Path

import aiohttp
import numpy as np

NUM_STREAMS = 16
TOKENS_PER_REQUEST = 256
BIG_PROMPT_TOKENS = 100_000
BIG_PROMPT_INTERVAL_S = 0.5


async def run_streams(directory: Path, port: int) -> None:
    """16 closed-loop SSE readers; saves (step, arrival) of every chunk when told to stop."""
    arrivals: list[tuple[int, int]] = []
    body = {"prompt": "fake " * 100, "max_tokens": TOKENS_PER_REQUEST, "stream": True}
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def reader(session: aiohttp.ClientSession) -> None:
        while not stop.is_set():
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if line.startswith(b'data: {"id":"'):
                        if not arrivals:
                            print("ready", flush=True)
                        arrivals.append((int(line[13 : line.index(b'"', 13)]), time.monotonic_ns()))

    no_timeout = aiohttp.ClientTimeout(total=None)  # pauses of the whole set-up count for nothing
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=no_timeout) as session:
        readers = [asyncio.create_task(reader(session)) for _ in range(NUM_STREAMS)]
        await asyncio.wait([*readers, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*readers)
    np.save(directory / "arrivals.npy", np.array(arrivals))


async def run_poster(directory: Path, port: int) -> None:
    """One POST of 100,000 token ids every 500 ms; saves (sent, seconds until answered)."""
    ids = [(i * 7919) % 50_000 for i in range(BIG_PROMPT_TOKENS)]
    body = json.dumps({"prompt": ids, "max_tokens": 1}).encode()
    took: list[tuple[int, float]] = []
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        at = time.monotonic()
        while not stop.is_set():
            sent = time.monotonic_ns()
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", data=body) as response:
                answer = await response.json(content_type=None)
                if answer["prompt_tokens"] != BIG_PROMPT_TOKENS:
                    raise RuntimeError(f"expected {BIG_PROMPT_TOKENS} prompt tokens, the server counted {answer}")
            if not took:
                print("ready", flush=True)
            took.append((sent, (time.monotonic_ns() - sent) / 1e9))
            at = max(at + BIG_PROMPT_INTERVAL_S, time.monotonic())  # after a pause, no catching up
            await asyncio.sleep(at - time.monotonic())
    np.save(directory / "posts.npy", np.array(took))
