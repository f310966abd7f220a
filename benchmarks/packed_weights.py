"""Packed weights: what the first and the second start of an engine take, and decode speed by the memory they lie in.

Starts: the server's own way (`AsyncLLM`), in an empty home and then again: seconds to ready, peak memory of the engine
process and what of it is weights and KV pool; and packing alone, the mapping alone. Memories, for one decoding stream,
by turns, in one process: the file as engines map it; the same without huge pages; anonymous memory with and without.

    python -m benchmarks.packed_weights [--model smollm2] [--skip starts|memories] [--json FILE]

The model `random-7b` is random weights of type Q4_0 in the shape of Llama 2 7B, written for the purpose: with what is
packed from it, 16 GB of disk.
"""

import argparse
import asyncio
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import numpy as np

from benchmarks.long_prompt import MIB, peak_bytes
from benchmarks.provenance import report, write_json
from tests import tiny_models
from twinjet import AsyncLLM
from twinjet.assemble import kv_bytes_per_token
from twinjet.checkpoints import content_hash
from twinjet.checkpoints.gguf import read_checkpoint
from twinjet.checkpoints.packed import HEADER_BYTES, PackedWeights
from twinjet.checkpoints.pull import resolve_model
from twinjet.core.config import CacheConfig, EngineConfig, SchedulerConfig
from twinjet.core.plan import PageGrant, Plan, SequenceWork
from twinjet.core.types import SamplingParams
from twinjet.engine.engine import Engine
from twinjet.engine.interface import run_plan
from twinjet.models.registry import load_params
from twinjet.ops.cpu import CpuOps
from twinjet.ops.cpu_library import load_library
from twinjet.ops.cpu_pack import zeroed_bytes
from twinjet.ops.cpu_weights import CpuParams
from twinjet.options import EngineOptions, default_home

CONTEXT = 1024
PROMPT = 32
GREEDY = SamplingParams(temperature=0.0)


