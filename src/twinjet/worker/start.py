"""Brings an engine process up from its start-up orders, and ends it."""

import importlib
import logging
import sys
from collections.abc import Callable
from functools import partial

from twinjet.core.config import EngineConfig
from twinjet.core.errors import ConfigError, TwinjetError
from twinjet.engine.interface import SteppingEngine
from twinjet.wire.launch import WorkerLaunch
from twinjet.wire.sockets import EngineSocket
from twinjet.worker.loop import WorkerLoop
from twinjet.worker.process import SWITCH_INTERVAL_S, name_thread, stop_on_signal_or_orphaned

ORPHAN_EXIT_S = 0.5
"""A process whose parent has died is gone after this, finished or not."""


def run_worker(launch: WorkerLaunch) -> int:
    """Serve until told to stop; returns the process's exit code. From the main thread of a process of its own."""
    name_thread(f"tj-engine-{launch.engine_id}")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        socket = EngineSocket(launch.endpoint, launch.engine_id, launch.incarnation)
        loop = WorkerLoop(launch, socket, partial(load_engine, launch.factory, launch.config))
    except TwinjetError as error:
        logging.getLogger(__name__).error("%s", error)
        return 1
    stop_on_signal_or_orphaned(loop.request_stop, ORPHAN_EXIT_S)
    exit_code = loop.run()
    socket.close()
    return exit_code


def load_engine(factory: str, config: EngineConfig, on_progress: Callable[[str, int, int], None]) -> SteppingEngine:
    """Call the factory named `module:function`.

    Raises: ConfigError, if there is none of that name; else what the factory raises.
    """
    module_name, _, function_name = factory.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"no engine factory {factory}: {error}") from None
    return function(config, on_progress)
