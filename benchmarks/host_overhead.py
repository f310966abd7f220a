"""What the host costs: the real server, orchestrator, wire, worker and scheduler over a device that only takes time.

    python -m benchmarks.host_overhead [--steps-ms 25,8,4,2] [--requests 320]

A step takes a set time, and each prompt row 0.3 ms more. 16 closed-loop streams of about 128 prompt and 64 output
tokens come from another process (benchmarks.load); with `posts`, a third process sends 100,000 token ids every 500 ms
beside them, which are refused for their length. `ideal_percent` is the time in which a device that always has 16 tokens
to compute would be done, over the time it took; `duty_percent` the device's time in steps over that plus its gaps while
there was work. `server_cpu_ms_per_step` is the server process's processor time.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack

import httpx
import psutil
import uvloop

from benchmarks.metrics_page import REPORT_S, Gain, read_page
from benchmarks.provenance import report, write_json
from benchmarks.simulated.server import simulated_server

ROW_MS = 0.3
NUM_STREAMS, PROMPT_WORDS, MAX_TOKENS = 16, 128, 64
POST_TOKENS, POST_INTERVAL_S = 100_000, 0.5


async def post(url: str) -> None:
    """The role that sends large requests, until it is killed."""
    body = json.dumps({"prompt": [(i * 7919) % 49_000 for i in range(POST_TOKENS)], "max_tokens": 1}).encode()
    async with httpx.AsyncClient(timeout=60) as client:
        while True:
            at_s = time.monotonic()
            answer = await client.post(f"{url}/v1/completions", content=body)
            if answer.status_code != 400:
                raise RuntimeError(f"expected a refusal, got {answer.status_code}")
            await asyncio.sleep(max(0.0, POST_INTERVAL_S - (time.monotonic() - at_s)))


def measure(step_ms: float, posts: bool, num_requests: int) -> dict[str, object]:
    with simulated_server(step_ms, ROW_MS, num_streams=NUM_STREAMS) as server, ExitStack() as stack:
        load = [sys.executable, "-m", "benchmarks.load", "--url", server.url, "--concurrency", str(NUM_STREAMS)]
        load += ["--prompt-words", str(PROMPT_WORDS), "--max-tokens", str(MAX_TOKENS), "--json", "-"]
        subprocess.run([*load, "--requests", "16", "--seed", "1"], check=True, stdout=subprocess.DEVNULL)
        if posts:
            poster = subprocess.Popen([sys.executable, "-m", "benchmarks.host_overhead", "--post-to", server.url])
            stack.callback(poster.wait)
            stack.callback(poster.terminate)
        time.sleep(REPORT_S)
        before, process = read_page(server.url), psutil.Process(server.pid)
        cpu = process.cpu_times()
        run = subprocess.run([*load, "--requests", str(num_requests)], check=True, stdout=subprocess.PIPE)
        cpu_s = sum(process.cpu_times()[:2]) - sum(cpu[:2])
        time.sleep(REPORT_S)
        gain = Gain(before, read_page(server.url))
    figures = json.loads(run.stdout)
    ideal_s = figures["total_generated_tokens"] / NUM_STREAMS * step_ms / 1e3
    ideal_s += figures["total_input_tokens"] * ROW_MS / 1e3
    num_steps = gain.total("steps_total")
    return {
        "step_ms": step_ms,
        "posts": posts,
        "ideal_percent": round(100 * ideal_s / figures["duration_s"], 1),
        "duty_percent": round(gain.duty_percent, 1),
        "output_tokens_per_s": round(figures["output_throughput"], 1),
        "worst_gap_ms": round(figures["worst_gap_ms"], 1),
        "itl_p99_ms": round(figures["itl_ms"]["p99"], 1),
        "mean_gap_us": round(1e6 * gain.total("step_gap_seconds_sum") / gain.total("step_gap_seconds_count"), 1),
        "wasted_rows_percent": round(gain.wasted_rows_percent, 2),
        "steps": int(num_steps),
        "server_cpu_ms_per_step": round(1e3 * cpu_s / num_steps, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps-ms", default="25,8,4,2")
    parser.add_argument("--requests", type=int, default=320)
    parser.add_argument("--posts", choices=("no", "yes", "both"), default="both")
    parser.add_argument("--post-to", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="write the results here, - for standard output")
    args = parser.parse_args()
    if args.post_to:
        uvloop.run(post(args.post_to))
        return
    load_average = os.getloadavg()[0]
    results = []
    for step_ms in map(float, args.steps_ms.split(",")):
        for posts in {"no": [False], "yes": [True], "both": [False, True]}[args.posts]:
            results.append(measure(step_ms, posts, args.requests))
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    if args.json:
        settings = {"requests": args.requests, "row_ms": ROW_MS, "streams": NUM_STREAMS}
        write_json(args.json, report("host_overhead", load_average, {"settings": settings, "results": results}))


if __name__ == "__main__":
    main()
