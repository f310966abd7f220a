"""Packed weights between starts: one process packs, nothing but a whole file of exactly this kind is ever used."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from twinjet.checkpoints import packed
from twinjet.checkpoints.packed import HEADER_BYTES, PackedWeights, list_packed

SIZE = 300_001
LAYOUT = '{"layers": []}'
ROOT = Path(__file__).parents[2]


def blob_of(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@dataclass
class Store:
    """A store of one model, and what happened there."""

    folder: Path
    model: Path
    warnings: list[str] = field(default_factory=list)
    packings: int = 0
    stages: list[str] = field(default_factory=list)

    def fetch(
        self,
        seed: int = 0,
        *,
        instruction_set: str = "avx2",
        version: int = 1,
        layout: str = LAYOUT,
        size: int = SIZE,
        pack: Callable[[packed.Put], None] | None = None,
        is_current: Callable[[np.ndarray], bool] = lambda blob: True,
    ) -> np.ndarray | None:
        """What comes out; it was packed from `blob_of(seed)`, if it was packed now."""

        def write(put: packed.Put, report: Callable[[int, int], None]) -> None:
            self.packings += 1
            if pack is not None:
                pack(put)
            half = size // 2
            put(0, blob_of(seed, size)[:half])
            report(half, size)
            put(half, blob_of(seed, size)[half:])

        weights = PackedWeights(self.folder, (self.model,), self.warnings.append)
        return weights.fetch(
            instruction_set,
            version,
            layout,
            size,
            is_current,
            write,
            lambda stage, done, total: self.stages.append(stage),
        )

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.packed"))

    def unfinished(self) -> list[Path]:
        return sorted(self.folder.glob("*.part"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"a model")
    store = Store(tmp_path / "packed", model)
    yield store
    assert not store.unfinished()


def assert_holds(blob: np.ndarray | None, seed: int, size: int = SIZE) -> None:
    assert blob is not None
    np.testing.assert_array_equal(blob, blob_of(seed, size))


def test_the_second_start_maps_what_the_first_has_packed(store: Store) -> None:
    first, second = store.fetch(1), store.fetch(2)
    assert_holds(first, 1)
    assert_holds(second, 1)
    assert store.packings == 1
    assert store.stages == ["hash", "pack", "map", "hash", "map"]
    assert not store.warnings


def test_what_is_mapped_is_aligned_and_cannot_be_written(store: Store) -> None:
    blob = store.fetch()
    assert blob is not None
    assert blob.ctypes.data % 64 == 0
    assert not blob.flags.writeable


def test_bytes_that_nobody_put_are_zeros(store: Store) -> None:
    def put_little(put: packed.Put, report: Callable[[int, int], None]) -> None:
        put(70_000, blob_of(0, 1000))

    weights = PackedWeights(store.folder, (store.model,), store.warnings.append)
    blob = weights.fetch("avx2", 1, LAYOUT, SIZE, lambda blob: True, put_little, lambda *_: None)
    expected = np.zeros(SIZE, np.uint8)
    expected[70_000:71_000] = blob_of(0, 1000)
    assert blob is not None
    np.testing.assert_array_equal(blob, expected)


def test_another_model_has_another_file(store: Store) -> None:
    other = Store(store.folder, store.model.with_name("other.gguf"))
    other.model.write_bytes(b"another model")
    assert_holds(store.fetch(1), 1)
    assert_holds(other.fetch(2), 2)
    assert_holds(store.fetch(3), 1)
    assert [Path(each.source).name for each in list_packed(store.folder)] in (
        ["model.gguf", "other.gguf"],
        ["other.gguf", "model.gguf"],
    )


def test_the_same_model_under_another_name_shares_it(store: Store) -> None:
    other = Store(store.folder, store.model.with_name("copy.gguf"))
    shutil.copy(store.model, other.model)
    store.fetch(1)
    assert_holds(other.fetch(2), 1)
    assert other.packings == 0


def test_a_model_file_that_changed_takes_the_place_of_what_it_was(store: Store) -> None:
    store.fetch(1)
    store.model.write_bytes(b"a better model")
    assert_holds(store.fetch(2), 2)
    assert len(store.files()) == 1


def test_a_newer_layout_takes_the_place_of_older_ones_only(store: Store) -> None:
    store.fetch(1, version=2)
    assert_holds(store.fetch(2, version=1), 2)
    assert_holds(store.fetch(3, version=2), 1)  # two installations that share a home
    assert_holds(store.fetch(4, version=3), 4)
    assert len(store.files()) == 1


def test_instruction_sets_stand_side_by_side(store: Store) -> None:
    store.fetch(1, instruction_set="avx2", version=1)
    assert_holds(store.fetch(2, instruction_set="avx512", version=2), 2)
    assert_holds(store.fetch(3, instruction_set="avx2", version=1), 1)


def test_other_places_of_the_same_version_are_packed_anew(store: Store) -> None:
    store.fetch(1)
    assert_holds(store.fetch(2, layout='{"layers": [1]}'), 2)
    assert_holds(store.fetch(3, layout='{"layers": [1]}', size=SIZE + 64), 3, SIZE + 64)
    assert len(store.files()) == 1


def test_the_last_look_can_refuse_a_file(store: Store) -> None:
    store.fetch(1)
    assert_holds(store.fetch(2, is_current=lambda blob: np.array_equal(blob, blob_of(2))), 2)
    assert store.packings == 2


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "cut by a byte": lambda raw: raw[:-1],
    "cut in the header": lambda raw: raw[:100],
    "header alone": lambda raw: raw[:HEADER_BYTES],
    "longer by a byte": lambda raw: raw + b"\0",
    "zeros": lambda raw: bytes(len(raw)),
    "noise": lambda raw: blob_of(9, len(raw)).tobytes(),
    "no header yet": lambda raw: bytes(HEADER_BYTES) + raw[HEADER_BYTES:],
    "another container": lambda raw: raw[:16] + b"\2" + raw[17:],
    "a bit of the layout": lambda raw: raw.replace(b"layers", b"layerz", 1),
    "a length beyond the file": lambda raw: raw[:20] + b"\xff\xff\xff\xff" + raw[24:],
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_file_is_packed_anew(store: Store, damage: str) -> None:
    store.fetch(1)
    (path,) = store.files()
    raw = path.read_bytes()
    damaged = DAMAGES[damage](raw)
    assert damaged != raw
    path.write_bytes(damaged)
    assert len(list_packed(store.folder)) <= 1
    assert_holds(store.fetch(2), 2)
    assert_holds(store.fetch(3), 2)


def test_an_error_while_packing_leaves_nothing(store: Store) -> None:
    def fail(put: packed.Put) -> None:
        put(0, blob_of(5))
        raise ValueError("not finite")

    with pytest.raises(ValueError, match="not finite"):
        store.fetch(pack=fail)
    assert not store.files()
    assert_holds(store.fetch(2), 2)


def test_a_disk_that_fills_up_is_said_once_and_nothing_is_left(store: Store) -> None:
    def fill_up(put: packed.Put) -> None:
        put(0, blob_of(5))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert store.fetch(pack=fill_up) is None
    (warning,) = store.warnings
    assert "No space left" in warning
    assert str(store.folder) in warning
    assert not store.files()


def test_a_full_disk_is_seen_before_packing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(store.model)
    full = os.statvfs_result((*real[:3], 1, 1, *real[5:]))
    monkeypatch.setattr(packed.os, "statvfs", lambda path: full)
    assert store.fetch() is None
    assert "disk space" in store.warnings[0]
    assert store.packings == 0


def test_a_folder_that_is_deleted_while_it_is_written_is_no_harm(store: Store) -> None:
    store.fetch(1)
    assert store.fetch(2, version=2, pack=lambda put: shutil.rmtree(store.folder)) is None
    assert "cannot be kept" in store.warnings[0]
    assert_holds(store.fetch(3), 3)


def test_a_folder_that_cannot_be_made_is_said(store: Store) -> None:
    store.folder.write_bytes(b"a file stands there")
    assert store.fetch() is None
    assert "cannot be kept" in store.warnings[0]
    assert store.packings == 0


def test_a_folder_that_cannot_be_written_still_serves(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that an administrator has filled; simulated, since root may write anywhere."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    store.fetch(1)
    with monkeypatch.context() as patch:
        patch.setattr(packed.filelock.FileLock, "acquire", refuse)
        assert_holds(store.fetch(2), 1)
        assert store.fetch(2, version=2) is None
    assert "Permission denied" in store.warnings[0]


CHILD = """
import sys, time
from pathlib import Path
import numpy as np
from tests.checkpoints.test_packed import Store, assert_holds
folder, model, seed, action = sys.argv[1:]
store = Store(Path(folder), Path(model))
def pack(put):
    put(0, np.full(1000, 7, np.uint8))
    print("packing", flush=True)
    if action == "hang":
        time.sleep(600)
    time.sleep(0.5)
