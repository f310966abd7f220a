"""Speed of the CPU kernels' products by shape, type and rows, beside what this machine can do.

The machine's limits are measured first (machine_limits/). Prints one line for each product and writes a list of
measurements with --json.

    python -m benchmarks.kernels [--threads 2] [--instructions AVX2] [--quick] [--json FILE]
"""

import argparse
import ctypes
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine_limits import measure_limits
from benchmarks.provenance import report, write_json
from tests.tiny_models import random_blocks
from twinjet.ops.cpu_library import INSTRUCTIONS, load_library
from twinjet.ops.cpu_pack import pack_model
from twinjet.ops.cpu_weights import FORMATS
from twinjet.ops.params import RawModel

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (4096, 4096), (11008, 4096))
"""(columns, inputs): SmolLM2's products, then those of a model of 7B."""
ROWS = (1, 8, 32, 512)
QUANTS = ("Q4_1", "Q4_0", "Q4_K", "Q5_0", "Q6_K", "Q8_0")

LARGE_BYTES = 1 << 30
"""Blocks of memory up to this size are kept by the process between calls, as a server's steady steps have them."""


class Block:
    """A tensor of random weights."""

    name = "w"

    def __init__(self, quant: str, columns: int, inputs: int) -> None:
        self.quant, self.shape = quant, (columns, inputs)
        self.data = random_blocks(np.random.default_rng(0), quant, columns, inputs, inputs**-0.5)

    def dequantize(self) -> np.ndarray:
        raise NotImplementedError("only packed here")


class Ones:
    """A norm's weights."""

    name, quant, shape = "n", "F32", (1,)
    data = np.ones(1, np.float32)

    def dequantize(self) -> np.ndarray:
        return self.data


def measure(quant: str, columns: int, inputs: int, rows: int, quick: bool) -> dict:
    """Median and best of several runs, each of many products over enough copies to leave the caches."""
    library = load_library()
    tensor = Block(quant, columns, inputs)
    one = -(-columns // 16) * FORMATS[quant].panel_bytes(inputs)
    copies = max(1, min(64, (64 << 20) // one)) if rows <= 8 else 1
    raw = RawModel(tensor, [{"w": [tensor]}] * copies, Ones(), None)
    params = pack_model(library, raw, lambda done, total: None)
    places = [place for ((_, place),) in params.places.layers]
    calls = max(copies, 1 if rows > 32 else 4)
    result = jax.ShapeDtypeStruct((rows, columns), jnp.float32)

    @jax.jit
    def run(x, blob):
        kept = []
        for index in range(calls):
            numbers = places[index % copies].numbers  # pyright: ignore[reportAttributeAccessIssue]
            multiply = jax.ffi.ffi_call("twinjet_matmul", result, has_side_effect=True)
            kept.append(multiply(x, blob, weights=numbers)[0, 0])
        return sum(kept)

    x = np.random.default_rng(1).normal(0, 1, (rows, inputs)).astype(np.float32)
    run(x, params.blob).block_until_ready()
    times = []
    for _ in range(3 if quick else 11):
        start = time.perf_counter()
        run(x, params.blob).block_until_ready()
        times.append((time.perf_counter() - start) / calls)
    median = statistics.median(times)
    return {
        "quant": quant,
        "columns": columns,
        "inputs": inputs,
        "rows": rows,
        "gops": 2 * rows * columns * inputs / median / 1e9,
        "gops_best": 2 * rows * columns * inputs / min(times) / 1e9,
        "gbps": one / median / 1e9,
        "gbps_best": one / min(times) / 1e9,
    }


def keep_memory() -> None:
    """Have the C library neither map large blocks anew nor give them back, so that no page is faulted in twice."""
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_threshold = -1, -3
    libc.mallopt(trim_threshold, LARGE_BYTES)
    libc.mallopt(mmap_threshold, LARGE_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the CPU kernels' products by shape, type and rows.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--instructions", choices=INSTRUCTIONS, help="default: the best that this processor has")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write the results here, - for standard output")
    arguments = parser.parse_args()
    load_average = os.getloadavg()[0]
    keep_memory()
    library = load_library()
    library.set_threads(arguments.threads)
    if arguments.instructions and not library.use_instructions(arguments.instructions):
        parser.error(f"this processor has no {arguments.instructions}")
    limits = measure_limits(arguments.threads, library.instructions)
    print(
        f"{limits.threads} threads, {limits.instructions}: {limits.gbps:.1f} GB/s, "
        f"{limits.int8_gops:.0f} GOP/s with 8 bits, {limits.int16_gops:.0f} with 16",
        flush=True,
    )
    results = []
    for quant in QUANTS:
        for columns, inputs in SHAPES[:4] if arguments.quick else SHAPES:
            if quant.endswith("_K") and inputs % 256:
                continue
            for rows in ROWS:
                one = measure(quant, columns, inputs, rows, arguments.quick)
                # What bounds it: reading the weights once, or multiplying them.
                bytes_per_op = one["gbps"] / one["gops"]
                bound = min(limits.int8_gops, limits.gbps / bytes_per_op)
                one["percent_of_limit"] = 100 * one["gops"] / bound
                results.append(one)
                print(
                    f"{quant} {columns:6} x {inputs:5}  {rows:4} rows  {one['gops']:6.1f} GOP/s  "
                    f"{one['gbps']:5.1f} GB/s  {one['percent_of_limit']:4.0f}% of the limit  "
                    f"(best {one['gops_best']:.1f})",
                    flush=True,
                )
    if arguments.json:
        figures = {"limits": limits.as_dict(), "runs": results}
        write_json(arguments.json, report("kernels", load_average, figures))


if __name__ == "__main__":
    main()
