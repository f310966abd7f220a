"""The fake engine of process_split.py: a device thread and a loop thread over device.cc."""

import ctypes
import gc
import queue
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from twinjet.wire.messages import Progress, Shutdown, StepTokens, Submit, ToEngine
from twinjet.wire.sockets import EngineSocket

MAX_ROWS = 32
PIPELINE_DEPTH = 2
STATE_FLOATS = 1 << 20


def compile_device(directory: Path) -> Path:
    import jax  # only here and in the engine: clients and the server of `process` mode must not pay for it

    library = directory / "device.so"
    source = Path(__file__).with_name("device.cc")
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

        library = ctypes.CDLL(str(self._directory / "device.so"))
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
