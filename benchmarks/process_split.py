"""Does an engine in its own process leave the device shorter gaps than an engine in a thread of the server?

    python benchmarks/process_split.py --json benchmarks/results/process_split.json

A fake step (process_split.cc) keeps two threads busy for a set time and reads its own stamps; its state is
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
import array
import asyncio
import contextlib
import ctypes
import gc
import json
import os
import platform
import queue
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import psutil

from twinjet.wire.messages import Progress, Shutdown, StepTokens, Submit, ToEngine
from twinjet.wire.sockets import EngineSocket, ServerSocket

SHORT_SWITCH_INTERVAL_S = 0.0001
NUM_STREAMS = 16
TOKENS_PER_REQUEST = 256
BIG_PROMPT_TOKENS = 100_000
BIG_PROMPT_INTERVAL_S = 0.5
MAX_ROWS = 32
PLAN_US = 200
SETTLE_S = 0.4
"""From waking a mode's processes to the start of its window."""
PIPELINE_DEPTH = 2
STATE_FLOATS = 1 << 20
LOADS = (("wall", 5), ("wall", 10), ("wall", 25), ("work", 10))
"""(kind of step, its milliseconds)."""
MODES = ("alone", "thread", "thread-switch", "process")


# --- engine: device thread and loop thread --------------------------------------------------------


def compile_device(directory: Path) -> Path:
    import jax  # only here and in the engine: clients and the server of `process` mode must not pay for it

    library = directory / "process_split.so"
    source = Path(__file__).with_suffix(".cc")
    command = ["c++", "-std=c++17", "-O2", "-shared", "-fPIC", "-w", f"-I{jax.ffi.include_dir()}", str(source)]
    subprocess.run([*command, "-o", str(library), "-lpthread"], check=True)
    return library


class Engine:
    """The fake engine. `poll` gives messages that wait, `publish` takes each step's tokens."""

    def __init__(self, directory: Path, poll: Callable[[], list[ToEngine]], publish: Callable[[StepTokens], None]):
        self._poll, self._publish, self._directory = poll, publish, directory
        self._control = np.memmap(directory / "control", np.int32, "r", shape=(2,))
        self._plan_loops = int((directory / "plan_loops").read_text())
        self._plans: queue.SimpleQueue = queue.SimpleQueue()
        self._results: queue.SimpleQueue = queue.SimpleQueue()
        self._running: dict[int, int] = {}
        self._stamps: list[np.ndarray] = []
        self._next_step = 0

    def warm_up(self) -> None:
        import jax

        library = ctypes.CDLL(str(self._directory / "process_split.so"))
        handler = jax.ffi.pycapsule(library.ProcessSplitStep)
        jax.ffi.register_ffi_target("process_split_step", handler, platform="cpu")
        shapes = (
            jax.ShapeDtypeStruct((STATE_FLOATS,), np.float32),
            jax.ShapeDtypeStruct((MAX_ROWS + 6,), np.int32),
        )
        call = jax.ffi.ffi_call("process_split_step", shapes, input_output_aliases={0: 0})
        self._step = jax.jit(lambda state, plan: tuple(call(state, plan)), donate_argnums=0)
        state = jax.numpy.zeros((STATE_FLOATS,), np.float32)
        address = state.unsafe_buffer_pointer()
        state, _ = self._step(state, np.array([1000, 0, 0], np.int32))
        if state.unsafe_buffer_pointer() != address:
            raise RuntimeError("the state was copied: donation does not work here, so the figures would mean nothing")
        self._state = state
        # A server worth its name does this in either mode; without it, thread mode would stall for JAX's garbage too.
        gc.collect()
        gc.freeze()

    def run(self) -> None:
        """The loop thread's body; returns after `Shutdown`, with the stamps on disk."""
        device = threading.Thread(target=self._run_device, name="device", daemon=True)
        device.start()
        for _ in range(PIPELINE_DEPTH):
            self._plans.put(self._plan())
        stopping = False
        while not stopping:
            out = self._results.get()
            for message in self._poll():
                if isinstance(message, Submit):
                    np.frombuffer(message.token_ids, np.int32)
                    self._running[message.sequence_id] = message.max_new_tokens
                elif isinstance(message, Shutdown):
                    stopping = True
            self._plans.put(self._plan())
            self._handle(np.asarray(out))
        self._plans.put(None)
        device.join()
        np.save(self._directory / "stamps.npy", np.array(self._stamps).view(np.int64))

    def _plan(self) -> np.ndarray:
        """A light scheduler's worth of Python."""
        total: dict[int, int] = {}
        for i in range(self._plan_loops):
            total[i & 15] = total.get(i & 15, 0) + i
        step_us, cpu_clock = self._control.tolist()
        self._next_step += 1
        return np.array([step_us, cpu_clock, self._next_step], np.int32)

    def _handle(self, out: np.ndarray) -> None:
        step_id = len(self._stamps)
        self._stamps.append(out[MAX_ROWS:].copy())
        sequence_ids = list(self._running)[:MAX_ROWS]
        finish = []
        for sequence_id in sequence_ids:
            self._running[sequence_id] -= 1
            finish.append("" if self._running[sequence_id] else "length")
            if not self._running[sequence_id]:
                del self._running[sequence_id]
        if sequence_ids:
            self._publish(StepTokens(step_id, sequence_ids, out[: len(sequence_ids)].tolist(), finish))

    def _run_device(self) -> None:
        state = self._state
        while (plan := self._plans.get()) is not None:
            state, out = self._step(state, plan)
            out.block_until_ready()
            self._results.put(out)


