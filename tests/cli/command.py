"""Runs the `twinjet` command as a user would: in a process of its own, in a home of its own."""

import os
import subprocess
import sys
from pathlib import Path

COMMAND = (sys.executable, "-m", "twinjet")
TINY = ("--threads", "1", "--kv-memory", "4MiB")
ONE_ROW = (*TINY, "--token-budget", "1")
"""For `run` and `chat`: one program to compile."""
TINY_SERVER = (*TINY, "--max-streams", "4", "--token-budget", "4")
"""For `serve`, few programs to compile; as in tests/test_api.py, which finds them in the cache."""
TIMEOUT_S = 300
"""Generous: a busy machine of two cores compiles slowly."""


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "TWINJET_HOME": str(home), "COLUMNS": "120"}


def twinjet(home: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The finished command; standard output and error are no terminals."""
    return subprocess.run(
        (*COMMAND, *arguments),
        env=environment(home),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def assert_one_clear_line(done: subprocess.CompletedProcess[str], *needles: str) -> None:
    """Exit code 1, and nothing but one line that holds all `needles`."""
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("twinjet: ")
    for needle in needles:
        assert needle in lines[0]