def write_random_7b(path: Path) -> Path:
    """3.8 GB. All layers are alike: what they hold does not matter to speed."""
    drawn: dict[tuple[int, int], np.ndarray] = {}

    def blocks(rng: np.random.Generator, quant: str, rows: int, columns: int, std: float) -> np.ndarray:
        if (rows, columns) not in drawn:
            random = rng.integers(0, 256, (rows * columns // 32, 18), np.uint8)
            random[:, :2] = np.frombuffer(np.float16(std / 4.6).tobytes(), np.uint8)  # of integers from -8 to 7
            drawn[rows, columns] = random.reshape(rows, -1)
        return drawn[rows, columns]

    vocab = tiny_models.bpe_vocab()
    others = [f"<{number}>" for number in range(32_000 - len(vocab.tokens))]
    vocab = replace(vocab, tokens=vocab.tokens + others, types=vocab.types + [tiny_models.NORMAL] * len(others))
    with mock.patch.object(tiny_models, "random_blocks", blocks):
        return tiny_models.write_tiny_llama(
            path,
            quant="Q4_0",
            num_layers=32,
            d_model=4096,
            num_heads=32,
            num_kv_heads=32,
            head_dim=128,
            d_mlp=11_008,
            context=4096,
            tied=False,
            vocab=vocab,
            name=path.stem,
        )


class Stages:
    """When each stage of a start began, and how much it had to do."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.totals: dict[str, int] = {}
        self._last_s = time.perf_counter()

    def note(self, stage: str, done: int, total: int) -> None:
        now_s = time.perf_counter()
        if not self.seconds:  # what came before the first report
            self.seconds["launch"] = now_s - self._last_s
            self._last_s = now_s
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now_s - self._last_s
        self.totals[stage], self._last_s = total, now_s

    def summary(self) -> dict[str, float]:
        return {f"{stage}_s": round(seconds, 3) for stage, seconds in self.seconds.items()}


async def start_once(model: Path, home: Path) -> dict[str, float]:
    stages = Stages()
    options = EngineOptions(context=CONTEXT, max_streams=4)
    begin_s = time.perf_counter()
    llm = await AsyncLLM(str(model), options=options, home=home).start(lambda _, *progress: stages.note(*progress))
    async with llm:
        ready_s = time.perf_counter() - begin_s
        await llm.generate("Hello", max_tokens=1)
        first_token_s = time.perf_counter() - begin_s
        config, cache = llm.assembly.model.config, llm.assembly.engine.cache
        kv_bytes = cache.num_pages * cache.page_size * kv_bytes_per_token(config, cache.dtype)
        peak = peak_bytes(llm.assembly.orchestrator.info.pid)
    return {
        "ready_s": round(ready_s, 2),
        "first_token_s": round(first_token_s, 2),
        "peak_mib": round(peak / MIB),
        "kv_pool_mib": round(kv_bytes / MIB),
        **stages.summary(),
    }


def measure_loads(model: Path, folder: Path) -> dict[str, float]:
    """Packing into an empty folder, and mapping what is there, in this process."""
    checkpoint = read_checkpoint(model)
    ops = CpuOps(load_library(), 16, PackedWeights(folder, checkpoint.paths, print))
    found: dict[str, float] = {}
    for start in ("first", "second"):
        stages = Stages()
        begin_s = time.perf_counter()
        params = load_params(ops, checkpoint.config, checkpoint.tensors, stages.note)
        found[f"{start}_load_s"] = round(time.perf_counter() - begin_s, 3)
        if "pack" in stages.seconds:
            found["packed_mib"] = round(params.blob.nbytes / MIB)
            found["pack_mb_per_s"] = round(stages.totals["pack"] / stages.seconds["pack"] / 1e6)
        found |= {f"{start}_{stage}": seconds for stage, seconds in stages.summary().items()}
    return found


def anonymous(blob: np.ndarray, *, huge: bool) -> np.ndarray:
    if huge:
        copy = zeroed_bytes(blob.nbytes)
    else:
        memory = mmap.mmap(-1, blob.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        copy = np.frombuffer(memory, np.uint8)
    copy[:] = blob
    return copy


def small_pages(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size - HEADER_BYTES
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=HEADER_BYTES)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


class Decoder:
    """An engine with one sequence."""

    def __init__(self, config: EngineConfig, ops: CpuOps, model: Path, params: CpuParams) -> None:
        self._engine = Engine(config, read_checkpoint(model).config, ops, params)
        self._engine.warm_up(lambda done, total: None)

    def run(self, num_tokens: int) -> float:
        """Median milliseconds of a step that decodes one row, behind a new prompt."""
        pages = tuple(range(CONTEXT // 16))
        prompt = SequenceWork(0, 0, 0, PROMPT, tuple(range(3, 3 + PROMPT)), True, GREEDY)
        run_plan(self._engine, Plan(0, (prompt,), (PageGrant(0, 0, pages),)))
        taken = []
        for index in range(num_tokens):
            out = run_plan(self._engine, Plan(1, (SequenceWork(0, 0, PROMPT + index, 1, None, True, GREEDY),)))
            taken.append(1000 * (out.ended_s - out.started_s))
        return statistics.median(taken)


def measure_memories(model: Path, folder: Path, threads: int, rounds: int, steps: int) -> dict[str, dict[str, float]]:
    library = load_library()
    library.set_threads(threads)
    checkpoint = read_checkpoint(model)
    ops = CpuOps(library, 16, PackedWeights(folder, checkpoint.paths, print))
    params = load_params(ops, checkpoint.config, checkpoint.tensors, lambda *_: None)
    blob = np.asarray(params.blob)
    (path,) = folder.glob("*.packed")
    memories: dict[str, Callable[[], np.ndarray]] = {
        "file": lambda: blob,
        "file, 4 KiB pages": lambda: small_pages(path),
        "anonymous, huge pages": lambda: anonymous(blob, huge=True),
        "anonymous, 4 KiB pages": lambda: anonymous(blob, huge=False),
    }
    config = EngineConfig(
        model_path=str(model),
        cache=CacheConfig(16, CONTEXT // 16, "float16"),
        scheduler=SchedulerConfig(max_streams=1, context=CONTEXT, token_budget=PROMPT),
        exact=False,
        threads=threads,
    )
    decoders = {
        name: Decoder(config, ops, model, CpuParams(jax.device_put(memory()), params.places))
        for name, memory in memories.items()
    }
    times: dict[str, list[float]] = {name: [] for name in decoders}
    for turn in range(rounds + 1):
        for name, decoder in decoders.items():
            median_ms = decoder.run(steps)
            if turn:  # the first touches what is new
                times[name].append(median_ms)
    return {
        name: {
            "step_ms": round(statistics.median(each), 3),
            "least_ms": round(min(each), 3),
            "most_ms": round(max(each), 3),
            "gb_per_s": round(blob.nbytes / statistics.median(each) / 1e6, 2),
        }
        for name, each in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=24, help="decode steps in a turn")
    parser.add_argument("--skip", choices=("starts", "memories"))
    parser.add_argument("--json", metavar="FILE", help="write the results here, - for standard output")
    arguments = parser.parse_args()
    load_average = os.getloadavg()[0]
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        if arguments.model == "random-7b":
            model = write_random_7b(home / "random-7b.gguf")
        else:
            model = resolve_model(arguments.model, default_home(os.environ)).path
        size_mib = round(model.stat().st_size / MIB)
        results: dict = {"model": model.name, "threads": arguments.threads, "model_mib": size_mib}
        time.sleep(content_hash.SETTLED_S)  # as long as it takes for the hash of a new file to be remembered
        if arguments.skip != "starts":
            for start in ("first", "second"):
                results[f"{start}_start"] = asyncio.run(start_once(model, home / "starts"))
                print(f"{start} start: {results[f'{start}_start']}", flush=True)
            load_library().set_threads(arguments.threads)
            results["load"] = measure_loads(model, home / "loads")
            print(f"load: {results['load']}", flush=True)
        if arguments.skip != "memories":
            folder = home / "memories"
            results["memories"] = measure_memories(model, folder, arguments.threads, arguments.rounds, arguments.steps)
            for memory, each in results["memories"].items():
                print(f"{memory:24} {each}", flush=True)
    if arguments.json:
        write_json(arguments.json, report("packed_weights", load_average, results))


if __name__ == "__main__":
    main()