def run_engine_process(directory: Path) -> None:
    wire = EngineSocket(f"ipc://{directory}/engines", 0, 0)

    def poll() -> list[ToEngine]:
        messages = []
        while (message := wire.recv()) is not None:
            messages.append(message)
        return messages

    engine = Engine(directory, poll, wire.send)
    engine.warm_up()
    wire.send(Progress("compile", 1, 1))
    engine.run()
    wire.close()


# --- server ---------------------------------------------------------------------------------------


class CompletionBody(msgspec.Struct):
    prompt: str | list[int]
    max_tokens: int
    stream: bool = False


class Choice(msgspec.Struct):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


class Chunk(msgspec.Struct):
    id: str
    created: int
    choices: list[Choice]
    object: str = "text_completion"
    model: str = "fake"


class Streams:
    """Open streams of the server; `send` hands a message to the engine, wherever that is."""

    def __init__(self) -> None:
        self.send: Callable[[ToEngine], None] = lambda message: None
        self._open: dict[int, asyncio.Queue] = {}
        self._next_id = 0

    def publish(self, message: StepTokens) -> None:
        for sequence_id, token, finish in zip(message.sequence_ids, message.token_ids, message.finish, strict=True):
            self._open[sequence_id].put_nowait((message.step_id, token, finish or None))

    async def tokens(self, prompt: list[int], max_tokens: int):
        self._next_id += 1
        sequence_id = self._next_id
        tokens = self._open[sequence_id] = asyncio.Queue()
        known = array.array("i", prompt).tobytes()
        self.send(Submit(sequence_id, known, max_tokens, 1.0, 0, 1.0, 0.0, 0, 0, []))
        finish = None
        while not finish:
            step_id, token, finish = await tokens.get()
            yield step_id, token, finish
        del self._open[sequence_id]


@dataclass(frozen=True, slots=True)
class Running:
    """A started engine."""

    pids: list[int]
    """Processes of server and engine."""
    join: Callable[[], None]
    """Waits until the engine has written its stamps; blocks."""


def create_app(streams: Streams, on_shutdown: Callable[[], Awaitable[None]]):
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import StreamingResponse

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI):
        yield
        await on_shutdown()  # here, because uvicorn ends the process by the signal it got

    app = FastAPI(lifespan=lifespan)
    decoder, encoder = msgspec.json.Decoder(CompletionBody), msgspec.json.Encoder()

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = decoder.decode(await request.body())
        prompt = body.prompt if isinstance(body.prompt, list) else list(body.prompt.encode())
        tokens = streams.tokens(prompt, body.max_tokens)
        if not body.stream:
            ids = [token async for _, token, _ in tokens]
            return Response(encoder.encode({"prompt_tokens": len(prompt), "token_ids": ids}))

        async def events():
            async for step_id, token, finish in tokens:
                chunk = Chunk(str(step_id), 0, [Choice(0, " word", [token], finish)])
                yield b"data: " + encoder.encode(chunk) + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def start_engine_thread(directory: Path, streams: Streams) -> Running:
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    streams.send = inbox.put
    loop = asyncio.get_running_loop()

    def poll() -> list[ToEngine]:
        messages = []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(inbox.get_nowait())
        return messages

    def publish(message: StepTokens) -> None:
        loop.call_soon_threadsafe(streams.publish, message)

    engine = Engine(directory, poll, publish)
    engine.warm_up()
    thread = threading.Thread(target=engine.run, name="loop", daemon=True)
    thread.start()
    return Running([os.getpid()], thread.join)


async def start_engine_process(directory: Path, streams: Streams) -> Running:
    wire = ServerSocket(f"ipc://{directory}/engines")
    process = start_role("engine", directory)
    await wire.recv()  # the progress that says it is warm

    def send(message: ToEngine) -> None:
        if not wire.send(0, 0, message):
            raise RuntimeError("the engine is gone or has stopped reading")

    async def receive() -> None:
        while True:
            _, _, message = await wire.recv()
            if isinstance(message, StepTokens):
                streams.publish(message)

    streams.send = send
    receiving = asyncio.create_task(receive())

    def join() -> None:
        process.wait()
        receiving.get_loop().call_soon_threadsafe(receiving.cancel)

    gc.collect()
    gc.freeze()
    return Running([os.getpid(), process.pid], join)


