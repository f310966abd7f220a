"""Serving beside llama.cpp's server: the same closed loop of streams on both, by turns, on the same machine.

    python -m benchmarks.serving LLAMA_CPP_FOLDER --json FILE

LLAMA_CPP_FOLDER holds llama.cpp's programs (build/bin). Its server runs the default model as it is and in two types
that its own llama-quantize makes of it, because no one type is its best in everything; `twinjet serve` runs the default
model. Load is benchmarks/load.py in a process of its own. Each round starts every server anew and measures it once;
figures are medians over the rounds. The last row compares ours with the best of theirs in each column.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.provenance import others_cpu_s, report, write_json
from twinjet.assemble import open_model
from twinjet.options import DEFAULT_MODEL, default_home

START_S = 180.0
STOP_S = 20.0

COLUMNS = {
    "output tok/s": lambda run: run["output_throughput"],
    "TTFT p50, ms": lambda run: run["ttft_ms"]["median"],
    "TPOT p50, ms": lambda run: run["tpot_ms"]["median"],
    "worst gap, ms": lambda run: run["worst_gap_ms"],
}
"""Of the first more is better, of the others less."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A server to be measured."""

    name: str
    command: tuple[str, ...]
    """`{port}` stands for the port to listen on."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_healthy(url: str, server: subprocess.Popen) -> None:
    """Raises RuntimeError, if the server ends or takes too long."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"{server.args} ended with {server.returncode} before it was healthy")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{server.args} was not healthy within {START_S:.0f} s")


@contextmanager
def running(contender: Contender) -> Iterator[str]:
    """The URL of a server that is started for it, once it is healthy.

    Raises: RuntimeError, with the end of the server's log, for whatever fails meanwhile.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [part.format(port=port) for part in contender.command]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_healthy(url, server)
            yield url
        except Exception as error:
            log.seek(0)
            raise RuntimeError(f"{contender.name}: {error}\n{log.read()[-2000:]}") from error
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def measure(contender: Contender, load: Sequence[str]) -> dict:
    """What benchmarks/load.py reports of a server that is started for it, and the cores that others took meanwhile."""
    began_s, others_s = time.monotonic(), others_cpu_s()
    with running(contender) as url:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.load", "--url", url, *load, "--json", "-"],
            stdout=subprocess.PIPE,
            check=False,  # 1 says that some requests failed: the report tells which
            text=True,
        )
        run = json.loads(done.stdout)
    others_cores = (others_cpu_s() - others_s) / (time.monotonic() - began_s)
    if run["failed_requests"]:
        print(f"{contender.name}: {run['failed_requests']} requests failed: {run['failures']}", file=sys.stderr)
    return {**run, "others_cores": round(others_cores, 3)}


def contenders(llama: LlamaCpp, model: Path, folder: Path, args: argparse.Namespace) -> list[Contender]:
    context = args.streams * 1024
    found = []
    for quant in (None, "Q8_0", "Q4_0"):
        path = model if quant is None else llama.requantize(model, quant, folder)
        command = [
            str(llama.folder / "llama-server"), "-m", str(path), "--port", "{port}", "-np", str(args.streams),
            "-t", str(args.threads), "-c", str(context),
        ]  # fmt: skip
        found.append(Contender(f"llama.cpp {quant or 'Q4_1'}", tuple(command)))
    ours = [
        sys.executable, "-m", "twinjet", "serve", DEFAULT_MODEL, "--port", "{port}", "--threads", str(args.threads),
        "--max-streams", str(args.streams),
    ]  # fmt: skip
    return [*found, Contender("twinjet Q4_1", tuple(ours))]


def table(figures: dict[str, dict[str, float]]) -> str:
    """A Markdown table, with how ours compares with the best of theirs."""
    lines = ["| server | " + " | ".join(COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    lines += [
        f"| {name} | " + " | ".join(f"{row[column]:.1f}" for column in COLUMNS) + " |" for name, row in figures.items()
    ]
    ratios = compare(figures)
    lines.append("| ours / best of theirs | " + " | ".join(f"{ratios[column]:.2f}" for column in COLUMNS) + " |")
    return "\n".join(lines)


def compare(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    """Column -> ours / the best of theirs."""
    (ours,) = (row for name, row in figures.items() if name.startswith("twinjet"))
    theirs = [row for name, row in figures.items() if not name.startswith("twinjet")]
    first, *rest = COLUMNS
    ratios = {first: ours[first] / max(row[first] for row in theirs)}
    return ratios | {column: ours[column] / min(row[column] for row in theirs) for column in rest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path, metavar="LLAMA_CPP_FOLDER")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompt-words", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the models that llama-quantize makes here")
    parser.add_argument("--json", metavar="FILE", help="write the results here, - for standard output")
    args = parser.parse_args()
    load_average = os.getloadavg()[0]
    llama = LlamaCpp(args.llama_cpp)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="twinjet-serving-"))
    folder.mkdir(parents=True, exist_ok=True)
    load = [
        "--concurrency", str(args.streams), "--requests", str(args.requests), "--prompt-words", str(args.prompt_words),
        "--max-tokens", str(args.max_tokens),
    ]  # fmt: skip
    try:
        model = open_model(DEFAULT_MODEL, default_home(os.environ)).path
        servers = contenders(llama, model, folder, args)
        runs: dict[str, list[dict]] = {server.name: [] for server in servers}
        for index in range(args.rounds):
            # Whoever comes first may find a cooler processor.
            for server in servers if index % 2 == 0 else reversed(servers):
                runs[server.name].append(measure(server, load))
                last = {column: round(value(runs[server.name][-1]), 1) for column, value in COLUMNS.items()}
                print(f"round {index + 1}: {server.name}: {last}", file=sys.stderr, flush=True)
    finally:
        if args.keep is None:
            shutil.rmtree(folder)
    figures = {
        name: {column: statistics.median(map(value, measured)) for column, value in COLUMNS.items()}
        for name, measured in runs.items()
    }
    print(table(figures), file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in ("llama_cpp", "keep", "json")}
        results = {
            "settings": settings,
            "llama_cpp": llama.version(),
            "medians": figures,
            "ours_to_the_best_of_theirs": compare(figures),
            "runs": runs,
        }
        write_json(args.json, report("serving", load_average, results))


if __name__ == "__main__":
    main()
