"""The engine as a real process: start-up orders, signals, its parent's death, what it costs at rest."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.fakes import expected_tokens
from tests.worker.harness import (
    ROOT,
    Server,
    child_environment,
    exit_of,
    fake_config,
    gone_within,
    process_worker,
    submit,
)
from twinjet.wire import pages as pages_module
from twinjet.wire.messages import Failed, Shutdown, Stats
from twinjet.wire.pages import pages_prefix, sweep
from twinjet.worker.loop import STATS_INTERVAL_S


def test_it_serves_and_shuts_down() -> None:
    async def scenario() -> None:
        async with Server() as server:
            with process_worker(server, fake_config(num_pages=40, context=128)) as process:
                ready = await server.until_ready()
                assert ready.pid == process.pid
                for sequence_id in range(20):
                    server.send(submit(sequence_id, [sequence_id + 1, 2, 3], 50))
                await server.until_ended(*range(20))
                for sequence_id in range(20):
                    assert server.tokens[sequence_id] == expected_tokens([sequence_id + 1, 2, 3], 50)
                server.send(Shutdown())
                code, words = await exit_of(process)
                assert (code, words) == (0, "")

    asyncio.run(scenario())


def test_threads_and_names() -> None:
    async def scenario() -> None:
        async with Server() as server:
            with process_worker(server, fake_config()) as process:
                await server.until_ready()
                tasks = Path(f"/proc/{process.pid}/task")
                names = {(task / "comm").read_text().strip() for task in tasks.iterdir()}
                assert {"tj-engine-0", "device", "transfer", "parent-watch"} <= names

    asyncio.run(scenario())


@pytest.mark.parametrize(("exact", "num_threads"), [(True, 3), (False, 1)])
def test_xla_has_the_threads_configured_or_one_beside_our_kernels(
    tmp_path: Path, exact: bool, num_threads: int
) -> None:
    (tmp_path / "report_threads.py").write_text(
        "import os\n"
        "from twinjet.core.errors import ConfigError\n"
        "def load(config, on_progress):\n"
        "    raise ConfigError('NPROC is ' + os.environ['NPROC'])\n"
    )
    config = replace(fake_config(), threads=3, exact=exact)

    async def scenario() -> None:
        async with Server() as server:
            with process_worker(server, config, factory="report_threads:load", path=str(tmp_path)):
                await server.until(lambda: server.of(Failed))
                assert server.of(Failed) == [Failed("ConfigError", f"NPROC is {num_threads}")]

    asyncio.run(scenario())


@pytest.mark.parametrize("when", ["idle", "busy", "loading"])
def test_sigterm_is_a_clean_exit_and_sigint_is_not_for_it(when: str) -> None:
    async def scenario() -> None:
        async with Server() as server:
            options = "load_ms=60000" if when == "loading" else "step_ms=5"
            with process_worker(server, fake_config(options)) as process:
                if when == "loading":
                    while not server.socket.send(0, 0, submit(0, [1], 1)):
                        await asyncio.sleep(0.01)
                    await server.until_ended(0)
                else:
                    await server.until_ready()
                    server.send(submit(0, [1, 2, 3], 5, export=True))
                    await server.exported(0)
                if when == "busy":
                    server.send(submit(1, [1, 2, 3], 250))
                    await server.until(lambda: 1 in server.tokens)
                process.send_signal(signal.SIGINT)
                await asyncio.sleep(0.1)
                assert process.poll() is None
                process.send_signal(signal.SIGTERM)
                code, words = await exit_of(process, 3)
                assert code == 0
                assert "Traceback" not in words
                assert not list(pages_module._directory().glob(f"{pages_prefix(server.socket.endpoint)}*"))

    asyncio.run(scenario())


def test_it_leaves_when_its_input_ends() -> None:
    async def scenario() -> None:
        async with Server() as server:
            with process_worker(server, fake_config("step_ms=1")) as process:
                await server.until_ready()
                server.send(submit(0, [1, 2, 3], 250))
                assert process.stdin is not None
                process.stdin.close()
                code, words = await exit_of(process, 2)
                assert code == 0, words

    asyncio.run(scenario())


@pytest.mark.parametrize("options", ["", "hang_at=1", "load_ms=60000"], ids=["idle", "hung", "loading"])
def test_it_dies_with_its_parent(options: str, tmp_path: Path) -> None:
    """The parent is killed, so it can tell nobody; another process even keeps the pipe open."""
    script = (
        "import subprocess\n"
        "from tests.worker.harness import *\n"
        "async def scenario():\n"
        "    async with Server() as server:\n"
        f"        process = spawn_worker(server.socket.endpoint, fake_config({options!r}))\n"
        "        hoarder = subprocess.Popen(['sleep', '60'], pass_fds=[process.stdin.fileno()])\n"
        f"        if not {options!r}.startswith('load'):\n"
        "            await server.until_ready()\n"
        "        while not server.socket.send(0, 0, submit(0, [1, 2, 3], 100)):\n"
        "            await asyncio.sleep(0.01)\n"
        "        await asyncio.sleep(0.2)\n"
        "        print(process.pid, hoarder.pid, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(scenario())\n"
    )
    # A killed server leaves its socket's directory behind.
    environment = child_environment() | {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True
    )
    assert parent.stdout is not None
    child, hoarder = (int(word) for word in parent.stdout.readline().split())
    try:
        assert psutil.pid_exists(child)
        parent.kill()
        parent.wait()
        assert gone_within(child, 1.0)
    finally:
        os.kill(hoarder, signal.SIGKILL)
        parent.stdout.close()


def test_a_checkpoint_that_cannot_be_read_is_left_to_the_server_to_tell() -> None:
    async def scenario() -> None:
        async with Server() as server:
            with process_worker(server, fake_config("load_error=CheckpointError")) as process:
                code, words = await exit_of(process)
                assert (code, words) == (1, "")
                await server.until(lambda: server.of(Failed))
                assert server.of(Failed) == [Failed("CheckpointError", "the fake checkpoint cannot be read")]

    asyncio.run(scenario())


@pytest.mark.parametrize("factory", ["nowhere:load", "tests.fakes:load_nothing", ":"])
def test_a_factory_that_is_not_there_is_a_config_error(factory: str) -> None:
    async def scenario() -> None:
        async with Server() as server:
            with process_worker(server, fake_config(), factory=factory) as process:
                code, words = await exit_of(process)
                assert (code, words) == (1, "")
                await server.until(lambda: server.of(Failed))
                assert server.of(Failed)[0].kind == "ConfigError"
                assert server.of(Failed)[0].text.startswith(f"no engine factory {factory}: ")

    asyncio.run(scenario())


def test_a_step_that_raises_ends_the_process_with_a_traceback_of_it() -> None:
    async def scenario() -> None:
        async with Server() as server:
            with process_worker(server, fake_config("fail_at=3")) as process:
                await server.until_ready()
                server.send(submit(0, [1, 2, 3], 100))
                code, words = await exit_of(process)
                assert code == 1
                assert "RuntimeError: the fake device failed step 3" in words
                await server.until(lambda: server.of(Failed))
                assert server.ends == {0: "error"}
                assert server.tokens[0] == expected_tokens([1, 2, 3], 2)

    asyncio.run(scenario())


@pytest.mark.parametrize("orders", ["", "garbage\n", '{"engine_id": "x"}\n'])
def test_wrong_orders_are_one_line(orders: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "twinjet.worker"], input=orders, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("engine: standard input holds no start-up orders")
    assert len(done.stderr.splitlines()) == 1


def test_pages_of_a_killed_process_can_be_swept() -> None:
    async def scenario() -> None:
        async with Server() as server:
            with process_worker(server, fake_config()) as process:
                await server.until_ready()
                server.send(submit(0, [1, 2, 3], 5, export=True))
                (handle,) = await server.exported(0)
                assert sweep(pages_prefix(server.socket.endpoint)) == 0
                process.kill()
                process.wait()
                path = pages_module._directory() / handle.name
                assert path.exists()
                assert sweep(pages_prefix(server.socket.endpoint, 0, 0)) == 1
                assert not path.exists()

    asyncio.run(scenario())


def test_at_rest_it_costs_next_to_nothing() -> None:
    async def scenario() -> None:
        async with Server() as server:
            with process_worker(server, fake_config()) as process:
                await server.until_ready()
                server.send(submit(0, [1, 2, 3], 50))
                await server.until_ended(0)
                await server.fresh_stats()
                usage = psutil.Process(process.pid)
                begin, begin_s = usage.cpu_times(), time.monotonic()
                before = len(server.of(Stats))
                await asyncio.sleep(2.5)
                end = usage.cpu_times()
                cpu_s = end.user + end.system - begin.user - begin.system
                elapsed_s = time.monotonic() - begin_s
                assert cpu_s < 0.01 * elapsed_s + 0.01, "one clock tick of tolerance"
                beats = len(server.of(Stats)) - before
                assert abs(beats - elapsed_s / STATS_INTERVAL_S) <= 2, "the heart beats at its rate, no faster"

    asyncio.run(scenario())
