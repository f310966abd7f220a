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
import signal
import subprocess
import sys
import time

import httpx
import psutil

from benchmarks.provenance import report, write_json

ROW_MS = 0.3
NUM_STREAMS, PROMPT_WORDS, MAX_TOKENS = 16, 128, 64
POST_TOKENS, POST_INTERVAL_S = 100_000, 0.5


async def serve(port: int) -> None:
    """The server role, until SIGTERM."""
    from twinjet.assemble import engine_config, open_model
    from twinjet.options import EngineOptions, default_home
    from twinjet.orchestrator.orchestrator import Orchestrator
    from twinjet.server.app import ServedModel, create_app, run_server
    from twinjet.server.serving import open_socket

    home = default_home(os.environ)
    model = open_model("smollm2", home)
    options = EngineOptions(paced=True, max_streams=NUM_STREAMS)
    config = engine_config(model, options, home, memory_bytes=8 << 30, physical_cores=1)
    orchestrator = Orchestrator(config, factory="benchmarks.simulated:load")
    await orchestrator.start()
    app = create_app(ServedModel(model.name, model.tokenizer, model.template, orchestrator, int(time.time())))
    try:
        await run_server(app, listener=open_socket("127.0.0.1", port))
    finally:
        await orchestrator.stop()


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


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(url + "/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def measure(step_ms: float, posts: bool, num_requests: int, port: int) -> dict[str, object]:
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "SIMULATED_STEP_MS": str(step_ms), "SIMULATED_ROW_MS": str(ROW_MS)}
    this = [sys.executable, "-m", "benchmarks.host_overhead", "--port", str(port)]
    server = subprocess.Popen([*this, "--role", "serve"], env=environment)
    poster = None
    try:
        while not _is_ready(url):
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode}")
            time.sleep(0.1)
        load = [sys.executable, "-m", "benchmarks.load", "--url", url, "--concurrency", str(NUM_STREAMS)]
        load += ["--prompt-words", str(PROMPT_WORDS), "--max-tokens", str(MAX_TOKENS), "--json", "-"]
        subprocess.run([*load, "--requests", "16", "--seed", "1"], check=True, stdout=subprocess.DEVNULL)
        if posts:
            poster = subprocess.Popen([*this, "--role", "post"])
        time.sleep(1.0)
        before, process = metrics(url), psutil.Process(server.pid)
        cpu = process.cpu_times()
        run = subprocess.run([*load, "--requests", str(num_requests)], check=True, stdout=subprocess.PIPE)
        cpu_s = sum(process.cpu_times()[:2]) - sum(cpu[:2])
        time.sleep(1.0)  # the last report of the engine
        after = metrics(url)
    finally:
        for child in (poster, server):
            if child is not None:
                child.send_signal(signal.SIGTERM)
                child.wait()
    figures = json.loads(run.stdout)

    def grown(name: str) -> float:
        name = f'twinjet_{name}{{engine="0"}}'
        return after[name] - before[name]

    busy_s, gap_s = grown("busy_seconds_total"), grown("step_gap_seconds_sum")
    ideal_s = figures["total_generated_tokens"] / NUM_STREAMS * step_ms / 1e3
    ideal_s += figures["total_input_tokens"] * ROW_MS / 1e3
    return {
        "step_ms": step_ms,
        "posts": posts,
        "ideal_percent": round(100 * ideal_s / figures["duration_s"], 1),
        "duty_percent": round(100 * busy_s / (busy_s + gap_s), 1),
        "output_tokens_per_s": round(figures["output_throughput"], 1),
        "worst_gap_ms": round(figures["worst_gap_ms"], 1),
        "itl_p99_ms": round(figures["itl_ms"]["p99"], 1),
        "mean_gap_us": round(1e6 * gap_s / grown("step_gap_seconds_count"), 1),
        "wasted_rows_percent": round(100 * grown("wasted_rows_total") / grown("rows_total"), 2),
        "steps": int(grown("steps_total")),
        "server_cpu_ms_per_step": round(1e3 * cpu_s / grown("steps_total"), 2),
    }


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps-ms", default="25,8,4,2")
    parser.add_argument("--requests", type=int, default=320)
    parser.add_argument("--posts", choices=("no", "yes", "both"), default="both")
    parser.add_argument("--port", type=int, default=18231)
    parser.add_argument("--role", choices=("serve", "post"), help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="write the results here, - for standard output")
    args = parser.parse_args()
    if args.role:
        with asyncio.Runner(loop_factory=_uvloop()) as runner:
            runner.run(serve(args.port) if args.role == "serve" else post(f"http://127.0.0.1:{args.port}"))
        return
    load_average = os.getloadavg()[0]
    results = []
    for step_ms in map(float, args.steps_ms.split(",")):
        for posts in {"no": [False], "yes": [True], "both": [False, True]}[args.posts]:
            results.append(measure(step_ms, posts, args.requests, args.port))
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    if args.json:
        settings = {"requests": args.requests, "row_ms": ROW_MS, "streams": NUM_STREAMS}
        write_json(args.json, report("host_overhead", load_average, {"settings": settings, "results": results}))


def _uvloop():
    import uvloop

    return uvloop.new_event_loop


if __name__ == "__main__":
    main()
