"""`twinjet serve`: one model over HTTP, until SIGINT or SIGTERM.

The port is open from the start; /health answers 503 until the engines are warm. A first signal drains, a
second one does not wait.
"""

import asyncio
import gc
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from twinjet.cli.options import (
    Context,
    DecodeEngines,
    Exact,
    KVMemory,
    MaxStreams,
    Model,
    PipelineDepth,
    PrefillEngines,
    Threads,
    TokenBudget,
    engine_options,
)
from twinjet.core.errors import ConfigError
from twinjet.options import DEFAULT_MODEL

if TYPE_CHECKING:
    from uvicorn import Server

    from twinjet.assemble import Assembly

_CLOSE_CONNECTIONS_S = 5
"""How long after the drain a connection may take to close."""


def serve(
    model: Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    context: Context = None,
    max_streams: MaxStreams = 32,
    threads: Threads = None,
    kv_memory: KVMemory = None,
    exact: Exact = False,
    token_budget: TokenBudget = None,
    pipeline_depth: PipelineDepth = 2,
    prefill: PrefillEngines = 0,
    decode: DecodeEngines = 0,
    drain_timeout: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="How long running requests may take after SIGTERM or Ctrl-C."),
    ] = 30.0,
) -> None:
    """Serve a model over HTTP: the OpenAI routes, /tokenize, /detokenize, /health and /metrics."""
    from twinjet.assemble import assemble, default_home, open_model
    from twinjet.cli.progress import ProgressReport
    from twinjet.cli.tables import print_facts

    options = engine_options(
        context=context,
        max_streams=max_streams,
        threads=threads,
        kv_memory=kv_memory,
        exact=exact,
        token_budget=token_budget,
        pipeline_depth=pipeline_depth,
        prefill=prefill,
        decode=decode,
    )
    home = default_home(os.environ)
    with _bind(host, port) as listener:
        with ProgressReport() as report:
            opened = open_model(model, home, report.pull)
        assembly = assemble(opened, options, home)
        print_facts(assembly.summary(), indent="  ", err=True)
        from uvicorn.config import Config

        loop_factory = Config("", loop="auto").get_loop_factory()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve(assembly, listener, drain_timeout))


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening: a taken port is found before anything slow begins."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --host or --port"
        ) from None
    return listener


async def _serve(assembly: "Assembly", listener: socket.socket, drain_timeout_s: float) -> None:
    from twinjet.cli.progress import ProgressReport
    from twinjet.server.app import create_app
    from twinjet.server.service import ServedModel

    model, orchestrator = assembly.model, assembly.orchestrator
    service = ServedModel(model.name, model.tokenizer, model.template, orchestrator, int(time.time()))
    server = _make_server(create_app(service))
    stop, hurry = _stop_events()
    began_s = time.monotonic()
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    stopping = asyncio.create_task(stop.wait(), name="stop signal")
    try:
        with ProgressReport() as report:
            starting = asyncio.create_task(orchestrator.start(report.engine), name="start engines")
            await asyncio.wait({serving, starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                return
            starting.result()
        # What start-up left behind is never garbage; collections need not look at it again.
        gc.collect()
        gc.freeze()
        _announce(assembly, listener, time.monotonic() - began_s)
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await _drain(assembly, drain_timeout_s, hurry)
    finally:
        stopping.cancel()
        server.should_exit = True
        server.force_exit = hurry.is_set()
        await serving
        await orchestrator.stop()


def _make_server(app: object) -> "Server":
    import uvicorn

    class _Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals are ours: a drain comes before the end of the connections."""
            yield

    # Uvicorn would otherwise log an error for each connection that outlives its grace.
    config = uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_CLOSE_CONNECTIONS_S,
    )
    return _Server(config)


def _stop_events() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first SIGINT or SIGTERM, and by the second."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    return stop, hurry


async def _drain(assembly: "Assembly", timeout_s: float, hurry: asyncio.Event) -> None:
    running = assembly.orchestrator.stats().num_requests
    if running:
        typer.echo(f"twinjet: finishing {running} requests; again to stop at once", err=True)
    draining = asyncio.create_task(assembly.orchestrator.drain(timeout_s), name="drain")
    hurrying = asyncio.create_task(hurry.wait(), name="second signal")
    await asyncio.wait({draining, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not draining.done():
        draining.cancel()
    elif not draining.result():
        typer.echo(f"twinjet: some requests did not finish within {timeout_s:g} s and were ended", err=True)


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
