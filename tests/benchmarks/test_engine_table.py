"""benchmarks/engine_table.py on a tiny random model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("-p", "8", "-g", "4", "-c", "2", "-r", "3", "--threads", "1", "--token-budget", "4")


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.engine_table", *arguments]
    environment = {**os.environ, "TWINJET_HOME": str(home)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT, env=environment)


def test_it_keeps_what_the_command_measured(home: Path, tiny: str):
    done = run(home, tiny, *SMALL, "--json", "-")
    assert done.returncode == 0, done.stderr
    kept = json.loads(done.stdout)
    assert kept.keys() >= {"benchmark", "commit", "date", "machine", "load_average_at_start"}
    assert kept["command"] == " ".join(("twinjet", "bench", tiny, *SMALL))
    assert kept["others_cores"] >= -0.1
    assert [record["test"] for record in kept["results"]] == ["pp 8", "tg 4"]
    for record in kept["results"]:
        low, middle, high = sorted(record["samples_tokens_per_s"])
        assert record["tokens_per_s_spread"] == {"median": middle, "min": low, "max": high}


@pytest.mark.parametrize("wrong", [("-r", "0"), ("--no-such-option",)])
def test_what_the_command_refuses_is_kept_nowhere(home: Path, tiny: str, tmp_path: Path, wrong: tuple[str, ...]):
    done = run(home, tiny, *wrong, "--json", str(tmp_path / "kept.json"))
    assert done.returncode > 0
    assert wrong[0] in done.stderr
    assert not (tmp_path / "kept.json").exists()
