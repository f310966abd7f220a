"""Whole models through twinjet's engine beside llama.cpp on the same GGUF files, by turns, and ik_llama.cpp's prefill.

Q8_0 and Q4_0 are made from the default model's file by llama-quantize. llama.cpp runs with the flash attention and KV
setting that suit it best, tried first for each file and measure. Its benchmarks feed random tokens without sampling;
twinjet's samples every token. Rates are tokens per second of all streams together by the wall clock.

    python -m benchmarks.cpu_peers LLAMA_CPP_BIN [--models Q4_1,...] [--rounds 3] [--ik-llama PYTHON] [--json FILE]

PYTHON is one of an environment with ik-llama-cpp-python: python3 -m venv DIR; DIR/bin/pip install ik-llama-cpp-python
"""

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.provenance import ROOT, others_cpu_s, report, write_json
from twinjet.checkpoints.pull import resolve_model

PROMPT_TOKENS, GENERATED_TOKENS = 512, 128
STREAMS = (8, 16)
MEASURES = ("pp512", "tg", "tg x 8", "tg x 16")
TARGETS = {
    "Q4_1": (3.5, 1.6, 3.2, 3.0),
    "Q8_0": (1.6, 1.4, 2.0, 2.0),
    "Q4_0": (1.8, 1.4, 2.2, 2.3),
    "gemma3-270m": (1.5, 1.3, 1.5, 1.5),
}
"""Model -> how many times llama.cpp's rate twinjet aims at, in the order of MEASURES."""
IK_TARGET = 1.3
"""Of ik_llama.cpp's pp512, with Q4_1."""

QUIET_CORES = 0.15
"""What other processes may take while one engine has its turn; else it is measured again."""
TRIES = 3

FLASH = ("off", "on")
BATCHED_SETTINGS = [("-fa", flash, kv) for flash in FLASH for kv in ("-kvu", "-no-kvu")]

Rates = dict[str, list[float]]
"""Measure -> tokens per second, one for each round."""


class LlamaRates:
    """llama.cpp on one file, at its best settings."""

    def __init__(self, llama: LlamaCpp, model: Path, threads: int) -> None:
        self._llama, self._model, self._threads = llama, model, threads
        self.settings: dict[str, str] = {}

    def choose_settings(self) -> None:
        for measure, options in (("pp512", ["-p", str(PROMPT_TOKENS), "-n", "0"]), ("tg", ["-p", "0", "-n", "32"])):
            rates = {flash: self._bench([*options, "-fa", flash]) for flash in FLASH}
            self.settings[measure] = max(FLASH, key=lambda flash: rates[flash])
        tried = {setting: self._batched(setting, 16) for setting in BATCHED_SETTINGS}
        for streams in STREAMS:
            best = max(BATCHED_SETTINGS, key=lambda setting: tried[setting][streams])
            self.settings[f"tg x {streams}"] = " ".join(best)

    def measure(self) -> dict[str, float]:
        prompts = ["-p", str(PROMPT_TOKENS), "-n", "0", "-fa", self.settings["pp512"]]
        generation = ["-p", "0", "-n", str(GENERATED_TOKENS), "-fa", self.settings["tg"]]
        rates = {"pp512": self._bench(prompts), "tg": self._bench(generation)}
        by_setting: dict[str, dict[int, float]] = {}
        for streams in STREAMS:
            setting = self.settings[f"tg x {streams}"]
            if setting not in by_setting:
                by_setting[setting] = self._batched(setting.split(), GENERATED_TOKENS)
            rates[f"tg x {streams}"] = by_setting[setting][streams]
        return rates

    def _bench(self, options: list[str]) -> float:
        threads = ["-t", str(self._threads), "-r", "1"]
        said = self._llama.run("llama-bench", "-m", self._model, *threads, "-o", "json", *options)
        (row,) = json.loads(said)
        return row["avg_ts"]

    def _batched(self, setting: list[str] | tuple[str, ...], tokens: int) -> dict[int, float]:
        """Streams -> decoded tokens per second."""
        context = max(STREAMS) * (tokens + 1)
        sizes = ["-c", str(max(512, context)), "-npp", "1", "-ntg", str(tokens), "-npl", ",".join(map(str, STREAMS))]
        threads = ["-t", str(self._threads), "-tb", str(self._threads)]
        said = self._llama.run(
            "llama-batched-bench", "-m", self._model, *sizes, *threads, *setting, "--output-format", "jsonl"
        )
        rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        return {row["pl"]: row["speed_tg"] for row in rows}


def measure_twinjet(model: Path, threads: int) -> dict[str, float]:
    rates = {}
    runs = (
        ["-p", str(PROMPT_TOKENS), "-g", str(GENERATED_TOKENS), "-c", "1"],
        ["-p", "0", "-g", str(GENERATED_TOKENS), "-c", ",".join(map(str, STREAMS))],
    )
    for options in runs:
        command = [sys.executable, "-m", "twinjet", "bench", str(model), *options, "--threads", str(threads)]
        command += ["-r", "1", "--json", "-"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"twinjet bench failed ({done.returncode}):\n{done.stderr[-2000:]}")
        for row in json.loads(done.stdout):
            kind, streams = row["test"].split()[0], row["concurrency"]
            name = f"pp{PROMPT_TOKENS}" if kind == "pp" else "tg" if streams == 1 else f"tg x {streams}"
            rates[name] = row["wall_tokens_per_s"]
    return rates


