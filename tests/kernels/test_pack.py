"""Packing in pieces, through a file or in memory, gives the same blob; a later start maps it and packs nothing."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.kernels.products import QUANTS, kernels, random_tensor, vector
from tests.tiny_models import write_tiny_gemma3, write_tiny_llama
from twinjet.checkpoints.gguf import read_checkpoint
from twinjet.core.config import CacheConfig, EngineConfig, SchedulerConfig
from twinjet.core.errors import CheckpointError
from twinjet.engine.engine import Engine, load_engine
from twinjet.ops import cpu_pack
from twinjet.ops.cpu_library import CpuLibrary
from twinjet.ops.cpu_pack import HUGE_PAGE_BYTES, pack_model, place_model, release_pages, write_parts
from twinjet.ops.params import RawModel

K_SHAPE = {"d_model": 256, "d_mlp": 256, "head_dim": 32, "num_heads": 8}


def packed_whole(raw: RawModel) -> np.ndarray:
    """The slow oracle: every tensor by one call of the kernel, into its place."""
    _, parts, size = place_model(raw)
    blob = np.zeros(size, np.uint8)
    for part in parts:
        (piece,) = cpu_pack._pieces(part, size)
        cpu_pack._fill(kernels(), piece, blob[part.offset : part.offset + part.size_bytes])
    return blob


def mixed_model() -> RawModel:
    """Tensors of every type, with columns that fill no panel, and one of several pieces."""
    rng = np.random.default_rng(0)
    layers = [
        {"norm": [vector(rng.normal(size=99))], "matrix": [random_tensor(rng, quant, columns, 256)]}
        for quant, columns in zip(QUANTS, range(1, 400, 33), strict=False)
    ]
    return RawModel(random_tensor(rng, "Q8_0", 3333, 512), layers, vector(rng.normal(size=7)), None)


@pytest.mark.parametrize("piece_bytes", [1, 100_000, 1 << 30])
def test_pieces_make_the_same_blob(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = mixed_model()
    expected = packed_whole(raw)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(cpu_pack, "PIECE_BYTES", piece_bytes)
    params = pack_model(kernels(), raw, lambda done, total: told.append((done, total)))
    np.testing.assert_array_equal(params.blob, expected)
    assert told == sorted(set(told))
    assert told[-1][0] == told[-1][1]


@pytest.mark.parametrize(("piece_bytes", "stage_bytes"), [(1, 1), (50_000, 3 << 20), (1 << 20, 2 << 20), (1 << 30, 1)])
def test_runs_join_to_the_same_blob(piece_bytes: int, stage_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_pack, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(cpu_pack, "STAGE_BYTES", stage_bytes)
    rng = np.random.default_rng(1)
    raw = replace(mixed_model(), head=random_tensor(rng, "F32", 5000, 300))
    expected = packed_whole(raw)
    found, runs = np.zeros_like(expected), []

    def put(offset: int, data: np.ndarray) -> None:
        found[offset : offset + len(data)] = data
        runs.append((offset, offset + len(data)))

    _, parts, _ = place_model(raw)
    write_parts(kernels(), parts, put, lambda done, total: None)
    np.testing.assert_array_equal(found, expected)
    assert all(stop == start for (_, stop), (start, _) in pairwise(runs))
    assert all(start % HUGE_PAGE_BYTES == 0 for start, _ in runs)
    assert piece_bytes > 1 << 20 or len(runs) > 1


def test_a_write_that_fails_ends_the_packing() -> None:
    _, parts, _ = place_model(mixed_model())

    def fail(offset: int, data: np.ndarray) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_parts(kernels(), parts, fail, lambda done, total: None)


CONFIG = EngineConfig(
    model_path="",
    cache=CacheConfig(page_size=16, num_pages=8, dtype="float16"),
    scheduler=SchedulerConfig(max_streams=2, context=64, token_budget=16),
    exact=False,
    threads=2,
)


class Starts:
    """Engines that share a folder, and how many tensors each has packed."""

    def __init__(self, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kernels()
        self.config = replace(CONFIG, model_path=str(path), packed_dir=str(folder))
        self.stages: list[str] = []
        self._written: list[int] = []
        write = cpu_pack.write_parts

        def count(library: CpuLibrary, parts: list, put: Callable, report: Callable) -> None:
            self._written.append(len(parts))
            write(library, parts, put, report)

        monkeypatch.setattr(cpu_pack, "write_parts", count)

    def start(self, **changes: str | None) -> np.ndarray:
        """A new engine's blob."""
        return np.asarray(self.blob(**changes))

    def blob(self, **changes: str | None) -> jax.Array:
        self.stages.clear()
        engine: Engine = load_engine(replace(self.config, **changes), lambda stage, *_: self.stages.append(stage))  # pyright: ignore[reportArgumentType]
        return engine._params.blob

    @property
    def packings(self) -> int:
        return len(self._written)


