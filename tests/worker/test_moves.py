"""Pages that move between engines, over real sockets and shared memory, with the fake engine."""

import asyncio
import random

import msgspec
import pytest

from tests.fakes import expected_tokens
from tests.worker.harness import Server, assert_at_rest, fake_config, random_prompt, segments, submit, thread_worker
from twinjet.wire import pages as pages_module
from twinjet.wire.messages import Abort, PagesHandle, ReleasePages, Stats

pytestmark = pytest.mark.usefixtures("frequent_stats")


def test_a_prompt_moves_from_one_engine_to_another() -> None:
    """Two page sizes and pool sizes; the second engine computes only what is left."""

    async def scenario() -> None:
        rng = random.Random(1)
        async with Server() as server:
            decode = fake_config(page_size=4, num_pages=400)
            with thread_worker(server, fake_config(page_size=16)), thread_worker(server, decode, engine_id=1):
                await server.until_ready(0)
                await server.until_ready(1)
                for sequence_id in range(0, 20, 2):
                    prompt = random_prompt(rng, 150)
                    n = rng.randint(2, 60)
                    server.send(submit(sequence_id, prompt, n, export=True))
                    handles = await server.exported(sequence_id)
                    assert server.ends[sequence_id] == "exported"
                    assert sum(handle.shape[2] for handle in handles) == len(prompt)
                    first = server.tokens[sequence_id]
                    assert first == expected_tokens(prompt, 1)
                    follow = sequence_id + 1
                    server.send(submit(follow, prompt + first, n - 1, pages=handles), 1)
                    assert await server.imported(follow, 1)
                    for handle in handles:
                        server.send(ReleasePages(handle.name))
                    await server.until_ended(follow)
                    assert first + server.tokens[follow] == expected_tokens(prompt, n)
                await assert_at_rest(server, 0)
                await assert_at_rest(server, 1)
                imported_rows = server.of(Stats, 1)[-1].rows_total
                assert imported_rows == sum(len(server.tokens[i]) for i in range(1, 20, 2)), "one row a token"
                assert not segments(server)

    asyncio.run(scenario())


def spoil_bytes(handle: PagesHandle) -> PagesHandle:
    path = pages_module._directory() / handle.name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return handle


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_bytes,
        lambda handle: msgspec.structs.replace(handle, name="../etc/passwd"),
        lambda handle: msgspec.structs.replace(handle, start=1),
        lambda handle: msgspec.structs.replace(handle, shape=(2, 2, handle.shape[2] // 2, 1, 1)),
        lambda handle: msgspec.structs.replace(handle, shape=(1, 2, handle.shape[2] // 2, 2, 1)),
        lambda handle: msgspec.structs.replace(handle, dtype="float16"),
    ],
    ids=["bit", "name", "start", "layers", "heads", "dtype"],
)
def test_bad_pages_are_recomputed(spoil) -> None:
    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config()), thread_worker(server, fake_config(), engine_id=1):
                await server.until_ready(0)
                await server.until_ready(1)
                prompt = list(range(1, 41))
                server.send(submit(0, prompt, 9, export=True))
                (handle,) = await server.exported(0)
                server.send(submit(1, prompt + server.tokens[0], 8, pages=[spoil(handle)]), 1)
                assert not await server.imported(1, 1)
                await server.until_ended(1)
                assert server.tokens[0] + server.tokens[1] == expected_tokens(prompt, 9)

    asyncio.run(scenario())


def test_pages_of_the_whole_prompt_leave_nothing_to_sample_from_and_are_refused() -> None:
    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config()):
                await server.until_ready()
                server.send(submit(0, [1, 2, 3], 9, export=True))
                handles = await server.exported(0)
                server.send(submit(1, [1, 2, 3], 9, pages=handles))
                assert not await server.imported(1)
                await server.until_ended(1)
                assert server.tokens[1] == expected_tokens([1, 2, 3], 9)

    asyncio.run(scenario())


def test_a_first_token_that_stops_exports_nothing() -> None:
    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config()):
                await server.until_ready()
                server.send(submit(0, [1, 2, 3], 9, export=True, stop=tuple(expected_tokens([1, 2, 3], 1))))
                await server.until_ended(0)
                assert server.ends[0] == "stop"
                await assert_at_rest(server)
                assert not segments(server)

    asyncio.run(scenario())


def test_an_abort_while_pages_are_fetched_ends_it_once(monkeypatch) -> None:
    gate = asyncio.Event()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        read = pages_module.read_pages

        def slow_read(handle: PagesHandle):
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(10)
            return read(handle)

        monkeypatch.setattr("twinjet.worker.transfers.read_pages", slow_read)
        async with Server() as server:
            with thread_worker(server, fake_config()):
                await server.until_ready()
                server.send(submit(0, [1, 2, 3], 9, export=True))
                handles = await server.exported(0)
                server.send(submit(1, [1, 2, 3, *server.tokens[0]], 9, pages=handles))
                server.send(submit(2, [4, 5], 9))
                await server.until_ended(2)  # others do not wait for the transfer
                assert (await server.fresh_stats()).num_waiting == 1
                server.send(Abort(1))
                await server.until_ended(1)
                gate.set()
                await assert_at_rest(server)
                assert server.ends == {0: "exported", 1: "cancelled", 2: "length"}
                assert 1 not in server.tokens

    asyncio.run(scenario())


def test_no_room_in_shared_memory_is_told(monkeypatch) -> None:
    def full(file: int, content: memoryview) -> int:
        raise OSError(28, "No space left on device")

    async def scenario() -> None:
        async with Server() as server:
            with thread_worker(server, fake_config()):
                await server.until_ready()
                with monkeypatch.context() as patch:
                    patch.setattr("twinjet.wire.pages.os.write", lambda *args: full(*args) if args[1] != b"!" else 1)
                    server.send(submit(0, [1, 2, 3], 9, export=True))
                    assert await server.exported(0) == []
                server.send(submit(1, [1, 2, 3], 3))
                await server.until_ended(1)

    asyncio.run(scenario())