async def run_server(directory: Path, mode: str) -> None:
    import uvicorn

    if mode == "thread-switch":
        sys.setswitchinterval(SHORT_SWITCH_INTERVAL_S)
    streams = Streams()
    if mode in ("thread", "thread-switch"):
        engine = start_engine_thread(directory, streams)
    else:
        engine = await start_engine_process(directory, streams)

    async def stop_engine() -> None:
        streams.send(Shutdown())
        await asyncio.to_thread(engine.join)

    app = create_app(streams, stop_engine)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(json.dumps({"port": listener.getsockname()[1], "pids": engine.pids}), flush=True)
    config = uvicorn.Config(app, http="httptools", log_level="warning", access_log=False, timeout_keep_alive=3600)
    await uvicorn.Server(config).serve(sockets=[listener])


# --- clients --------------------------------------------------------------------------------------


async def run_streams(directory: Path, port: int) -> None:
    """16 closed-loop SSE readers; saves (step, arrival) of every chunk when told to stop."""
    import aiohttp

    arrivals: list[tuple[int, int]] = []
    body = {"prompt": "fake " * 100, "max_tokens": TOKENS_PER_REQUEST, "stream": True}
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def reader(session: aiohttp.ClientSession) -> None:
        while not stop.is_set():
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if line.startswith(b'data: {"id":"'):
                        if not arrivals:
                            print("ready", flush=True)
                        arrivals.append((int(line[13 : line.index(b'"', 13)]), time.monotonic_ns()))

    no_timeout = aiohttp.ClientTimeout(total=None)  # pauses of the whole set-up count for nothing
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=no_timeout) as session:
        readers = [asyncio.create_task(reader(session)) for _ in range(NUM_STREAMS)]
        await asyncio.wait([*readers, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*readers)
    np.save(directory / "arrivals.npy", np.array(arrivals))


async def run_poster(directory: Path, port: int) -> None:
    """One POST of 100,000 token ids every 500 ms; saves (sent, seconds until answered)."""
    import aiohttp

    ids = [(i * 7919) % 50_000 for i in range(BIG_PROMPT_TOKENS)]
    body = json.dumps({"prompt": ids, "max_tokens": 1}).encode()
    took: list[tuple[int, float]] = []
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        at = time.monotonic()
        while not stop.is_set():
            sent = time.monotonic_ns()
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", data=body) as response:
                answer = await response.json(content_type=None)
                if answer["prompt_tokens"] != BIG_PROMPT_TOKENS:
                    raise RuntimeError(f"expected {BIG_PROMPT_TOKENS} prompt tokens, the server counted {answer}")
            if not took:
                print("ready", flush=True)
            took.append((sent, (time.monotonic_ns() - sent) / 1e9))
            at = max(at + BIG_PROMPT_INTERVAL_S, time.monotonic())  # after a pause, no catching up
            await asyncio.sleep(at - time.monotonic())
    np.save(directory / "posts.npy", np.array(took))


# --- driver ---------------------------------------------------------------------------------------


def start_role(role: str, directory: Path, *more: str, **options) -> subprocess.Popen:
    command = [sys.executable, str(Path(__file__)), "--role", role, "--directory", str(directory), *more]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "JAX_PLATFORMS": "cpu"}, **options)


def die_with_parent() -> None:
    """The parent holds the other end of standard input open for as long as it lives."""
    sys.stdin.read()
    os._exit(1)


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
        (directory / "process_split.so").symlink_to(library)
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
        result["post_p50_ms"] = float(np.median(posted) * 1e3)
    return result


def summarise(windows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median and spread of each figure over all windows."""
    columns = {key: [window[key] for window in windows] for key in windows[0]}
    return {
        key: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for key, values in columns.items()
    }


def describe_machine() -> dict[str, str | int]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def describe_commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "process_split.py", "process_split.cc", "../src/twinjet/wire")
    return git("rev-parse", "HEAD") + (" with changes" if changed else "")


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
        report = {
            "benchmark": "process_split",
            "commit": describe_commit(),
            "date": time.strftime("%Y-%m-%d"),
            "machine": describe_machine(),
            "load_average_at_start": load_average,
            "rounds": rounds,
            "window_s": window_s,
            "streams": NUM_STREAMS,
            "plan_us": PLAN_US,
            "short_switch_interval_s": SHORT_SWITCH_INTERVAL_S,
            "results": results,
        }
        Path(json_path).write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="windows of each mode and step length")
    parser.add_argument("--window", type=float, default=2.0, help="measured seconds of each")
    parser.add_argument("--json", metavar="FILE", help="write medians and spread here")
    parser.add_argument("--role", choices=("driver", "server", "engine", "streams", "poster"), default="driver")
    for internal in ("--directory", "--mode", "--port"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role != "driver":
        threading.Thread(target=die_with_parent, daemon=True).start()
    if args.role == "driver":
        drive(args.rounds, args.window, args.json)
    elif args.role == "server":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_server(Path(args.directory), args.mode))
    elif args.role == "engine":
        run_engine_process(Path(args.directory))
    elif args.role == "streams":
        asyncio.run(run_streams(Path(args.directory), int(args.port)))
    else:
        asyncio.run(run_poster(Path(args.directory), int(args.port)))


if __name__ == "__main__":
    main()
