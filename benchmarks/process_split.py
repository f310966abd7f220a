"""Does an engine in its own process leave the device shorter gaps than an engine in a thread of the server?

    python -m benchmarks.process_split --json benchmarks/results/process_split.json

A fake step (split_roles/device.cc) keeps two threads busy for a set time and reads its own stamps; its state is
donated. A device thread takes plans from a queue kept two deep; a loop thread makes plans and handles results.
FastAPI under uvicorn and uvloop serves 16 SSE streams in closed loop, and takes a POST of 100,000 token ids
every 500 ms. All modes are started once; one at a time runs, in windows of two seconds, while the others are
stopped by signal: so whatever else the machine does meets all modes alike. Modes:

    thread        loop and device threads inside the server; results by call_soon_threadsafe
    thread-switch the same with sys.setswitchinterval(0.0001)
    process       both threads in their own process; msgspec over ZeroMQ ipc, one message a step
    alone         as process, with no client at all: the floor of this machine, not a choice

Two kinds of step. `wall` ends at a set time, however little of a core it got, as on an accelerator: lost
throughput is gaps and late ends. `work` ends when each thread has had its CPU time, as real kernels do: every
microsecond that Python takes from the two cores is lost too. The clocks of all processes are CLOCK_MONOTONIC.
"others' cores" is what programs that are no part of this took of the machine meanwhile.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.provenance import report, write_json
from benchmarks.split_roles.clients import NUM_STREAMS
from benchmarks.split_roles.engine import compile_device
from benchmarks.split_roles.launch import start_role
from benchmarks.split_roles.server import SHORT_SWITCH_INTERVAL_S

PLAN_US = 200
SETTLE_S = 0.4
"""From waking a mode's processes to the start of its window."""
LOADS = (("wall", 5), ("wall", 10), ("wall", 25), ("work", 10))
"""(kind of step, its milliseconds)."""
MODES = ("alone", "thread", "thread-switch", "process")


def calibrate_plan(target_us: float) -> int:
    """Iterations of `Engine._plan`'s loop that take `target_us` on an undisturbed core."""

    def once(loops: int) -> float:
        total: dict[int, int] = {}
        start = time.perf_counter()
        for i in range(loops):
            total[i & 15] = total.get(i & 15, 0) + i
        return time.perf_counter() - start

    return max(1, int(2000 * target_us / (1e6 * min(once(2000) for _ in range(200)))))


