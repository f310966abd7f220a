"""KV pages in shared memory: round trips, damage, hostile handles, leftovers of dead processes."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from twinjet.core.errors import TransferFailed
from twinjet.wire import pages as pages_module
from twinjet.wire.messages import PagesHandle
from twinjet.wire.pages import PageStore, pages_prefix, read_pages, sweep

ENDPOINT = f"ipc:///tests/{os.getpid()}/engines"


@pytest.fixture
def store():
    store = PageStore(pages_prefix(ENDPOINT, 0, 1))
    yield store
    store.close()
    assert not segments(pages_prefix(ENDPOINT))


def segments(prefix: str) -> list[Path]:
    return sorted(pages_module._directory().glob(f"{prefix}*"))


def some_pages(dtype: str = "float32", tokens: int = 5) -> np.ndarray:
    return np.random.default_rng(0).standard_normal([3, 2, tokens, 4, 8]).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pages_come_back_bit_for_bit(store: PageStore, dtype: str) -> None:
    first, second = some_pages(dtype), some_pages(dtype, tokens=70_001)
    handles = [store.write(first, 0), store.write(second, 5)]
    assert [h.start for h in handles] == [0, 5]
    for original, handle in zip([first, second], handles, strict=True):
        copy = read_pages(handle)
        assert copy.dtype == original.dtype
        assert copy.tobytes() == original.tobytes()
        copy[:] = 0
        assert read_pages(handle).tobytes() == original.tobytes(), "the copy is private"


def test_a_view_with_gaps_is_written_as_it_reads(store: PageStore) -> None:
    view = some_pages(tokens=9)[:, :, ::2]
    np.testing.assert_array_equal(read_pages(store.write(view, 0)), view)


def test_freed_pages_are_gone(store: PageStore) -> None:
    handle = store.write(some_pages(), 0)
    assert len(store) == 1
    assert store.free(handle.name)
    assert not store.free(handle.name)
    assert not store.free("../../etc/passwd")
    assert len(store) == 0
    with pytest.raises(TransferFailed, match="cannot be opened"):
        read_pages(handle)


def test_segments_are_private(store: PageStore) -> None:
    handle = store.write(some_pages(), 0)
    (path,) = segments(handle.name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"checksum": 1}, "damaged"),
        ({"dtype": "float16"}, "need .* bytes"),
        ({"dtype": "object"}, "are of type"),
        ({"shape": (3, 2, 6, 4, 8)}, "need .* bytes"),
        ({"shape": (3, 2, 1 << 60, 4, 8)}, "need .* bytes"),
        ({"shape": (-3, 2, -5, 4, 8)}, "are \\[L, 2"),
        ({"shape": (2, 3, 5, 4, 8)}, "are \\[L, 2"),
        ({"start": -1}, "are \\[L, 2"),
        ({"name": "../../etc/passwd"}, "no name"),
        ({"name": "/etc/passwd"}, "no name"),
        ({"name": ""}, "no name"),
    ],
)
def test_a_wrong_handle_is_refused(store: PageStore, changes: dict, complaint: str) -> None:
    handle = store.write(some_pages(), 0)
    with pytest.raises(TransferFailed, match=complaint):
        read_pages(msgspec.structs.replace(handle, **changes))


def test_a_name_with_a_tail_is_refused(store: PageStore) -> None:
    handle = store.write(some_pages(), 0)
    for tail in ("\n", "/../x", "0", "\0"):
        with pytest.raises(TransferFailed, match="no name"):
            read_pages(msgspec.structs.replace(handle, name=handle.name + tail))


def test_one_flipped_bit_is_found(store: PageStore) -> None:
    handle = store.write(some_pages(), 0)
    (path,) = segments(handle.name)
    content = bytearray(path.read_bytes())
    content[777] ^= 4
    path.write_bytes(content)
    with pytest.raises(TransferFailed, match="damaged"):
        read_pages(handle)


def test_a_link_is_not_followed(store: PageStore, tmp_path: Path) -> None:
    handle = store.write(some_pages(), 0)
    (path,) = segments(handle.name)
    (tmp_path / "other").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(tmp_path / "other")
    with pytest.raises(TransferFailed, match="cannot be opened"):
        read_pages(handle)


def test_no_room_is_an_error_that_leaves_nothing(store: PageStore, monkeypatch) -> None:
    def full(file: int, content: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(TransferFailed, match="No space left on device; give shared memory more room"):
        store.write(some_pages(), 0)
    assert len(store) == 0


def test_a_sweep_removes_only_what_dead_processes_left(store: PageStore) -> None:
    alive = store.write(some_pages(), 0)
    script = (
        "import os, numpy as np\n"
        "from twinjet.wire.pages import PageStore, pages_prefix\n"
        f"store = PageStore(pages_prefix({ENDPOINT!r}, 1, 0))\n"
        "print(store.write(np.ones([1, 2, 3, 1, 1], np.float32), 0).name, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    dead = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True).stdout.strip()
    assert [p.name for p in segments(pages_prefix(ENDPOINT))] == sorted([alive.name, dead])
    assert sweep(pages_prefix(ENDPOINT, 1, 1)) == 0, "another incarnation"
    assert sweep(pages_prefix(ENDPOINT, 0, 1)) == 0, "its owner lives"
    assert sweep(pages_prefix(ENDPOINT)) == 1
    assert [p.name for p in segments(pages_prefix(ENDPOINT))] == [alive.name]


def test_a_sweep_leaves_strange_files_alone() -> None:
    path = pages_module._directory() / f"{pages_prefix(ENDPOINT)}notes.txt"
    path.write_text("mine")
    try:
        assert sweep(pages_prefix(ENDPOINT)) == 0
        assert path.exists()
    finally:
        path.unlink()


def test_handles_survive_the_wire(store: PageStore) -> None:
    handle = store.write(some_pages(), 3)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=PagesHandle)
    np.testing.assert_array_equal(read_pages(again), some_pages())
