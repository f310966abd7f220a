"""Times ik_llama.cpp's prompt processing; run by a Python that has ik-llama-cpp-python, and prints tokens per second.

PYTHON benchmarks/peers/ik_prefill.py MODEL TOKENS THREADS REPETITIONS
"""

import random
import sys
import time

from ik_llama_cpp import IkLlama  # pyright: ignore[reportMissingImports]


def main() -> None:
    path, tokens, threads, repetitions = sys.argv[1], *map(int, sys.argv[2:])
    llama = IkLlama(path, n_ctx=max(tokens, 512), n_threads=threads, verbose=False)
    ids = [random.Random(0).randrange(1000, 30000) for _ in range(tokens)]
    rates = []
    for _ in range(repetitions + 1):
        start_s = time.perf_counter()
        llama.generate(ids, max_tokens=0)
        rates.append(tokens / (time.perf_counter() - start_s))
    print(*rates[1:])  # the first one warms up


if __name__ == "__main__":
    main()
