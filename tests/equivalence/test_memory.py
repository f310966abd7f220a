"""Peak memory of an engine, in a process of its own: what a long prompt costs, and what loading weights costs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.products import kernels
from tests.tiny_models import write_tiny_llama

PEAK = """
def peak_mib():
    # Of this program alone; `ru_maxrss` begins with what the process that launched it had.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))
"""

PROMPT_LIMIT_MIB = 96
"""Over a prompt of one chunk. A matrix of 8,000 x 8,000 scores alone takes 244 MiB a head."""

PROMPT_SCRIPT = """
import sys
from tests.equivalence.drive import Drive, build_engine, sequence

engine = build_engine(sys.argv[1], context=8192, num_pages=512, token_budget=512)

def peak_of(length):
    prompt = [3 + i % 200 for i in range(length)]
    Drive(engine, {0: [sequence(0, prompt, 2)]}, 8192, 512).run()
    return peak_mib()

print(peak_of(512), peak_of(8000))
"""

LOAD_LIMIT = 1.25
"""Of packed weights and KV pool together: peak memory over an engine process with a model of next to no weights."""

LOAD_SCRIPT = """
import sys
from twinjet.core.config import CacheConfig, EngineConfig, SchedulerConfig
from twinjet.engine.engine import load_engine

config = EngineConfig(
    sys.argv[1], CacheConfig(16, 64, "float16"), SchedulerConfig(16, 512, 512), exact=False, threads=2,
    packed_dir=sys.argv[2] or None,
)
engine = load_engine(config, lambda stage, done, total: None)
engine.warm_up(lambda done, total: None)
print(peak_mib(), (engine._params.blob.nbytes + engine._cache.nbytes) / 2**20)
"""


def run(script: str, *arguments: str) -> tuple[float, ...]:
    """The numbers that a script prints."""
    command = [sys.executable, "-c", PEAK + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300)
    assert done.returncode == 0, done.stderr
    return tuple(map(float, done.stdout.split()))


def test_a_long_prompt_costs_no_more_than_its_kv_and_a_chunk(tmp_path: Path) -> None:
    one_chunk, long_prompt = run(PROMPT_SCRIPT, str(write_tiny_llama(tmp_path / "tiny.gguf", context=8192)))
    assert long_prompt - one_chunk < PROMPT_LIMIT_MIB


@pytest.mark.parametrize("kept", ["kept on disk", "in memory"])
def test_loading_takes_no_more_than_the_packed_weights_and_a_quarter(kept: str, tmp_path: Path) -> None:
    """The model file's own pages count while they are mapped, so they must be let go as packing goes on."""
    kernels()
    shape = {"d_model": 1024, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "d_mlp": 4096, "quant": "Q8_0"}
    large = write_tiny_llama(tmp_path / "large.gguf", num_layers=12, **shape)
    small = write_tiny_llama(tmp_path / "small.gguf", num_layers=12)
    folder = str(tmp_path / "packed") if kept == "kept on disk" else ""
    without, little = run(LOAD_SCRIPT, str(small), folder)
    for _ in ("first start", "second start"):
        peak, weights_and_kv = run(LOAD_SCRIPT, str(large), folder)
        assert weights_and_kv > 150
        assert peak - (without - little) < LOAD_LIMIT * weights_and_kv
