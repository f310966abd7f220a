"""What long prompts do to streams that run: gaps between tokens by policy, beside the stall bound that was told.

    python -m benchmarks.interference [--streams 8] [--prompts 4] [--prompt-tokens 4000] [--itl-target MS]

For each policy an engine is started and computes one long prompt alone, then as many at once as will come later. Then
`--streams` sequences decode; after two seconds `--prompts` long prompts arrive at once. Gaps count from then until the
last long prompt has its first token.
"""

import argparse
import asyncio
import itertools
import os
import random
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import median
from typing import Any, get_args

from benchmarks.provenance import report, write_json
from twinjet import AsyncLLM
from twinjet.core.config import PolicyName
from twinjet.options import EngineOptions

BEFORE_S = 2.0
"""Streams run alone for so long."""

STREAM_TOKENS = 700
"""Tokens of a stream at most: with `decode-first` the long prompts take until some of them end."""


@dataclass
class Stream:
    """When each token of a sequence came, in seconds of the monotonic clock."""

    began_s: float
    tokens_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.began_s


async def run(llm: AsyncLLM, prompt: list[int], max_tokens: int, stream: Stream) -> None:
    async with aclosing(llm.stream(prompt, max_tokens=max_tokens, ignore_eos=True)) as deltas:
        async for _ in deltas:
            stream.tokens_s.append(time.monotonic())


async def measure(
    model: str, policy: PolicyName, itl_target_ms: float | None, num_streams: int, num_prompts: int, prompt_tokens: int
) -> dict[str, Any]:
    """Figures of one policy, in milliseconds and seconds."""
    rng = random.Random(0)
    options = EngineOptions(paced=True, policy=policy, itl_target_ms=itl_target_ms, max_streams=16)
    async with AsyncLLM(model, options=options) as llm:
        info = llm.assembly.orchestrator.info
        forecast = info.forecast

        def prompt(length: int) -> list[int]:
            return [rng.randrange(100, info.vocab_size) for _ in range(length)]

        alone = Stream(time.monotonic())
        await run(llm, prompt(prompt_tokens), 1, alone)
        quiet = [Stream(time.monotonic()) for _ in range(num_prompts)]
        await asyncio.gather(*(run(llm, prompt(prompt_tokens), 1, long) for long in quiet))
        streams = [Stream(time.monotonic()) for _ in range(num_streams)]
        room = min(STREAM_TOKENS, info.context - 200)
        decoding = [asyncio.create_task(run(llm, prompt(100), room, stream)) for stream in streams]
        await asyncio.sleep(BEFORE_S)
        began_s = time.monotonic()
        longs = [Stream(began_s) for _ in range(num_prompts)]
        await asyncio.gather(*(run(llm, prompt(prompt_tokens), 1, long) for long in longs))
        ended_s = time.monotonic()
        for task in decoding:
            task.cancel()
        await asyncio.gather(*decoding, return_exceptions=True)
        stats = await latest_stats(llm)
    pairs = [pair for stream in streams for pair in itertools.pairwise(stream.tokens_s)]
    gaps = sorted(1e3 * (b - a) for a, b in pairs if b > began_s and a < ended_s)
    # A stream that got nothing to the end waited at least that long.
    gaps += [1e3 * (ended_s - stream.tokens_s[-1]) for stream in streams if len(stream.tokens_s) < room]
    gaps.sort()
    return {
        "policy": policy,
        "itl_target_ms": None if forecast is None else round(forecast.itl_target_ms, 1),
        "stall_bound_ms": None
        if forecast is None or forecast.stall_bound_ms is None
        else round(forecast.stall_bound_ms, 1),
        "gap_ms": {
            "median": round(median(gaps), 1),
            "p99": round(gaps[int(0.99 * (len(gaps) - 1))], 1),
            "p99.9": round(gaps[int(0.999 * (len(gaps) - 1))], 1),
            "max": round(gaps[-1], 1),
        },
        "num_gaps": len(gaps),
        "violations": stats[0],
        "steps": stats[1],
        "predicted_over_actual": round(stats[2], 3),
        "long_ttft_s": [round(long.ttft_s, 2) for long in longs],
        "long_ttft_alone_s": round(alone.ttft_s, 2),
        "long_ttft_without_streams_s": [round(long.ttft_s, 2) for long in quiet],
        "itl_over_time": [
            [round(b - began_s, 3), round(1e3 * (b - a), 1)]
            for a, b in itertools.pairwise(streams[0].tokens_s)
            if b > began_s - BEFORE_S / 2
        ],
    }


def write_plot(results: list[dict[str, Any]], path: str) -> None:
    """One panel for each policy: each gap of the first stream, over time since the long prompts came."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 2.2 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, result in zip(panels, results, strict=True):
        times, gaps = zip(*result["itl_over_time"], strict=True)
        axes.semilogy(times, gaps, ".", markersize=3)
        for ttft_s in result["long_ttft_s"]:
            axes.axvline(ttft_s, color="tab:green", linewidth=0.8)
        if result["stall_bound_ms"] is not None:
            axes.axhline(result["stall_bound_ms"], color="tab:red", linewidth=0.8)
        axes.set_title(result["policy"], loc="left", fontsize="medium")
        axes.set_ylabel("ITL, ms")
    panels[-1].set_xlabel("seconds since the long prompts came; green: their first tokens, red: the stall bound")
    figure.savefig(path, dpi=110)


async def latest_stats(llm: AsyncLLM) -> tuple[int, int, float]:
    """(stall bound violations, steps, predicted by actual time of the steps) of the engine."""
    await asyncio.sleep(1.0)
    stats = llm.assembly.orchestrator.stats().engines[0].stats
    if stats is None:
        raise RuntimeError("the engine has not reported")
    return stats.stall_bound_violations_total, stats.steps_total, stats.predicted_s_total / stats.busy_s_total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--itl-target", type=float)
    parser.add_argument("--policies", default=",".join(get_args(PolicyName)))
    parser.add_argument("--json", metavar="FILE", help="write the results here, - for standard output")
    parser.add_argument("--plot", metavar="FILE", help="draw the gaps over time, as .svg or .png")
    args = parser.parse_args()
    load_average = os.getloadavg()[0]
    results = []
    for policy in args.policies.split(","):
        figures = asyncio.run(
            measure(args.model, policy, args.itl_target, args.streams, args.prompts, args.prompt_tokens)
        )
        results.append(figures)
        print({name: value for name, value in figures.items() if name != "itl_over_time"}, flush=True)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in ("json", "plot")}
        write_json(args.json, report("interference", load_average, {"settings": settings, "results": results}))
    if args.plot:
        write_plot(results, args.plot)


if __name__ == "__main__":
    main()
