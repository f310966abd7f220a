"""What engines foretell for each `--itl-target`, written down before the first request, and then measured.

    python -m benchmarks.itl_target [--targets auto,15,30,60,120,200] [--repetitions 4]

Each target has an engine of its own. What it foretells is printed, and written to the `--json` file, before it gets a
request; nothing is left out afterwards. A repetition then measures, as the clients see it:

    TTFT alone          one prompt with nobody else there
    TTFT beside streams one prompt at a time beside streams of about 512 tokens
    ITL                 of streams of about 512 tokens while there is no prompt, and while a long one is computed
    prefill             tokens over TTFT alone, of that prompt for which it is foretold to be best
    decode              tokens per second of as many streams as there are slots

Prompts are random token ids, new each time; only what the streams begin with is in the prefix cache. Errors are
relative to the prediction: of the median, and the 95th percentile of all single measurements'. In the summary each
prediction counts alike, however often it was measured. A stall bound is a limit, and has a line of its own: gaps from
a prompt's arrival to its first token. `cost_drift` is the engine's own account, after each repetition, of how much
longer steps take than modelled; `others_cores` what other programs took of the machine meanwhile.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from benchmarks.foretold.engine import ForetoldEngine
from benchmarks.foretold.figures import compare, errors_percent, predictions, stalls, summarise
from benchmarks.provenance import others_cpu_s, report, write_json
from twinjet import AsyncLLM
from twinjet.core.types import Forecast
from twinjet.options import EngineOptions

MAX_STREAMS = 16


async def measure(
    model: str, target: str, repetitions: int, on_told: Callable[[Forecast], None]
) -> tuple[dict[str, Any], list[tuple[str, np.ndarray]]]:
    """Figures of one target, and (kind, errors) of its predictions; `on_told` comes before the first request."""
    began_s, others_s = time.monotonic(), others_cpu_s()
    itl_target_ms = None if target == "auto" else float(target)
    options = EngineOptions(paced=True, itl_target_ms=itl_target_ms, max_streams=MAX_STREAMS)
    drifts: list[float] = []
    async with AsyncLLM(model, options=options) as llm:
        orchestrator = llm.assembly.orchestrator
        told = orchestrator.info.forecast
        if told is None:
            raise RuntimeError("expected a forecast, but the engine has measured no steps")
        on_told(told)
        engine = ForetoldEngine(llm, orchestrator.info, told)
        await engine.warm()
        for _ in range(repetitions):
            await engine.repeat()
            stats = orchestrator.stats().engines[0].stats
            drifts += [] if stats is None else [round(stats.cost_drift, 3)]
    foretold = predictions(told)
    figures = {
        "quantities": [compare(each, engine.values[each.name]) for each in foretold],
        "stalls": stalls(told, engine.stalls_ms),
        "cost_drift": drifts,
        # The engine has ended, so its time is known for ours.
        "others_cores": round((others_cpu_s() - others_s) / (time.monotonic() - began_s), 2),
    }
    return figures, [(each.kind, errors_percent(each, engine.values[each.name])) for each in foretold]


def print_told(target: str, told: Forecast) -> None:
    print(f"\ntarget {target}, {told.itl_target_ms:.1f} ms, foretells")
    for each in predictions(told):
        print(f"    {each.name:<34}{each.value:>10.1f} {each.unit}", flush=True)


def print_measured(target: str, figures: dict[str, Any]) -> None:
    print(f"{'target':>6}  {'quantity':<34}{'predicted':>10}{'median':>10}{'p95':>10}{'of median':>11}{'at p95':>9}")
    for row in figures["quantities"]:
        print(
            f"{target:>6}  {row['quantity']:<34}{row['predicted']:>10.1f}{row['median']:>10.1f}{row['p95']:>10.1f}"
            f"{row['error_of_median_percent']:>+10.1f}%{row['error_p95_percent']:>8.1f}%"
        )
    print("  ".join(f"{name} {figures[name]}" for name in ("stalls", "cost_drift", "others_cores")), flush=True)


def print_summary(summary: dict[str, dict[str, float]]) -> None:
    print("\nerrors of single measurements")
    for kind, errors in summary.items():
        print(f"    {kind:<12}median {errors['median_percent']:5.1f}%  p95 {errors['p95_percent']:5.1f}%")


def sweep(targets: Sequence[str], args: argparse.Namespace) -> None:
    load_average = os.getloadavg()[0]
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    results: list[dict[str, Any]] = []
    errors: list[tuple[str, np.ndarray]] = []

    def write(summary: dict[str, Any] | None) -> None:
        figures = {"settings": settings, "summary": summary, "results": results}
        write_json(args.json, report("itl_target", load_average, figures))

    def freeze(target: str, told: Forecast) -> None:
        print_told(target, told)
        results.append({"itl_target": target, "forecast": asdict(told)})
        if args.json and args.json != "-":
            write(None)

    for target in targets:
        figures, each = asyncio.run(measure(args.model, target, args.repetitions, partial(freeze, target)))
        results[-1] |= figures
        errors += each
        print_measured(target, figures)
    summary = summarise(errors)
    print_summary(summary)
    if args.json:
        write(summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--targets", default="auto,15,30,60,120,200", help="milliseconds, or auto")
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--json", metavar="FILE", help="write the results here, - for standard output")
    args = parser.parse_args()
    sweep(args.targets.split(","), args)


if __name__ == "__main__":
    main()