def host_cpu_s(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(t.user + t.system for t in times)


class Cores:
    """Cores' worth of CPU time that others took on this machine since this object was made."""

    def __init__(self) -> None:
        self._at, self._others = time.monotonic(), self._others_s()

    def others(self) -> float:
        return (self._others_s() - self._others) / (time.monotonic() - self._at)

    @staticmethod
    def _others_s() -> float:
        all_ = psutil.cpu_times()
        ours = psutil.Process().children(recursive=True)
        busy = sum(all_) - all_.idle - all_.iowait - all_.guest - all_.guest_nice  # stolen time included
        return busy - host_cpu_s([process.pid for process in ours])


@dataclass(frozen=True, slots=True)
class Window:
    """A measured stretch of one mode."""

    kind: str
    step_ms: int
    begin: int
    end: int
    """ns of CLOCK_MONOTONIC."""
    cpu_s: float
    """CPU time of server and engine, kernels included."""
    others_cores: float


class Setup:
    """Server, engine and clients of one mode; they run between `resume` and `pause` only."""

    def __init__(self, mode: str, directory: Path, library: Path, plan_loops: int):
        self._mode, self._directory = mode, directory
        self._processes: list[subprocess.Popen] = []
        self._windows: list[Window] = []
        directory.mkdir(mode=0o700)
        (directory / "device.so").symlink_to(library)
        (directory / "plan_loops").write_text(str(plan_loops))
        self._control = np.memmap(directory / "control", np.int32, "w+", shape=(2,))
        self._control[:] = (10_000, 0)

    def start(self) -> None:
        ready = json.loads(self._start("server", "--mode", self._mode))
        self._engine_pids: list[int] = ready["pids"]
        if self._mode != "alone":
            for role in ("streams", "poster"):
                self._start(role, "--port", str(ready["port"]))

    def _start(self, role: str, *more: str) -> bytes:
        """The first line of output of a new process."""
        process = start_role(role, self._directory, *more, stdout=subprocess.PIPE)
        self._processes.append(process)
        if process.stdout is None or not (line := process.stdout.readline()):
            raise RuntimeError(f"the role {role} of mode {self._mode} did not start")
        return line

    def _signal(self, number: signal.Signals) -> None:
        for pid in {*self._engine_pids, *(process.pid for process in self._processes)}:
            os.kill(pid, number)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def measure(self, kind: str, step_ms: int, window_s: float) -> None:
        self._control[:] = (step_ms * 1000, kind == "work")
        self.resume()
        time.sleep(SETTLE_S)
        begin, cpu_s, cores = time.monotonic_ns(), host_cpu_s(self._engine_pids), Cores()
        time.sleep(window_s)
        cpu_s, others_cores = host_cpu_s(self._engine_pids) - cpu_s, cores.others()
        self._windows.append(Window(kind, step_ms, begin, time.monotonic_ns(), cpu_s, others_cores))
        self.pause()

    def finish(self) -> list[tuple[Window, dict[str, float]]]:
        """End all processes; the figures of each window."""
        self._control[:] = (1000, 0)  # readers finish their last request soon
        self.resume()
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            if process.wait(30) not in (0, -signal.SIGTERM):
                raise RuntimeError(f"{process.args} exited with {process.returncode}")
        stamps = np.load(self._directory / "stamps.npy")
        arrivals = posts = np.zeros((0, 2))
        if self._mode != "alone":
            arrivals, posts = np.load(self._directory / "arrivals.npy"), np.load(self._directory / "posts.npy")
        return [(window, figures(stamps, arrivals, posts, window)) for window in self._windows]

    def kill(self) -> None:
        """An engine process ends by itself when its server has."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def figures(stamps: np.ndarray, arrivals: np.ndarray, posts: np.ndarray, window: Window) -> dict[str, float]:
    """From `stamps` [steps, (start, end, cpu)] and `arrivals` [chunks, (step, at)] in ns, `posts` [n, (sent, s)]."""
    begin, end, cpu_s, step_ms = window.begin, window.end, window.cpu_s, window.step_ms
    inside = stamps[(stamps[:, 0] >= begin) & (stamps[:, 1] <= end)]
    gaps = (inside[1:, 0] - inside[:-1, 1]) / 1e6
    lengths = (inside[:, 1] - inside[:, 0]) / 1e6
    span_ms = (inside[-1, 1] - inside[0, 0]) / 1e6
    result = {
        "steps": float(len(inside)),
        "others_cores": window.others_cores,
        "gap_p50_ms": float(np.percentile(gaps, 50)),
        "gap_p99_ms": float(np.percentile(gaps, 99)),
        "gap_max_ms": float(gaps.max()),
        "gap_mean_ms": float(gaps.mean()),
        "step_p50_ms": float(np.percentile(lengths, 50)),
        "step_mean_ms": float(lengths.mean()),
        "duty_cycle": float(lengths.sum() / span_ms),
        "lost_throughput": float(1 - len(inside) * step_ms / span_ms),
        "host_cpu_ms_per_step": float((cpu_s * 1e3 - inside[:, 2].sum() / 1e6) / len(inside)),
    }
    chunks = arrivals[(arrivals[:, 1] >= begin) & (arrivals[:, 1] <= end)]
    if len(chunks):
        latency = (chunks[:, 1] - stamps[chunks[:, 0].astype(int), 1]) / 1e6
        result["latency_p50_ms"], result["latency_p99_ms"] = (float(x) for x in np.percentile(latency, (50, 99)))
        result["delivered_tok_s"] = len(chunks) / ((end - begin) / 1e9)
        posted = posts[(posts[:, 0] >= begin) & (posts[:, 0] + posts[:, 1] * 1e9 <= end), 1]
        if len(posted):
            result["post_p50_ms"] = float(np.median(posted) * 1e3)
    return result


def summarise(windows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median and spread of each figure over all windows."""
    keys = {key: None for window in windows for key in window}
    columns = {key: [window[key] for window in windows if key in window] for key in keys}
    return {
        key: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for key, values in columns.items()
    }


COLUMNS = (
    ("gap p50", "gap_p50_ms", "{:.2f}", 1),
    ("gap p99", "gap_p99_ms", "{:.2f}", 1),
    ("gap max", "gap_max_ms", "{:.1f}", 1),
    ("duty", "duty_cycle", "{:.1f}%", 100),
    ("lost", "lost_throughput", "{:.1f}%", 100),
    ("latency p50", "latency_p50_ms", "{:.1f}", 1),
    ("latency p99", "latency_p99_ms", "{:.1f}", 1),
    ("host CPU/step", "host_cpu_ms_per_step", "{:.2f}", 1),
    ("tok/s", "delivered_tok_s", "{:.0f}", 1),
    ("POST p50", "post_p50_ms", "{:.0f}", 1),
    ("others' cores", "others_cores", "{:.2f}", 1),
)


def table(results: list[dict]) -> str:
    head = ["step", "mode", *(column[0] for column in COLUMNS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in results:
        cells = [
            pattern.format(row["figures"][key]["median"] * scale) if key in row["figures"] else ""
            for _, key, pattern, scale in COLUMNS
        ]
        lines.append(f"| {row['step_ms']} ms {row['kind']} | {row['mode']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def drive(rounds: int, window_s: float, json_path: str | None) -> None:
    load_average = os.getloadavg()[0]
    measured: dict[tuple[str, str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="split-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        library, plan_loops = compile_device(directory), calibrate_plan(PLAN_US)
        setups: dict[str, Setup] = {}
        for mode in MODES:
            setups[mode] = Setup(mode, directory / mode, library, plan_loops)
            stack.callback(setups[mode].kill)
            setups[mode].start()
            setups[mode].pause()
        for n in range(rounds):
            print(f"round {n + 1} of {rounds}", file=sys.stderr, flush=True)
            for kind, step_ms in LOADS:
                for i in range(len(MODES)):
                    setups[MODES[(n + i) % len(MODES)]].measure(kind, step_ms, window_s)
        for mode, setup in setups.items():
            for window, result in setup.finish():
                measured.setdefault((mode, window.kind, window.step_ms), []).append(result)
    results = [
        {"kind": kind, "step_ms": ms, "mode": mode, "figures": summarise(measured[mode, kind, ms])}
        for kind, ms in LOADS
        for mode in MODES
    ]
    print(table(results))
    if json_path:
        settings = {
            "rounds": rounds,
            "window_s": window_s,
            "streams": NUM_STREAMS,
            "plan_us": PLAN_US,
            "short_switch_interval_s": SHORT_SWITCH_INTERVAL_S,
            "results": results,
        }
        write_json(json_path, report("process_split", load_average, settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="windows of each mode and step length")
    parser.add_argument("--window", type=float, default=2.0, help="measured seconds of each")
    parser.add_argument("--json", metavar="FILE", help="write medians and spread here")
    args = parser.parse_args()
    drive(args.rounds, args.window, args.json)


if __name__ == "__main__":
    main()
