"""How the processes of process_split.py are started."""

import os
import subprocess
import sys
from pathlib import Path


def start_role(role: str, directory: Path, *more: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "benchmarks.split_roles", role, "--directory", str(directory), *more]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, **options)
