"""Speed of the CPU kernels' products by shape, type and rows, beside what this machine can do.

Prints one line for each and writes a list of measurements with --json. The limits are those of two cores of AMD Zen 3
(their sources are in the field `limits`); give others with --gops4, --gops8 and --gbps.

    python -m benchmarks.kernels [--threads 2] [--quick] [--json FILE]
"""

import argparse
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.provenance import report, write_json
from twinjet.ops.cpu_library import load_library
from twinjet.ops.cpu_pack import pack_model
from twinjet.ops.cpu_weights import FORMATS
from twinjet.ops.params import RawModel

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (4096, 4096), (11008, 4096))
"""(columns, inputs): SmolLM2's products, then those of a model of 7B."""
ROWS = (1, 8, 32, 512)
QUANTS = ("Q4_1", "Q4_0", "Q8_0")
LIMITS = {"gops4": 400.0, "gops8": 285.0, "gbps": 20.6}
"""Two threads: 16-bit sums of 8-bit products with scales and minima; products of 16-bit pairs; reading memory."""


class Block:
    """A tensor of random bytes, with harmless scales."""

    name = "w"

    def __init__(self, quant: str, columns: int, inputs: int) -> None:
        self.quant, self.shape = quant, (columns, inputs)
        block = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[quant]
        self.data = np.random.default_rng(0).integers(0, 256, (columns, inputs // 32, block), np.uint8)
        self.data[:, :, 1] &= 0x3F
        self.data[:, :, 3] &= 0x3F
        self.data = self.data.reshape(columns, -1)

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
    one = -(-columns // 16) * (inputs // 32) * FORMATS[quant].group_bytes
    copies = max(1, min(64, (64 << 20) // one)) if rows <= 8 else 1
    tensor = Block(quant, columns, inputs)
    params = pack_model(library, RawModel(tensor, [{"w": [tensor]}] * copies, Ones(), None), lambda done, total: None)
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the CPU kernels' products by shape, type and rows.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write the results here, - for standard output")
    for name, value in LIMITS.items():
        parser.add_argument(f"--{name}", type=float, default=value, help=f"this machine's limit (default {value})")
    arguments = parser.parse_args()
    load_average = os.getloadavg()[0]
    load_library().set_threads(arguments.threads)
    results = []
    for quant in QUANTS:
        compute = arguments.gops8 if quant == "Q8_0" else arguments.gops4
        for columns, inputs in SHAPES[:4] if arguments.quick else SHAPES:
            for rows in ROWS:
                one = measure(quant, columns, inputs, rows, arguments.quick)
                # What bounds it: reading the weights once, or multiplying them.
                bytes_per_op = one["gbps"] / one["gops"]
                bound = min(compute, arguments.gbps / bytes_per_op)
                one["percent_of_limit"] = 100 * one["gops"] / bound
                results.append(one)
                print(
                    f"{quant} {columns:6} x {inputs:5}  {rows:4} rows  {one['gops']:6.1f} GOP/s  "
                    f"{one['gbps']:5.1f} GB/s  {one['percent_of_limit']:4.0f}% of the limit  "
                    f"(best {one['gops_best']:.1f})",
                    flush=True,
                )
    if arguments.json:
        limits = {name: getattr(arguments, name) for name in LIMITS}
        figures = {"threads": arguments.threads, "limits": limits, "runs": results}
        write_json(arguments.json, report("kernels", load_average, figures))


if __name__ == "__main__":
    main()