blob = store.fetch(int(seed), pack=pack)
print("done", store.packings, int(np.sum(blob, dtype=np.int64)), *store.stages, flush=True)
"""


def child(store: Store, seed: int, action: str = "pack") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(store.folder), str(store.model), str(seed), action]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_of_two_that_start_at_once_one_packs(store: Store) -> None:
    children = [child(store, seed) for seed in (1, 2)]
    printed = [each.communicate(timeout=60)[0].splitlines()[-1].split() for each in children]
    assert [each.returncode for each in children] == [0, 0]
    assert sorted(line[1] for line in printed) == ["0", "1"]
    assert printed[0][2] == printed[1][2]
    (waited,) = (line[3:] for line in printed if line[1] == "0")
    assert waited[-1] == "map"
    assert_holds(store.fetch(3), 1 if printed[0][1] == "1" else 2)


def test_one_that_waits_says_so(store: Store) -> None:
    with child(store, 1) as packing:
        assert packing.stdout is not None
        assert packing.stdout.readline() == "packing\n"
        assert_holds(store.fetch(2), 1)
        assert packing.wait(60) == 0
    assert store.stages == ["hash", "wait_packed", "wait_packed", "map"]
    assert store.packings == 0


def test_one_that_is_killed_while_it_writes_blocks_nobody(store: Store) -> None:
    with child(store, 1, "hang") as packing:
        assert packing.stdout is not None
        assert packing.stdout.readline() == "packing\n"
        packing.kill()
    assert len(store.unfinished()) == 1
    assert not store.files()
    assert_holds(store.fetch(2), 2)
    assert store.packings == 1


def test_what_the_dead_have_left_goes_and_what_the_living_write_stays(store: Store) -> None:
    dead, living = (Store(store.folder, store.model.with_name(name)) for name in ("dead", "living"))
    for other in (dead, living):
        other.model.write_bytes(other.model.name.encode())
    with child(dead, 1, "hang") as killed, child(living, 2) as packing:
        for each in (killed, packing):
            assert each.stdout is not None
            assert each.stdout.readline() == "packing\n"
        killed.kill()
        killed.wait(60)
        assert len(store.unfinished()) == 2
        store.fetch(3)
        assert len(store.unfinished()) == 1
        assert packing.wait(60) == 0
    assert_holds(living.fetch(4), 2)
    assert len(store.files()) == 2
