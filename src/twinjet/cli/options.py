"""Options that several commands share, with the text that their help shows."""

from typing import Annotated

import typer

from twinjet.core.config import KVDtype, PolicyName
from twinjet.machine import parse_bytes
from twinjet.options import EngineOptions

MODEL_HELP = "A known name (see `twinjet models`), a GGUF file, or hf:org/repo[:file]."

Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
Context = Annotated[
    int | None,
    typer.Option(help="Most tokens of one sequence, prompt and answer.  [default: the model's own, capped by memory]"),
]
MaxStreams = Annotated[int, typer.Option(help="Sequences that each engine runs at once.")]
Threads = Annotated[
    int | None,
    typer.Option(help="Compute threads of each engine.  [default: the physical cores, shared between engines]"),
]
KVMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of each engine's KV pool, as 512MiB or 2GiB.  [default: 1/8 of the memory, shared between "
        "engines; at least one context, at most one for each stream]",
    ),
]
Exact = Annotated[
    bool, typer.Option("--exact", help="Reference arithmetic: float32 on the dequantised weights, float32 KV.")
]
TokenBudget = Annotated[
    int | None, typer.Option(help="Most rows in one step.  [default: 512, or as many as there are streams]")
]
PipelineDepth = Annotated[int, typer.Option(help="Steps planned ahead: the one running and those queued behind it.")]
PrefixCache = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache", help="Keep the KV of prompts and answers for requests that begin alike."
    ),
]
ITLTarget = Annotated[
    float | None,
    typer.Option(
        metavar="MS",
        help="Longest step, as predicted, while anybody decodes: lower for smoother streams, higher for faster "
        "prompts.  [default: room for a chunk of good throughput beside all streams]",
    ),
]
Policy = Annotated[
    PolicyName,
    typer.Option(
        help="balanced: prompts in chunks beside the streams; prefill-first: streams wait for prompts; decode-first: "
        "prompts get little beside streams."
    ),
]
KVType = Annotated[
    KVDtype | None,
    typer.Option(
        "--kv-dtype",
        help="What keys and values are kept in; int8 takes about half of float16.  "
        "[default: float16; float32 with --exact]",
    ),
]
MaxWaiting = Annotated[
    int, typer.Option(help="Requests that may wait for a slot; more are sent away at once, to come again later.")
]
PrefillEngines = Annotated[
    int, typer.Option("--prefill", metavar="N", help="Disaggregated: engines that only prefill; with --decode.")
]
DecodeEngines = Annotated[
    int, typer.Option("--decode", metavar="N", help="Disaggregated: engines that only decode; with --prefill.")
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Tokens to generate at most.  [default: until the context is full]")
]
TopK = Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Sample from the most likely tokens of this joint probability.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the most likely one.")]
Seed = Annotated[int | None, typer.Option(help="Repeats a sampled answer.  [default: drawn anew]")]


def engine_options(
    *,
    context: int | None,
    max_streams: int,
    threads: int | None,
    kv_memory: str | None,
    kv_dtype: KVDtype | None,
    exact: bool,
    token_budget: int | None,
    pipeline_depth: int = 2,
    prefix_cache: bool = True,
    paced: bool = False,
    itl_target: float | None = None,
    policy: PolicyName = "balanced",
    max_waiting: int = 512,
    prefill: int = 0,
    decode: int = 0,
) -> EngineOptions:
    """Raises: ConfigError."""
    return EngineOptions(
        context=context,
        max_streams=max_streams,
        threads=threads,
        kv_memory=parse_bytes(kv_memory) if kv_memory is not None else None,
        kv_dtype=kv_dtype,
        exact=exact,
        token_budget=token_budget,
        pipeline_depth=pipeline_depth,
        prefix_cache=prefix_cache,
        paced=paced,
        itl_target_ms=itl_target,
        policy=policy,
        max_waiting=max_waiting,
        prefill_engines=prefill,
        decode_engines=decode,
    )
