"""`twinjet serve`: one model over HTTP, until SIGINT or SIGTERM.

The port is open from the start; /health answers 503 until the engines are warm. A first signal drains, a
second one does not wait.
"""

import asyncio
import gc
import json
import logging
import os
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from twinjet.cli.options import (
    Context,
    DecodeEngines,
    Exact,
    ITLTarget,
    KVMemory,
    KVType,
    MaxStreams,
    MaxWaiting,
    Model,
    PipelineDepth,
    Policy,
    PrefillEngines,
    PrefixCache,
    Threads,
    TokenBudget,
    engine_options,
)
from twinjet.options import DEFAULT_MODEL, default_home

if TYPE_CHECKING:
    from twinjet.assemble import Assembly


def serve(
    model: Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    context: Context = None,
    max_streams: MaxStreams = 32,
    threads: Threads = None,
    kv_memory: KVMemory = None,
    kv_dtype: KVType = None,
    exact: Exact = False,
    token_budget: TokenBudget = None,
    pipeline_depth: PipelineDepth = 2,
    prefix_cache: PrefixCache = True,
    itl_target: ITLTarget = None,
    policy: Policy = "balanced",
    max_waiting: MaxWaiting = 512,
    prefill: PrefillEngines = 0,
    decode: DecodeEngines = 0,
    drain_timeout: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="How long running requests may take after SIGTERM or Ctrl-C."),
    ] = 30.0,
) -> None:
    """Serve a model over HTTP: the OpenAI routes, /tokenize, /detokenize, /health and /metrics."""
    from uvicorn.config import Config

    from twinjet.assemble import assemble, open_model
    from twinjet.cli.progress import ProgressReport
    from twinjet.cli.tables import print_facts
    from twinjet.server.serving import open_socket

    options = engine_options(
        context=context,
        max_streams=max_streams,
        threads=threads,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        exact=exact,
        token_budget=token_budget,
        pipeline_depth=pipeline_depth,
        prefix_cache=prefix_cache,
        paced=True,
        itl_target=itl_target,
        policy=policy,
        max_waiting=max_waiting,
        prefill=prefill,
        decode=decode,
    )
    home = default_home(os.environ)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Opened first: a taken port is found before anything slow begins.
    with open_socket(host, port) as listener:
        with ProgressReport() as report:
            opened = open_model(model, home, report.pulling(model))
        assembly = assemble(opened, options, home)
        print_facts(assembly.summary(), indent="  ", err=True)
        with asyncio.Runner(loop_factory=Config("", log_config=None).get_loop_factory()) as runner:
            runner.run(_serve(assembly, listener, drain_timeout, max_streams * len(options.roles) + max_waiting))


async def _serve(assembly: "Assembly", listener: socket.socket, drain_timeout_s: float, max_requests: int) -> None:
    from twinjet.cli.progress import ProgressReport
    from twinjet.cli.tables import forecast_facts, print_facts
    from twinjet.server.app import ServedModel, ServerLimits, create_app, run_server

    model, orchestrator = assembly.model, assembly.orchestrator
    service = ServedModel(model.name, model.tokenizer, model.template, orchestrator, int(time.time()))
    # What could never be let in whole is not told to come again.
    limits = ServerLimits()
    app = create_app(service, replace(limits, max_choices=min(limits.max_choices, max_requests)))
    stop = asyncio.Event()
    began_s = time.monotonic()
    serving = asyncio.create_task(
        run_server(app, listener=listener, drain_timeout_s=drain_timeout_s, stop=stop), name="http"
    )
    telling = asyncio.create_task(_tell_of_drain(assembly, stop), name="tell of the drain")
    try:
        with ProgressReport() as report:
            starting = asyncio.create_task(orchestrator.start(report.engine), name="start engines")
            await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return
            starting.result()
        # What start-up left behind is never garbage; collections need not look at it again.
        gc.collect()
        gc.freeze()
        if assembly.orchestrator.info.forecast is not None:
            print_facts(forecast_facts(assembly.orchestrator.info.forecast), indent="  ", err=True)
        _announce(assembly, listener, time.monotonic() - began_s)
        await asyncio.wait({serving})
    finally:
        stop.set()
        await serving
        telling.cancel()
        await orchestrator.stop()


async def _tell_of_drain(assembly: "Assembly", stop: asyncio.Event) -> None:
    await stop.wait()
    running = assembly.orchestrator.stats().num_requests
    if running:
        typer.echo(f"twinjet: {running} requests may finish; a second signal ends them", err=True)


def _announce(assembly: "Assembly", listener: socket.socket, took_s: float) -> None:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    model = assembly.model
    if model.template is not None:
        route, asked = "chat/completions", {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    else:
        route, asked = "completions", {"prompt": "The sky is blue because"}
    body = json.dumps({"model": model.name, **asked, "max_tokens": 64})
    backend = assembly.orchestrator.info.backend
    typer.echo(f"Ready in {took_s:.1f} s: {model.name} on http://{shown}:{port} with {backend} ops. Try:\n")
    typer.echo(f"curl http://{shown}:{port}/v1/{route} -H 'Content-Type: application/json' -d '{body}'\n")
