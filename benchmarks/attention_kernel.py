"""Time of the attention kernel: nanoseconds per token and KV head for decoding rows, GFLOP/s for prompts.

    python -m benchmarks.attention_kernel [--threads 2] [--repeats 20]

Decoding walks `--layers` layers in turn, so that keys and values come from memory and not from a cache.
Processor time stands beside wall-clock time: on a machine that others use, it says better what the kernel costs.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from twinjet.kernels import open_library
from twinjet.ops.batch import StepLayout

PAGE_SIZE = 16

# Query heads N, KV heads K, head dim H.
MODELS = {"SmolLM2-135M": (9, 3, 64), "Gemma 3 270M": (4, 1, 256), "7B": (32, 8, 128)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    library = open_library()
    library.twinjet_init(arguments.threads)
    jax.ffi.register_ffi_target("twinjet_attend", jax.ffi.pycapsule(library.twinjet_attend), platform="cpu")

    print(f"{arguments.threads} threads, best of {arguments.repeats}, calls through XLA included")
    print("| model | KV | rows x context | wall us/layer | wall ns/token/head | CPU ns/token/head | GFLOP/s |")
    print("|---|---|---|---|---|---|---|")
    for model, (N, K, H) in MODELS.items():
        for dtype in ("float16", "float32"):
            for num_streams, num_rows, context in ((1, 1, 2048), (8, 1, 512), (1, 512, 512)):
                wall_s, cpu_s = measure(
                    (N, K, H), dtype, num_streams, num_rows, context, arguments.layers, arguments.repeats
                )
                # What each row sees, over all rows.
                pairs = num_streams * sum(range(context - num_rows + 1, context + 1))
                tokens, rate = num_streams * context * K, 4 * pairs * N * H / wall_s / 1e9
                print(
                    f"| {model} | {dtype} | {num_streams * num_rows} x {context} | {wall_s * 1e6:.0f} "
                    f"| {wall_s / tokens * 1e9:.1f} | {cpu_s / tokens * 1e9:.1f} | {rate:.1f} |"
                )


def measure(
    heads: tuple[int, int, int], dtype: str, num_streams: int, num_rows: int, context: int, layers: int, repeats: int
) -> tuple[float, float]:
    """Least wall-clock and processor seconds per layer."""
    N, K, H = heads
    rng = np.random.default_rng(0)
    T = num_streams * num_rows
    layout = StepLayout(T, num_streams, -(-context // PAGE_SIZE))
    num_pages = num_streams * layout.table_width
    packed = jnp.asarray(pack(layout, num_streams, num_rows, context, rng.permutation(num_pages)))
    block = rng.normal(0, 1, (1 << 16)).astype(dtype)
    pool = jnp.asarray(np.resize(block, (layers, num_pages, 1, K, 2, 16 * H)))
    q = jnp.asarray(rng.normal(0, 1, (T, N * H)).astype(np.float32))
    sizes = {
        "T": T, "B": num_streams, "MP": layout.table_width, "num_heads": N, "num_kv_heads": K, "head_dim": H,
        "num_pages": num_pages, "page_size": PAGE_SIZE, "window": 0,
    }  # fmt: skip
    attributes = {name: np.int64(value) for name, value in sizes.items()}
    attend = jax.ffi.ffi_call("twinjet_attend", jax.ShapeDtypeStruct((T, N * H), np.float32))

    @jax.jit
    def run(q, pool, packed):
        for layer in range(layers):
            q = attend(
                q, pool, packed, layer=np.int64(layer), scale=np.float32(H**-0.5), soft_cap=np.float32(0), **attributes
            )
        return q

    run(q, pool, packed).block_until_ready()
    wall, cpu = [], []
    for _ in range(repeats):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        run(q, pool, packed).block_until_ready()
        wall.append(time.perf_counter() - wall_s)
        cpu.append(time.process_time() - cpu_s)
    return min(wall) / layers, min(cpu) / layers


def pack(layout: StepLayout, num_streams: int, num_rows: int, context: int, pages: np.ndarray) -> np.ndarray:
    """A packed array of rows that end each stream's context; nobody samples."""
    packed = np.zeros(layout.size, np.int32)
    part = {name: packed[start:stop].reshape(shape) for name, (start, stop, shape) in layout.sections().items()}
    part["rows"][1] = np.repeat(np.arange(num_streams), num_rows)
    part["rows"][2] = np.tile(np.arange(context - num_rows, context), num_streams)
    part["page_table"][:] = pages.reshape(num_streams, -1)
    if num_rows == 1:
        part["counts"][1] = num_streams
        part["singles"][:] = np.arange(num_streams)
        return packed
    tiles = [
        (stream, stream * num_rows + first, min(layout.tile_rows, num_rows - first), context - num_rows + first)
        for stream in range(num_streams)
        for first in range(0, num_rows, layout.tile_rows)
    ]
    part["counts"][2] = len(tiles)
    part["tiles"][: len(tiles)] = tiles
    return packed


if __name__ == "__main__":
    main()
