"""What a new engine process is told on its standard input: one line of JSON.

`python -m twinjet.worker` reads it, connects a DEALER socket to `endpoint` with the identity
`identity(engine_id, incarnation)`, sends `Progress` while it starts and `Ready` when it is warm.
The launching process keeps that input open for as long as the engine shall live: its end of file, which also comes
when the launching process dies, ends the engine process. The launching thread must live as long, too.
Each message is one frame. The orchestrator's end is one ROUTER socket for all its engines.
"""

from dataclasses import dataclass

import msgspec

from twinjet.core.config import EngineConfig

DEFAULT_FACTORY = "twinjet.engine.engine:load_engine"


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """Start-up orders of one engine process."""

    engine_id: int
    incarnation: int
    endpoint: str
    """ZeroMQ address of the orchestrator's ROUTER, as `ipc:///run/dir/engines` or `tcp://127.0.0.1:5555`."""
    config: EngineConfig
    factory: str = DEFAULT_FACTORY
    """`module:function` that takes (config, on_progress(stage, done, total)) and returns a `SteppingEngine`.

    Simulated devices and tests name their own.
    """


def identity(engine_id: int, incarnation: int) -> bytes:
    """What an engine process is called on the wire; told apart from its earlier incarnations."""
    return f"{engine_id}.{incarnation}".encode()


def parse_identity(raw: bytes) -> tuple[int, int] | None:
    """(engine_id, incarnation), or None if it is no identity of ours."""
    try:
        engine_id, incarnation = raw.decode("ascii").split(".")
        return int(engine_id), int(incarnation)
    except (UnicodeDecodeError, ValueError):
        return None


def dump_launch(launch: WorkerLaunch) -> bytes:
    """The line for the process's standard input."""
    return msgspec.json.encode(launch) + b"\n"


def load_launch(line: bytes) -> WorkerLaunch:
    """Raises: msgspec.MsgspecError, if `line` is not such orders; ConfigError, if its settings cannot work."""
    return msgspec.json.decode(line, type=WorkerLaunch)