def measure_ik_llama(python: Path, model: Path, threads: int) -> float:
    script = ROOT / "benchmarks/peers/ik_prefill.py"
    command = [python, script, model, str(PROMPT_TOKENS), str(threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


@contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Alone on the machine, as far as others take the same lock."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure_quietly(measure: Callable[[], dict[str, float]]) -> tuple[dict[str, float], float]:
    """The quietest of a few tries, and the cores that others took in it: threads that spin suffer most from them."""
    tries = []
    for _ in range(TRIES):
        began_s, before_s = time.monotonic(), others_cpu_s()
        rates = measure()
        tries.append((rates, (others_cpu_s() - before_s) / (time.monotonic() - began_s)))
        if tries[-1][1] <= QUIET_CORES:
            break
    return min(tries, key=lambda tried: tried[1])


def measure_model(name: str, model: Path, llama: LlamaCpp, args: argparse.Namespace) -> dict[str, Any]:
    theirs = LlamaRates(llama, model, args.threads)
    turns: dict[str, Callable[[], dict[str, float]]] = {
        "llama_cpp": theirs.measure,
        "twinjet": lambda: measure_twinjet(model, args.threads),
    }
    python: Path | None = args.ik_llama
    if python is not None and name == "Q4_1":
        turns["ik_llama_cpp"] = lambda: {"pp512": measure_ik_llama(python, model, args.threads)}
    engines: dict[str, Rates] = {engine: {} for engine in turns}
    others: Rates = {engine: [] for engine in turns}
    with turn(args.lock):
        theirs.choose_settings()
        for index in range(args.rounds):
            # Whoever comes first may find a cooler processor.
            for engine in list(turns) if index % 2 == 0 else reversed(turns):
                rates, others_cores = measure_quietly(turns[engine])
                others[engine].append(round(others_cores, 3))
                for measure, rate in rates.items():
                    engines[engine].setdefault(measure, []).append(rate)
    medians = {
        engine: {measure: statistics.median(rates) for measure, rates in by_measure.items()}
        for engine, by_measure in engines.items()
    }
    ratios = {measure: medians["twinjet"][measure] / medians["llama_cpp"][measure] for measure in MEASURES}
    result = {"file": model.name, "llama_cpp_settings": theirs.settings, "rounds": engines, "medians": medians}
    result["others_cores"] = others
    result["ratios"] = ratios
    result["targets"] = dict(zip(MEASURES, TARGETS[name], strict=True))
    if "ik_llama_cpp" in medians:
        result["ratio_to_ik_llama_cpp"] = {"pp512": medians["twinjet"]["pp512"] / medians["ik_llama_cpp"]["pp512"]}
        result["target_to_ik_llama_cpp"] = {"pp512": IK_TARGET}
    return result


def show(name: str, result: dict[str, Any]) -> None:
    most = max(max(cores) for cores in result["others_cores"].values())
    if most > QUIET_CORES:
        print(f"{name:12} DISTURBED: other processes took {most:.2f} cores in one of its turns; measure it again")

    def spread(engine: str, measure: str) -> str:
        rates = result["rounds"][engine][measure]
        return f"{statistics.median(rates):7.1f} ({min(rates):.1f}-{max(rates):.1f})"

    rows = [("llama_cpp", m, result["ratios"][m], result["targets"][m]) for m in MEASURES]
    for measure, ratio in result.get("ratio_to_ik_llama_cpp", {}).items():
        rows.append(("ik_llama_cpp", measure, ratio, result["target_to_ik_llama_cpp"][measure]))
    for peer, measure, ratio, target in rows:
        verdict = "" if ratio >= target else "  missed"
        ours, other = spread("twinjet", measure), spread(peer, measure)
        print(f"{name:12} {measure:8} {ours:24} {peer:13} {other:24} {ratio:5.2f} of {target}{verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("--models", default=",".join(TARGETS), help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ik-llama", type=Path, metavar="PYTHON", help="a Python that has ik-llama-cpp-python")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/peers", help="where model files that it makes go")
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help="flock this for each model: others may be timing, too"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results here, - for standard output")
    args = parser.parse_args()
    names = args.models.split(",")
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        parser.error(f"--models: {', '.join(unknown)}; known: {', '.join(TARGETS)}")
    load_average = os.getloadavg()[0]
    llama = LlamaCpp(args.llama_cpp)
    args.folder.mkdir(parents=True, exist_ok=True)
    home = Path(os.environ.get("TWINJET_HOME") or "~/.cache/twinjet").expanduser()
    results = {}
    for name in names:
        model = resolve_model("smollm2" if name.startswith("Q") else name, home).path
        if name in ("Q8_0", "Q4_0"):
            model = llama.requantize(model, name, args.folder)
        results[name] = measure_model(name, model, llama, args)
        show(name, results[name])
    if args.json:
        figures = {"llama_cpp": llama.version(), "threads": args.threads, "rounds": args.rounds, "models": results}
        write_json(args.json, report("cpu_peers", load_average, figures))


if __name__ == "__main__":
    main()
