"""A model file's hash is computed once, and again whenever the file may hold something else."""

import hashlib
import os
from pathlib import Path

import pytest

from twinjet.checkpoints import content_hash
from twinjet.checkpoints.content_hash import hash_contents

HELD = b"weights" * 1000


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that were read whole, in order. Files need not rest before their hash is remembered."""
    original, read = content_hash.sha256_of, []
    monkeypatch.setattr(content_hash, "sha256_of", lambda path, report: read.append(path) or original(path, report))
    monkeypatch.setattr(content_hash, "SETTLED_S", -1.0)
    return read


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(HELD)
    return path


def digest(*paths: Path) -> str:
    return hash_contents(paths, paths[0].parent / "memory", lambda stage, done, total: None)


def test_it_is_the_sha256_and_read_once(model: Path, reads: list[Path]) -> None:
    assert digest(model) == digest(model) == hashlib.sha256(HELD).hexdigest()
    assert reads == [model]


def test_a_renamed_file_may_be_read_again_and_has_the_same_hash(model: Path, reads: list[Path]) -> None:
    before = digest(model)
    assert digest(model.rename(model.with_name("other.gguf"))) == before


def test_an_edit_that_keeps_size_and_modification_time_is_seen(model: Path, reads: list[Path]) -> None:
    before, times = digest(model), model.stat()
    with model.open("r+b") as file:
        file.write(b"W")
    os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert model.stat().st_mtime_ns == times.st_mtime_ns
    assert digest(model) == hashlib.sha256(b"W" + HELD[1:]).hexdigest() != before


def test_another_file_in_its_place_is_seen(model: Path, reads: list[Path]) -> None:
    before = digest(model)
    other = model.with_name("new")
    other.write_bytes(HELD[::-1])
    other.replace(model)
    assert digest(model) != before


def test_a_file_that_has_just_changed_is_not_remembered(
    model: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_hash, "SETTLED_S", 60.0)
    assert digest(model) == digest(model)
    assert reads == [model, model]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"sha256": 3}', bytes(range(256))])
def test_a_damaged_note_is_as_none(model: Path, reads: list[Path], damage: bytes) -> None:
    before = digest(model)
    (note,) = (model.parent / "memory").iterdir()
    note.write_bytes(damage)
    assert digest(model) == before
    assert reads == [model, model]
    assert digest(model) == before
    assert len(reads) == 2


def test_no_place_for_notes_is_no_error(model: Path, reads: list[Path]) -> None:
    (model.parent / "memory").write_bytes(b"a file, no folder")
    assert digest(model) == digest(model)
    assert len(reads) == 2


def test_the_parts_of_a_model_and_their_order_count(model: Path, reads: list[Path]) -> None:
    second = model.with_name("second.gguf")
    second.write_bytes(b"more")
    assert len({digest(model), digest(second), digest(model, second), digest(second, model)}) == 4


def test_it_says_how_far_it_is(model: Path, reads: list[Path]) -> None:
    told = []
    hash_contents([model], model.parent / "memory", lambda *each: told.append(each))
    assert told == [("hash", len(HELD), len(HELD))]
