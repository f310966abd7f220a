"""Where and on what a result was measured: every file under benchmarks/results begins with it."""

import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]


def describe_machine() -> dict[str, str | int]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def describe_commit() -> str:
    """The commit, and whether what runs differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "benchmarks/*.py", "src", "kernels")
    return git("rev-parse", "HEAD") + (" with changes" if changed else "")


def others_cpu_s() -> float:
    """Processor seconds that went to anything but this process and the children it waited for, stolen ones included."""
    times = psutil.cpu_times()
    busy = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return busy - sum(usage.ru_utime + usage.ru_stime for usage in own)


def report(benchmark: str, load_average: float, results: dict[str, Any]) -> dict[str, Any]:
    """`results` behind what is to be known of their making; `load_average` is the machine's, at the start."""
    return {
        "benchmark": benchmark,
        "commit": describe_commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "load_average_at_start": load_average,
        **results,
    }


def write_json(target: str, content: dict[str, Any]) -> None:
    """To a file, or to standard output for "-"."""
    text = json.dumps(content, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)
