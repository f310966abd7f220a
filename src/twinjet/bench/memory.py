"""The most resident memory that this process has had, from a moment of one's choosing. Linux only."""

import re
from pathlib import Path

_RESET_PEAK = "5"
"""For /proc/PID/clear_refs: sets VmHWM back to what is resident now; see proc(5)."""


def reset_peak() -> bool:
    """Forget the peak so far; False where the system has no such thing."""
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def peak_bytes() -> int | None:
    """Most resident memory since `reset_peak`; None where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