MODELS = {
    "llama-Q4_K": (write_tiny_llama, {"quant": "Q4_K", "tied": False, **K_SHAPE}),
    "gemma3-Q8_0": (write_tiny_gemma3, {"quant": "Q8_0"}),
}


@pytest.fixture(params=list(MODELS))
def starts(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    write, shape = MODELS[request.param]
    return Starts(write(tmp_path / "tiny.gguf", **shape), tmp_path / "packed", monkeypatch)


def test_a_second_engine_has_the_same_bits_and_packs_nothing(starts: Starts) -> None:
    first = starts.start()
    assert {"hash", "pack", "map"} == set(starts.stages)
    second = starts.start()
    assert "pack" not in starts.stages
    assert starts.packings == 1
    in_memory = starts.start(packed_dir=None)
    assert set(starts.stages) == {"pack"}
    np.testing.assert_array_equal(first, in_memory)
    np.testing.assert_array_equal(second, in_memory)


def test_engines_read_the_file_itself(starts: Starts) -> None:
    starts.start()
    address = starts.blob().unsafe_buffer_pointer()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.endswith(".packed")
            assert line.split()[1] == "r--s"
            return
    pytest.fail("the weights are mapped nowhere")


def test_a_change_of_the_layout_is_seen_even_if_its_version_is_the_old_one(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = starts.start()
    pack = CpuLibrary.pack

    def otherwise(self: CpuLibrary, number: int, quant: int, data: np.ndarray, shape: tuple, out: np.ndarray) -> bool:
        finite = pack(self, number, quant, data, shape, out)
        out[:] = out[::-1].copy()
        return finite

    monkeypatch.setattr(CpuLibrary, "pack", otherwise)
    after = starts.start()
    assert starts.packings == 2
    assert (before != after).any()
    monkeypatch.undo()
    np.testing.assert_array_equal(starts.start(), before)


def test_a_new_layout_version_is_packed_anew(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    before = starts.start()
    monkeypatch.setattr(cpu_pack, "LAYOUT_VERSION", cpu_pack.LAYOUT_VERSION + 1)
    np.testing.assert_array_equal(starts.start(), before)
    assert starts.packings == 2


def test_a_folder_that_cannot_be_used_is_said_once(starts: Starts, capsys: pytest.CaptureFixture[str]) -> None:
    Path(starts.config.packed_dir or "").write_bytes(b"a file stands there")
    np.testing.assert_array_equal(starts.start(), starts.start(packed_dir=None))
    said = capsys.readouterr().err
    assert said.count("WARNING") == said.count("\n") == 1
    assert "cannot be kept" in said


def test_numbers_that_are_not_finite_are_named_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    data = np.memmap(path, np.uint8, "r+")
    tensor = read_checkpoint(path).tensors["blk.1.ffn_down.weight"].data.tobytes()
    at = bytes(data).index(tensor)
    data[at : at + 4] = np.frombuffer(np.float32(np.inf).tobytes(), np.uint8)
    data.flush()
    starts = Starts(path, tmp_path / "packed", monkeypatch)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down\.weight"):
        starts.start()
    assert not [each for each in (tmp_path / "packed").iterdir() if each.suffix in (".packed", ".part")]


def test_pages_of_the_model_file_are_let_go(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 4096)
    mapped = np.memmap(tmp_path / "file", np.uint8, "r")
    part = mapped[5000:900_000]
    held = part.copy()
    before = resident_kib(tmp_path / "file")
    release_pages(part)
    assert before - resident_kib(tmp_path / "file") > 800
    np.testing.assert_array_equal(part, held)


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_pages_that_may_have_been_written_are_kept(mode: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100_000))
    mapped = np.memmap(tmp_path / "file", np.uint8, mode)  # pyright: ignore[reportArgumentType, reportCallIssue]
    mapped[:] = 3
    release_pages(mapped)
    release_pages(held := np.full(100_000, 4, np.uint8))
    assert (mapped == 3).all()
    assert (held == 4).all()


def resident_kib(path: Path) -> int:
    """Of this process's mapping of a file."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(path)):
            return next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
    return 0
