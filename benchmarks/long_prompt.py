"""Peak memory of an engine process while it computes prompts of growing length, and their TTFT.

What a prompt may cost beyond the engine's memory after warm-up: the pages of the KV pool that it is the first to
touch, and buffers of one chunk. Nothing may grow with the square of its length.
"""

import argparse
import asyncio
import os
import random
import statistics
import time
from contextlib import aclosing
from pathlib import Path

from benchmarks.provenance import report, write_json
from twinjet import AsyncLLM
from twinjet.assemble import kv_bytes_per_token
from twinjet.options import EngineOptions

MIB = 1 << 20


def peak_bytes(pid: int) -> int:
    """Highest resident size that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


async def measure(model: str, lengths: list[int], options: EngineOptions) -> list[dict[str, float]]:
    rows = []
    async with AsyncLLM(model, options=options) as llm:
        info = llm.assembly.orchestrator.info
        config, dtype = llm.assembly.model.config, llm.assembly.engine.cache.dtype
        rng = random.Random(0)
        warm = peak_bytes(info.pid)
        for length in lengths:
            prompt = [rng.randrange(100, info.vocab_size) for _ in range(length)]
            start_s = time.perf_counter()
            async with aclosing(llm.stream(prompt, max_tokens=1, ignore_eos=True)) as deltas:
                async for _ in deltas:
                    break
            ttft_s = time.perf_counter() - start_s
            rows.append(
                {
                    "prompt_tokens": length,
                    "ttft_s": round(ttft_s, 2),
                    "prefill_tokens_per_s": round(length / ttft_s, 1),
                    "peak_above_load_mib": round((peak_bytes(info.pid) - warm) / MIB, 1),
                    "kv_of_prompt_mib": round(length * kv_bytes_per_token(config, dtype) / MIB, 1),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", default="500,2000,8000", help="prompt lengths in tokens, ascending")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write the results here, - for standard output")
    args = parser.parse_args()
    lengths = [int(length) for length in args.prompts.split(",")]
    load_average = os.getloadavg()[0]
    rows = asyncio.run(measure(args.model, lengths, EngineOptions(exact=args.exact)))
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(f"median prefill {statistics.median(row['prefill_tokens_per_s'] for row in rows)} tok/s")
    if args.json:
        figures = {"model": args.model, "exact": args.exact, "results": rows}
        write_json(args.json, report("long_prompt", load_average, figures))


if __name__ == "__main__":
    main()
