"""Load on an OpenAI `/v1/completions` server, in the terms of `vllm bench serve`.

    python -m benchmarks.load --concurrency 16 --requests 64                     closed loop
    python -m benchmarks.load --rate 4 --goodput ttft:500 tpot:50                open loop, Poisson arrivals

Closed loop keeps `--concurrency` requests in flight. Open loop sends by the clock whatever the server does, and
counts TTFT from the moment a request was due, so that a slow server cannot hide behind a client that waits for it.
Every request streams, is greedy and ignores the end token. Tokens are counted by the server's usage, where it sends
one, else one a chunk that carries text. TTFT, TPOT and ITL are as in docs; ITL is between chunks that carry text.
Exit status: 0, or 1 if any request failed.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, field

import aiohttp
import numpy as np

from benchmarks.provenance import report, write_json

WORDS = """
river stone window garden letter market engine winter summer doctor paper music bridge forest island planet
copper silver kitchen shadow lantern harbour mountain valley teacher station journey silence answer question
morning evening village thunder orange velvet cotton pocket mirror ladder basket candle meadow rabbit
""".split()  # noqa: SIM905


class LoadError(Exception):
    """The load cannot start; the text says why."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to send, and how fast."""

    url: str
    model: str
    requests: int
    concurrency: int | None
    """Most requests in flight; None, in open loop only: no limit."""
    rate: float | None
    """Mean arrivals a second, Poisson; None: closed loop."""
    prompt_words: int
    max_tokens: int
    seed: int = 0
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """Targets in ms that a good request meets; None: any value will do."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished request, times in seconds."""

    ttft_s: float
    e2e_s: float
    """From when the request was due to its last token."""
    output_tokens: int
    input_tokens: int | None
    """None if the server sent no usage."""
    gaps_s: list[float] = field(default_factory=list)
    """Between chunks that carry text."""

    @property
    def tpot_s(self) -> float | None:
        """None where there is no second token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Failure:
    """One request that did not end well."""

    text: str


# --- sending --------------------------------------------------------------------------------------


def make_prompt(settings: Settings, number: int) -> str:
    """Words of request `number`: the same in every run of equal seed, different from each other's."""
    rng = random.Random(f"{settings.seed}/{number}")
    return " ".join(rng.choice(WORDS) for _ in range(settings.prompt_words))


