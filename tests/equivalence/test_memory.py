"""A prompt of 8,000 tokens is computed in bounded memory: the process's peak, in a process of its own."""

import subprocess
import sys
from pathlib import Path

from tests.tiny_models import write_tiny_llama

LIMIT_MIB = 96
"""Over a prompt of one chunk. A matrix of 8,000 x 8,000 scores alone takes 244 MiB a head."""

SCRIPT = """
import resource, sys
from tests.equivalence.drive import Drive, build_engine, sequence

engine = build_engine(sys.argv[1], context=8192, num_pages=512, token_budget=512)

def peak_mib(length):
    prompt = [3 + i % 200 for i in range(length)]
    Drive(engine, {0: [sequence(0, prompt, 2)]}, 8192, 512).run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

print(peak_mib(512), peak_mib(8000))
"""


def test_a_long_prompt_costs_no_more_than_its_kv_and_a_chunk(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", context=8192)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SCRIPT, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=300)
    assert run.returncode == 0, run.stderr
    one_chunk, long_prompt = map(float, run.stdout.split())
    assert long_prompt - one_chunk < LIMIT_MIB
