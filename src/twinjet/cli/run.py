"""`twinjet run`: one prompt, one answer, streamed to standard output."""

import sys
from typing import Annotated

import typer

from twinjet.cli.options import (
    MODEL_HELP,
    Context,
    DecodeEngines,
    Exact,
    KVMemory,
    KVType,
    MaxTokens,
    MinP,
    PrefillEngines,
    Seed,
    Threads,
    TokenBudget,
    TopK,
    TopP,
    engine_options,
)
from twinjet.core.errors import InvalidRequest
from twinjet.options import DEFAULT_MODEL


def run(
    words: Annotated[list[str], typer.Argument(metavar="[MODEL] PROMPT", help='The prompt; "-" reads standard input.')],
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = DEFAULT_MODEL,
    max_tokens: MaxTokens = None,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    context: Context = None,
    threads: Threads = None,
    kv_memory: KVMemory = None,
    kv_dtype: KVType = None,
    exact: Exact = False,
    token_budget: TokenBudget = None,
    prefill: PrefillEngines = 0,
    decode: DecodeEngines = 0,
) -> None:
    """Answer one prompt. A model with a chat template answers, a base model continues the text."""
    from twinjet.cli.session import open_with_progress, sampling_params, start_with_progress

    if len(words) > 2:
        raise InvalidRequest(f"expected [MODEL] PROMPT, got {len(words)} words; put the prompt in quotes")
    if len(words) == 2:
        model = words[0]
    prompt = sys.stdin.read() if words[-1] == "-" else words[-1]
    sampling = sampling_params(temperature, top_k, top_p, min_p, seed)
    options = engine_options(
        context=context,
        max_streams=1,
        threads=threads,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        exact=exact,
        token_budget=token_budget,
        prefill=prefill,
        decode=decode,
    )
    with start_with_progress(open_with_progress(model), options) as llm:
        if raw or llm.assembly.model.template is None:
            deltas = llm.stream(prompt, sampling, max_tokens=max_tokens)
        else:
            deltas = llm.stream_chat([{"role": "user", "content": prompt}], sampling, max_tokens=max_tokens)
        for delta in deltas:
            typer.echo(delta.text, nl=False)
        typer.echo()