async def complete(session: aiohttp.ClientSession, settings: Settings, prompt: str, due: float) -> Outcome | Failure:
    """Stream one completion; `due` is when it ought to have been sent, by `time.perf_counter`."""
    body = {
        "model": settings.model,
        "prompt": prompt,
        "max_tokens": settings.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "cache_prompt": False,
    }
    arrivals: list[float] = []
    usage: dict = {}
    done = False
    try:
        async with session.post(f"{settings.url}/v1/completions", json=body) as response:
            if response.status != 200:
                return Failure(f"status {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                now = time.perf_counter()
                if not line.startswith(b"data:"):
                    continue
                event = line[5:].strip()
                if event == b"[DONE]":
                    done = True
                    break
                chunk = json.loads(event)
                if "error" in chunk:
                    return Failure(f"error in the stream: {json.dumps(chunk['error'])[:200]}")
                usage = chunk.get("usage") or usage
                if chunk.get("choices") and chunk["choices"][0].get("text"):
                    arrivals.append(now)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return Failure(f"{type(error).__name__}: {error}")
    if not done:
        return Failure(f"the stream ended without [DONE], after {len(arrivals)} chunks of text")
    if not arrivals:
        return Failure("the stream had no text")
    return Outcome(
        ttft_s=arrivals[0] - due,
        e2e_s=arrivals[-1] - due,
        output_tokens=usage.get("completion_tokens") or len(arrivals),
        input_tokens=usage.get("prompt_tokens"),
        gaps_s=[later - earlier for earlier, later in itertools.pairwise(arrivals)],
    )


async def apply_load(settings: Settings) -> tuple[list[Outcome | Failure], float]:
    """All requests, after one that is not counted; (outcomes, seconds from the first one due to the last one over).

    Raises: LoadError, if that first one fails.
    """
    timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
    # A connection for each request: some servers close one after a stream, which a client finds out too late.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        first = await complete(session, settings, "warm up", time.perf_counter())
        if isinstance(first, Failure):
            raise LoadError(f"expected a stream from {settings.url}/v1/completions, got {first.text}")
        slots = asyncio.Semaphore(settings.concurrency or settings.requests)
        prompts = [make_prompt(settings, number) for number in range(settings.requests)]
        start = time.perf_counter()

        async def closed(prompt: str) -> Outcome | Failure:
            async with slots:
                return await complete(session, settings, prompt, time.perf_counter())

        async def open_(prompt: str, due: float) -> Outcome | Failure:
            await asyncio.sleep(due - time.perf_counter())
            async with slots:
                return await complete(session, settings, prompt, due)

        if settings.rate is None:
            waiting = [closed(prompt) for prompt in prompts]
        else:
            rng = random.Random(settings.seed)
            due, waiting = start, []
            for prompt in prompts:
                waiting.append(open_(prompt, due))
                due += rng.expovariate(settings.rate)
        outcomes = await asyncio.gather(*waiting)
        return outcomes, time.perf_counter() - start


async def first_model(url: str) -> str:
    """The first model that the server lists. Raises: LoadError."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
            return (await response.json())["data"][0]["id"]
    except (aiohttp.ClientError, LookupError, TypeError, ValueError) as error:
        raise LoadError(f"expected a list of models from {url}/v1/models, got {error!r}; give --model") from None


# --- reporting ------------------------------------------------------------------------------------


def spread_ms(values_s: list[float]) -> dict[str, float] | None:
    if not values_s:
        return None
    values = np.array(values_s) * 1e3
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
        "max": float(values.max()),
    }


def is_good(outcome: Outcome, goodput: Goodput) -> bool:
    if goodput.ttft_ms is not None and outcome.ttft_s * 1e3 > goodput.ttft_ms:
        return False
    return goodput.tpot_ms is None or (outcome.tpot_s or 0.0) * 1e3 <= goodput.tpot_ms


def summarise(outcomes: list[Outcome | Failure], duration_s: float, goodput: Goodput | None) -> dict:
    """The report; what cannot be known is None."""
    finished = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
    inputs = [outcome.input_tokens for outcome in finished]
    input_tokens = None if None in inputs else sum(count for count in inputs if count is not None)
    output_tokens = sum(outcome.output_tokens for outcome in finished)
    gaps_s = [gap for outcome in finished for gap in outcome.gaps_s]
    return {
        "successful_requests": len(finished),
        "failed_requests": len(outcomes) - len(finished),
        "failures": [outcome.text for outcome in outcomes if isinstance(outcome, Failure)][:3],
        "duration_s": duration_s,
        "total_input_tokens": input_tokens,
        "total_generated_tokens": output_tokens,
        "request_throughput": len(finished) / duration_s,
        "request_goodput": sum(is_good(o, goodput) for o in finished) / duration_s if goodput else None,
        "output_throughput": output_tokens / duration_s,
        "total_throughput": None if input_tokens is None else (input_tokens + output_tokens) / duration_s,
        "ttft_ms": spread_ms([outcome.ttft_s for outcome in finished]),
        "tpot_ms": spread_ms([tpot for outcome in finished if (tpot := outcome.tpot_s) is not None]),
        "itl_ms": spread_ms(gaps_s),
        "worst_gap_ms": max(gaps_s) * 1e3 if gaps_s else None,
    }


def table(report: dict) -> str:
    rows: list[tuple[str, float | None]] = [
        ("Successful requests", report["successful_requests"]),
        ("Failed requests", report["failed_requests"]),
        ("Benchmark duration (s)", report["duration_s"]),
        ("Total input tokens", report["total_input_tokens"]),
        ("Total generated tokens", report["total_generated_tokens"]),
        ("Request throughput (req/s)", report["request_throughput"]),
        ("Output token throughput (tok/s)", report["output_throughput"]),
        ("Total token throughput (tok/s)", report["total_throughput"]),
    ]
    if report["request_goodput"] is not None:
        rows.append(("Request goodput (req/s)", report["request_goodput"]))
    for term in ("ttft", "tpot", "itl"):
        spread = report[f"{term}_ms"] or {}
        rows += [
            (f"{word} {term.upper()} (ms)", spread.get(key))
            for word, key in (("Mean", "mean"), ("Median", "median"), ("P99", "p99"))
        ]
    rows.append(("Worst gap (ms)", report["worst_gap_ms"]))

    def shown(value: float | None) -> str:
        if value is None:
            return "unknown"
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [f"{name + ':':<36}{shown(value):>12}" for name, value in rows]
    return "\n".join([*lines, *(f"failed: {text}" for text in report["failures"])])


# --- command line ---------------------------------------------------------------------------------


def positive(kind: type):
    def parse(text: str):
        value = kind(text)
        if not value > 0:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"  # argparse names the type in its message
    return parse


def parse_goodput(words: list[str]) -> Goodput:
    """Raises: ValueError."""
    targets: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        if name not in ("ttft", "tpot"):
            raise ValueError(f"expected ttft:MS or tpot:MS, got {word!r}")
        try:
            targets[f"{name}_ms"] = float(value)
        except ValueError:
            raise ValueError(f"expected {name}:MS with a number of milliseconds, got {word!r}") from None
    return Goodput(**targets)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, without /v1")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--requests", type=positive(int), default=64)
    parser.add_argument("--concurrency", type=positive(int), help="default: 16, and no limit with --rate")
    parser.add_argument("--rate", type=positive(float), help="mean requests a second (open loop)")
    parser.add_argument("--prompt-words", type=positive(int), default=100)
    parser.add_argument("--max-tokens", type=positive(int), default=64)
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    parser.add_argument("--timeout", type=positive(float), default=600.0, help="seconds until a request has failed")
    parser.add_argument("--goodput", nargs="+", metavar="TERM:MS", help="targets, as ttft:500 tpot:50")
    parser.add_argument("--json", metavar="FILE", help="write the report here too, - for standard output instead")
    args = parser.parse_args()
    load_average = os.getloadavg()[0]
    try:
        goodput = parse_goodput(args.goodput) if args.goodput else None
    except ValueError as error:
        parser.error(str(error))
    url = args.url.rstrip("/")
    concurrency = args.concurrency or (None if args.rate else 16)

    async def run() -> tuple[Settings, list[Outcome | Failure], float]:
        model = args.model or await first_model(url)
        settings = Settings(
            url=url,
            model=model,
            requests=args.requests,
            concurrency=concurrency,
            rate=args.rate,
            prompt_words=args.prompt_words,
            max_tokens=args.max_tokens,
            seed=args.seed,
            timeout_s=args.timeout,
        )
        return settings, *await apply_load(settings)

    try:
        settings, outcomes, duration_s = asyncio.run(run())
    except LoadError as error:
        print(f"load: {error}", file=sys.stderr)
        return 1
    summary = summarise(outcomes, duration_s, goodput)
    if args.json != "-":
        print(table(summary))
    if args.json:
        targets = asdict(goodput) if goodput else None
        figures = {"settings": asdict(settings), "goodput": targets, **summary}
        write_json(args.json, report("load", load_average, figures))
    return 1 if summary["failed_requests"] else 0


if __name__ == "__main__":
    sys.exit(main())
