"""Times ik_llama.cpp's prompt processing; run by a Python that has ik-llama-cpp-python, and prints tokens per second.

PYTHON benchmarks/peers/ik_prefill.py MODEL TOKENS THREADS
"""

import random
import sys
import time

from ik_llama_cpp import IkLlama  # pyright: ignore[reportMissingImports]


def main() -> None:
    path, tokens, threads = sys.argv[1], *map(int, sys.argv[2:])
    llama = IkLlama(path, n_ctx=max(tokens, 512), n_threads=threads, verbose=False)
    ids = [random.Random(0).randrange(1000, 30000) for _ in range(tokens)]
    llama.generate(ids, max_tokens=0)  # warms up
    start_s = time.perf_counter()
    llama.generate(ids, max_tokens=0)
    print(tokens / (time.perf_counter() - start_s))


if __name__ == "__main__":
    main()
