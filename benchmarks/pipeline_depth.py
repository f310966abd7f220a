"""How many steps should be planned ahead: the default model behind `twinjet serve`, by `--pipeline-depth`.

    python -m benchmarks.pipeline_depth [--depths 1,2,3,4,8,16] [--rounds 3] [--requests 96]

Each round starts a server for each depth and puts three closed loops of streams on it, one after the other:

- `length`: benchmarks/load.py in a process of its own. All requests have the same length, which plans foresee.
- `stop token`: the model's own sampled text up to one of a few common tokens. The engine finds it when it reads the
  step; what is planned beyond it by then is computed for nothing.
- `stop string`: the same with strings, of which only the server knows; more steps go by until the engine hears of it.

Prompts and seeds are the same for all depths. The device's figures are the growth of /metrics over a load, those of
`length` with the one request that load.py sends first and does not count. Gaps are known by buckets only, in which they
are taken to lie evenly. Figures are medians over the rounds.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aiohttp

from benchmarks.load import Settings, make_prompt
from benchmarks.metrics_page import REPORT_S, Gain, read_page
from benchmarks.provenance import others_cpu_s, report, write_json
from benchmarks.serving import Contender, running
from twinjet.options import DEFAULT_MODEL

STOPS = (" moon", " window")
"""One token each: words that come now and then in what the model adds to the prompts, lists of words."""
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')


def model_server(depth: int, num_streams: int, num_threads: int) -> Contender:
    """`twinjet serve` with this pipeline depth."""
    command = (
        sys.executable, "-m", "twinjet", "serve", DEFAULT_MODEL, "--port", "{port}", "--threads", str(num_threads),
        "--max-streams", str(num_streams), "--pipeline-depth", str(depth),
    )  # fmt: skip
    return Contender(f"depth {depth}", command)


def watch(url: str, load: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What `load` reports, and what /metrics gained meanwhile."""
    time.sleep(REPORT_S)
    before = read_page(url)
    figures = load()
    time.sleep(REPORT_S)
    gain = Gain(before, read_page(url))
    gaps = gain.buckets("step_gap_seconds")
    gap_s = gaps and gaps.quantile_s(0.999)
    if gap_s is None:
        raise RuntimeError("expected gaps between the steps of a load on /metrics, found none")
    return {
        **figures,
        "duty, %": gain.duty_percent,
        "device gap p99.9, ms": 1e3 * gap_s,
        "wasted rows, %": gain.wasted_rows_percent,
        "wasted rows per request": gain.total("wasted_rows_total") / figures["requests"],
    }


def run_to_length(settings: Settings) -> dict[str, float]:
    """benchmarks/load.py with these settings."""
    command = [
        sys.executable, "-m", "benchmarks.load", "--url", settings.url, "--concurrency", str(settings.concurrency),
        "--requests", str(settings.requests), "--prompt-words", str(settings.prompt_words),
        "--max-tokens", str(settings.max_tokens), "--json", "-",
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    run = json.loads(done.stdout)
    return {
        "requests": run["successful_requests"],
        "output tok/s": run["output_throughput"],
        "TTFT p50, ms": run["ttft_ms"]["median"],
        "ITL p50, ms": run["itl_ms"]["median"],
        "ITL p99, ms": run["itl_ms"]["p99"],
        "worst gap, ms": run["worst_gap_ms"],
    }


def run_to_stop(settings: Settings, stop: dict[str, Any]) -> dict[str, float]:
    """Sampled requests that end at `stop`, fields of a request's body, or after `settings.max_tokens`."""

    async def run() -> tuple[list[int], float]:
        slots = asyncio.Semaphore(settings.concurrency or settings.requests)
        timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:

            async def complete(number: int) -> int:
                body = {
                    "prompt": make_prompt(settings, number),
                    "max_tokens": settings.max_tokens,
                    "temperature": 1.0,
                    "seed": number,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "cache_prompt": False,
                    **stop,
                }
                async with slots, session.post(f"{settings.url}/v1/completions", json=body) as answer:
                    text = await answer.read()
                if (found := _COMPLETION_TOKENS.search(text)) is None:
                    raise RuntimeError(f"expected a stream with its usage, got {answer.status}: {text[-300:]!r}")
                return int(found[1])

            began_s = time.monotonic()
            counts = await asyncio.gather(*map(complete, range(settings.requests)))
            return counts, time.monotonic() - began_s

    counts, took_s = asyncio.run(run())
    return {
        "requests": len(counts),
        "output tok/s": sum(counts) / took_s,
        "tokens per request": statistics.mean(counts),
        "ended early, %": 100 * sum(count < settings.max_tokens for count in counts) / len(counts),
    }


def stop_token_ids(url: str) -> list[int]:
    """Those of `STOPS`. Raises RuntimeError, if one is not a single token."""
    found = []
    for text in STOPS:
        body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
        request = urllib.request.Request(f"{url}/tokenize", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            ids = json.load(answer)["tokens"]
        if len(ids) != 1:
            raise RuntimeError(f"expected {text!r} to be one token, got {ids}")
        found += ids
    return found


def measure(depth: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Load -> its figures; `machine` has the cores that others took meanwhile."""
    began_s, others_s = time.monotonic(), others_cpu_s()
    with running(model_server(depth, args.streams, args.threads)) as url:
        long = Settings(url, "", args.requests, args.streams, None, args.prompt_words, args.max_tokens)
        short = replace(long, requests=args.stop_requests, seed=1)
        stops = {"stop token": {"stop_token_ids": stop_token_ids(url)}, "stop string": {"stop": list(STOPS)}}
        runs = {"length": watch(url, lambda: run_to_length(long))}
        for name, stop in stops.items():
            runs[name] = watch(url, lambda stop=stop: run_to_stop(short, stop))
    # Only now: processor time of the server counts as ours once it has ended.
    runs["machine"] = {"others' cores": (others_cpu_s() - others_s) / (time.monotonic() - began_s)}
    return runs


def medians(runs: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        load: {column: round(statistics.median(run[load][column] for run in runs), 3) for column in figures}
        for load, figures in runs[0].items()
    }


def tables(figures: dict[int, dict[str, dict[str, float]]]) -> str:
    """A Markdown table for each load, with a row for each depth."""
    lines: list[str] = []
    for load, columns in next(iter(figures.values())).items():
        lines += ["", f"| {load}: depth | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
        lines += [
            f"| {depth} | " + " | ".join(f"{value:.2f}" for value in loads[load].values()) + " |"
            for depth, loads in figures.items()
        ]
    return "\n".join(lines[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="1,2,3,4,8,16", help="of --pipeline-depth")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=96, help="of the load that ends by length")
    parser.add_argument("--stop-requests", type=int, default=48, help="of each load that ends by a stop")
    parser.add_argument("--prompt-words", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write the results here, - for standard output")
    args = parser.parse_args()
    load_average = os.getloadavg()[0]
    depths = [int(depth) for depth in args.depths.split(",")]
    runs: dict[int, list[dict[str, dict[str, float]]]] = {depth: [] for depth in depths}
    for index in range(args.rounds):
        # Whoever comes first may find a cooler processor.
        for depth in depths if index % 2 == 0 else reversed(depths):
            runs[depth].append(measure(depth, args))
            print(f"round {index + 1}: depth {depth}: {medians(runs[depth][-1:])}", file=sys.stderr, flush=True)
    figures = {depth: medians(measured) for depth, measured in runs.items()}
    print(tables(figures), file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        results = {"settings": settings, "stops": STOPS, "medians": figures, "runs": runs}
        write_json(args.json, report("pipeline_depth", load_average, results))


if __name__ == "__main__":
    main()
