"""What is left over HTTP of the tokens per second that the kernels alone would give, with no figure that we report.

    python -m benchmarks.http_share [--rounds 3] [--json FILE]

By turns: `twinjet serve` under benchmarks/load.py in a process of its own, whose clock counts; and the same number of
sequences of the same lengths through scheduler and engine in a process that does nothing else, of which the time in
kernels counts. Both have 16 streams; on two cores the server, the wire and the client take theirs from the kernels.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from functools import partial

import psutil

from benchmarks.provenance import report, write_json
from benchmarks.serving import Contender, measure
from twinjet.assemble import engine_config, open_model
from twinjet.bench.rig import Rig
from twinjet.core.types import SamplingParams
from twinjet.options import DEFAULT_MODEL, EngineOptions, default_home
from twinjet.scheduler.sequence import SequenceSpec
from twinjet.wire.launch import DEFAULT_FACTORY
from twinjet.worker.process import SWITCH_INTERVAL_S, limit_threads
from twinjet.worker.start import load_engine

MEMORY_BYTES = 8 << 30
"""Of which the KV pool takes its share."""

SMALLEST_ID = 100
"""Ids under it may be special tokens."""


def kernels_alone(requests: int, prompt_tokens: int, new_tokens: int, streams: int) -> dict[str, float]:
    """Tokens generated a second, by the kernels' time and by the wall clock; JAX must not have been loaded yet."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    home = default_home(os.environ)
    options = EngineOptions(paced=True, max_streams=streams, prefix_cache=False)
    cores = psutil.cpu_count(logical=False) or 1
    config = engine_config(
        open_model(DEFAULT_MODEL, home), options, home, memory_bytes=MEMORY_BYTES, physical_cores=cores
    )
    limit_threads(config)
    rig = Rig(config, partial(load_engine, DEFAULT_FACTORY, config))
    rng = random.Random(0)
    try:
        vocab_size = rig.start(lambda stage, done, total: None).vocab_size

        def spec(number: int) -> SequenceSpec:
            token_ids = tuple(rng.randrange(SMALLEST_ID, vocab_size) for _ in range(prompt_tokens))
            return SequenceSpec(number, token_ids, new_tokens, SamplingParams(temperature=0.0))

        rig.run([spec(number) for number in range(streams)])
        timing = rig.run([spec(streams + number) for number in range(requests)])
    finally:
        rig.close()
    phases = (timing.prefill, timing.decode)
    kernel_s = sum(phase.kernel_s or 0.0 for phase in phases)
    if not kernel_s:
        raise RuntimeError("expected a backend that tells of its kernels' time, found none")
    tokens = requests * new_tokens
    return {"kernels": tokens / kernel_s, "wall": tokens / sum(phase.wall_s for phase in phases)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--prompt-words", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", type=int, metavar="PROMPT_TOKENS", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="write the results here, - for standard output")
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(kernels_alone(args.requests, args.alone, args.max_tokens, args.streams)))
        return
    load_average = os.getloadavg()[0]
    sizes = ["--requests", str(args.requests), "--max-tokens", str(args.max_tokens)]
    load = [*sizes, "--concurrency", str(args.streams), "--prompt-words", str(args.prompt_words)]
    serve = (sys.executable, "-m", "twinjet", "serve", DEFAULT_MODEL, "--port", "{port}")
    server = Contender("twinjet", (*serve, "--max-streams", str(args.streams)))
    rounds = []
    for _ in range(args.rounds):
        http = measure(server, load)
        prompt_tokens = round(http["total_input_tokens"] / http["successful_requests"])
        alone = [sys.executable, "-m", "benchmarks.http_share", *sizes, "--streams", str(args.streams)]
        done = subprocess.run([*alone, "--alone", str(prompt_tokens)], stdout=subprocess.PIPE, check=True)
        rounds.append({"http": http["output_throughput"], "prompt_tokens": prompt_tokens, **json.loads(done.stdout)})
        rounds[-1] |= {"http_of_kernels_percent": 100 * rounds[-1]["http"] / rounds[-1]["kernels"]}
        print({name: round(value, 1) for name, value in rounds[-1].items()}, file=sys.stderr, flush=True)
    share = statistics.median(each["http_of_kernels_percent"] for each in rounds)
    print(f"over HTTP {share:.1f}% of what the kernels alone give", file=sys.stderr)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in ("json", "alone")}
        results = {"settings": settings, "median_http_of_kernels_percent": round(share, 1), "rounds": rounds}
        write_json(args.json, report("http_share", load_average, results))


if __name__ == "__main__":
    main()
