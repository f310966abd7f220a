"""`twinjet bench`: how fast one engine is on this machine, in the table that the field knows."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinjet.cli.options import Exact, KVMemory, KVType, Model, Threads, TokenBudget, engine_options
from twinjet.cli.results import STDOUT, JsonTarget, check_target, write_json
from twinjet.core.errors import ConfigError
from twinjet.options import DEFAULT_MODEL, default_home

if TYPE_CHECKING:
    from twinjet.assemble import OpenedModel
    from twinjet.bench.results import Result
    from twinjet.bench.suite import BenchTest
    from twinjet.core.config import EngineConfig


def bench(
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[
        str | None,
        typer.Option(
            "-p",
            "--n-prompt",
            metavar="N,...",
            help="Lengths of prompts; 0: none.  [default: 16,64,128,512,2048, as far as the model's context goes]",
        ),
    ] = None,
    generate: Annotated[
        str | None,
        typer.Option(
            "-g", "--n-gen", metavar="N,...", help="Tokens that each stream decodes; 0: none.  [default: 128]"
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option("-c", "--concurrency", metavar="N,...", help="Prompts or streams at once.  [default: 1,2,4,8,16]"),
    ] = None,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", help="Repetitions of each test.")] = 5,
    max_time: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="No further repetition of a test begins once it has taken this long; 0: no bound."
        ),
    ] = 20.0,
    threads: Threads = None,
    kv_memory: KVMemory = None,
    kv_dtype: KVType = None,
    exact: Exact = False,
    token_budget: TokenBudget = None,
    json_target: JsonTarget = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw throughput over concurrency: .png, .svg or .pdf. Needs the extra `plots`."
        ),
    ] = None,
) -> None:
    """Measure one engine, prompts (pp) and decoding (tg), each at several concurrencies."""
    from twinjet.assemble import PAGE_SIZE, local_engine_config
    from twinjet.bench.findings import findings
    from twinjet.bench.plot import check_plot, write_plot
    from twinjet.bench.suite import CONCURRENCY, GENERATED_TOKENS, PAGES_TO_BE_ADMITTED, check_room, choose_tests
    from twinjet.bench.table import markdown_table
    from twinjet.cli.session import open_with_progress

    prompts = None if prompt is None else _lengths("-p", prompt)
    generated = GENERATED_TOKENS if generate is None else _lengths("-g", generate)
    streams = CONCURRENCY if concurrency is None else _counts("-c", concurrency)
    if repetitions < 1:
        raise ConfigError(f"-r must be at least 1, got {repetitions}")
    if not 0 <= max_time < math.inf:
        raise ConfigError(f"--max-time must be 0 (no bound) or more seconds, got {max_time}")
    if json_target is not None and json_target != STDOUT:
        check_target("--json", Path(json_target))
    if plot is not None:
        check_target("--plot", plot)
        check_plot(plot)

    opened = open_with_progress(model)
    if prompts is None:
        prompts = _default_prompts(opened.config.context_length)
    tests = choose_tests(prompts, generated, streams)
    _check_context(tests, opened.config.context_length)
    least = min(PAGES_TO_BE_ADMITTED * PAGE_SIZE, opened.config.context_length)
    options = engine_options(
        context=max(least, *(test.context for test in tests)),
        max_streams=max(streams),
        threads=threads,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        exact=exact,
        token_budget=token_budget,
    )
    if token_budget is not None and token_budget < options.max_streams:
        raise ConfigError(
            f"-c {options.max_streams} needs a token budget of as many rows, got {token_budget}; "
            "raise --token-budget or lower -c"
        )
    config = local_engine_config(opened, options, default_home(os.environ))
    check_room(tests, config)
    results = _run(opened, config, tests, repetitions, max_time)
    lines = [markdown_table(results), "", *findings(results)]
    typer.echo("\n".join(lines).rstrip(), err=json_target == STDOUT)
    if json_target is not None:
        write_json(json_target, [result.record() for result in results])
    if plot is not None:
        write_plot(results, plot)


def _run(
    opened: "OpenedModel", config: "EngineConfig", tests: Sequence["BenchTest"], repetitions: int, max_time_s: float
) -> "list[Result]":
    from twinjet.bench.session import bench_model
    from twinjet.cli.progress import ProgressReport
    from twinjet.cli.tables import print_facts

    bound = f", by turns, no further one after {max_time_s:g} s of a test" if max_time_s else ""
    names = ", ".join(dict.fromkeys(test.name for test in tests))
    streams = ", ".join(map(str, dict.fromkeys(test.concurrency for test in tests)))
    print_facts(
        (
            ("model", f"{opened.name}: {opened.quantisation}"),
            ("arithmetic", "exact: float32 on dequantised weights" if config.exact else "fast"),
            ("threads", str(config.threads)),
            ("token budget", f"{config.scheduler.token_budget} rows a step"),
            ("KV pool", f"{config.cache.num_pages * config.cache.page_size} tokens in {config.cache.dtype}"),
            ("tests", f"{names}; each with {streams} at once"),
            ("repetitions", f"{repetitions} of each{bound}"),
        ),
        indent="  ",
        err=True,
    )
    with ProgressReport(still=True) as report:
        return bench_model(
            opened.name,
            config,
            tests,
            repetitions=repetitions,
            max_time_s=max_time_s or math.inf,
            on_start=lambda stage, done, total: report.engine(0, stage, done, total),
            on_test=lambda done, total, test: report.measuring(done, total, f"{test.name} x {test.concurrency}"),
        )


def _default_prompts(model_context: int) -> tuple[int, ...]:
    """Those that fit; the token that a prompt gives must fit as well."""
    from twinjet.bench.suite import PROMPT_TOKENS

    fitting = tuple(length for length in PROMPT_TOKENS if length < model_context)
    if len(fitting) < len(PROMPT_TOKENS):
        left_out = ", ".join(str(length) for length in PROMPT_TOKENS if length not in fitting)
        typer.echo(f"pp {left_out}: left out, the model's context is {model_context} tokens", err=True)
    return fitting


def _check_context(tests: Sequence["BenchTest"], model_context: int) -> None:
    longest = max(tests, key=lambda test: test.context)
    if longest.context > model_context:
        raise ConfigError(
            f"{longest.name} takes a context of {longest.context} tokens, and the model was trained for "
            f"{model_context}; lower {'-p' if longest.kind == 'pp' else '-g'}"
        )


def _lengths(option: str, text: str) -> tuple[int, ...]:
    """As `_counts`; 0 alone: none."""
    return () if text.strip() == "0" else _counts(option, text)


def _counts(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers from 1, parted by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option} must be whole numbers from 1, parted by commas, as 1,4,16; got {text!r}")
    return tuple(map(int, parts))
