"""Models from the Hugging Face hub, with a hub of our own in the client's place."""

import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from tests.checkpoints.test_parts import write_parts
from tests.tiny_models import write_tiny_llama
from twinjet.checkpoints.gguf import read_checkpoint
from twinjet.checkpoints.pull import list_models, resolve_model
from twinjet.core.errors import CheckpointError


def http_error(kind: type[Exception]) -> Exception:
    """An error of the client without the response that it would come with, whose class differs between versions."""
    error = kind.__new__(kind)
    error.args = ("from the hub",)
    return error


@dataclass
class FakeHub:
    """Repositories as folders; counts what is asked of it."""

    folder: Path
    down: Exception | None = None
    wrong_hash: bool = False
    num_listings: int = 0
    num_downloads: int = 0
    noticed: threading.Event | None = None
    """Where set to an event: a download stays unfinished until it happens."""

    def model_info(self, repository: str, files_metadata: bool = False) -> SimpleNamespace:
        assert files_metadata
        self.num_listings += 1
        if self.down is not None:
            raise self.down
        folder = self.folder / repository
        if not folder.is_dir():
            raise http_error(errors.RepositoryNotFoundError)
        siblings = []
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                digest = "0" * 64 if self.wrong_hash else hashlib.sha256(path.read_bytes()).hexdigest()
                siblings.append(
                    SimpleNamespace(
                        rfilename=str(path.relative_to(folder)),
                        size=path.stat().st_size,
                        lfs=SimpleNamespace(sha256=digest),
                    )
                )
        return SimpleNamespace(siblings=siblings)

    def hf_hub_download(self, repository: str, filename: str, *, local_dir: Path) -> str:
        self.num_downloads += 1
        if self.down is not None:
            raise self.down
        content = (self.folder / repository / filename).read_bytes()
        unfinished = local_dir / ".cache/huggingface/download" / f"{filename}.incomplete"
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content[:1000])
        if self.noticed is not None:
            assert self.noticed.wait(30)
        (local_dir / filename).parent.mkdir(parents=True, exist_ok=True)
        (local_dir / filename).write_bytes(content)
        unfinished.unlink()
        return str(local_dir / filename)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub(tmp_path / "hub")
    for name in ("org/one", "org/several", "org/none", "org/parts"):
        (hub.folder / name).mkdir(parents=True)
        (hub.folder / name / "README.md").write_text("about")
    write_tiny_llama(hub.folder / "org/one/One-Q8_0.gguf", quant="Q8_0")
    (hub.folder / "org/one/mmproj-One.gguf").write_bytes(b"GGUF")
    write_tiny_llama(hub.folder / "org/several/Small-Q4_0.gguf", quant="Q4_0")
    (hub.folder / "org/several/sub").mkdir()
    write_tiny_llama(hub.folder / "org/several/sub/Small-F16.gguf", quant="F16")
    (tmp_path / "split").mkdir()
    for part in write_parts(tmp_path / "split"):
        part.rename(hub.folder / "org/parts" / part.name)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.hf_hub_download)
    return hub


def test_the_only_model_of_a_repository(tmp_path: Path, hub: FakeHub) -> None:
    home = tmp_path / "home"
    events: list[tuple[str, int, int | None]] = []
    hub.noticed = noticed = threading.Event()

    def note(*event) -> None:
        events.append(event)
        if event[1] == 1000:
            noticed.set()

    resolved = resolve_model("hf:org/one", home, note)
    size = (hub.folder / "org/one/One-Q8_0.gguf").stat().st_size
    assert resolved.name == "One-Q8_0"
    assert resolved.path == home / "models/hf/org/one/One-Q8_0.gguf"
    assert read_checkpoint(resolved.path).config.architecture == "llama"
    assert ("download", 1000, size) in events
    assert ("download", size, size) in events
    assert events[-1] == ("verify", size, size)


def test_what_is_here_is_used_without_the_hub(tmp_path: Path, hub: FakeHub) -> None:
    path = resolve_model("hf:org/one", tmp_path).path
    asked = hub.num_listings, hub.num_downloads
    hub.down = ConnectionError("no network")
    assert resolve_model("hf:org/one", tmp_path).path == path
    assert resolve_model("hf:org/one:One-Q8_0.gguf", tmp_path).path == path
    assert (hub.num_listings, hub.num_downloads) == asked
    with pytest.raises(CheckpointError, match=r"cannot fetch hf:org/one from the Hugging Face hub \(no network\)"):
        resolve_model("hf:org/one", tmp_path, verify=True)


def test_several_models_are_listed_and_none_is_guessed(tmp_path: Path, hub: FakeHub) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"holds 2 models; say which as hf:org/several:FILE, .*Small-Q4_0\.gguf, sub/Small-F16\.gguf",
    ):
        resolve_model("hf:org/several", tmp_path)
    resolved = resolve_model("hf:org/several:sub/Small-F16.gguf", tmp_path)
    assert resolved.path == tmp_path / "models/hf/org/several/sub/Small-F16.gguf"
    assert resolved.path.is_file()
    assert hub.num_downloads == 1


def test_a_model_in_parts(tmp_path: Path, hub: FakeHub) -> None:
    resolved = resolve_model("hf:org/parts", tmp_path)
    assert (resolved.name, resolved.path.name) == ("model", "model-00001-of-00003.gguf")
    assert hub.num_downloads == 3
    assert len(read_checkpoint(resolved.path).tensors) == 20
    (entry,) = [entry for entry in list_models(tmp_path) if entry.name.startswith("hf:")]
    assert entry.name == "hf:org/parts:model-00001-of-00003.gguf"
    assert entry.size_bytes == sum(path.stat().st_size for path in resolved.path.parent.glob("*.gguf"))
    # With a part gone it is not there any more.
    resolved.path.with_name("model-00002-of-00003.gguf").unlink()
    assert [entry for entry in list_models(tmp_path) if entry.name.startswith("hf:")] == []
    assert resolve_model("hf:org/parts", tmp_path).path == resolved.path
    assert resolved.path.with_name("model-00002-of-00003.gguf").is_file()


def test_a_wrong_hash_leaves_nothing_behind(tmp_path: Path, hub: FakeHub) -> None:
    hub.wrong_hash = True
    with pytest.raises(
        CheckpointError, match=r"One-Q8_0\.gguf of hf:org/one has arrived damaged: expected sha256 0000"
    ):
        resolve_model("hf:org/one", tmp_path)
    assert list(tmp_path.glob("models/**/*.gguf")) == []


@pytest.mark.parametrize(
    ("down", "message"),
    [
        (
            ConnectionError("[Errno 111] Connection\nrefused"),
            r"cannot fetch .* \(\[Errno 111\] Connection refused\); check",
        ),
        (errors.OfflineModeIsEnabled("offline"), r"cannot fetch .* \(offline\)"),
        (errors.LocalEntryNotFoundError("no connection"), r"cannot fetch .* \(no connection\)"),
        (http_error(errors.GatedRepoError), r"needs its licence accepted .* `hf auth login`"),
        (TimeoutError(), r"cannot fetch .* \(TimeoutError\)"),
    ],
)
def test_an_unreachable_or_closed_hub_is_one_line(tmp_path: Path, hub: FakeHub, down: Exception, message: str) -> None:
    hub.down = down
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_model("hf:org/one", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hf:org/absent", r"hf:org/absent does not exist or is private"),
        ("hf:org/none", r"hf:org/none holds no \.gguf file"),
        ("hf:org/one:Other.gguf", r"hf:org/one has no file Other\.gguf; it has: One-Q8_0\.gguf, mmproj-One\.gguf"),
        ("hf:one", r"'hf:one' is not of the form hf:org/repo"),
        ("hf:org/one:", r"not of the form"),
        ("hf:../../etc", r"not of the form"),
        ("hf:org/one:../../x.gguf", r"must name a \.gguf file"),
        ("hf:org/one:/x.gguf", r"must name a \.gguf file"),
        ("hf:org/one:README.md", r"must name a \.gguf file"),
    ],
)
def test_specs_that_name_nothing(tmp_path: Path, hub: FakeHub, spec: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_model(spec, tmp_path)
    assert hub.num_downloads == 0


def test_listing_says_what_the_header_says_and_survives_damage(tmp_path: Path, hub: FakeHub) -> None:
    def describe(home: Path) -> list[tuple[str, str | None, str | None]]:
        return [(e.name, e.architecture, e.quant) for e in list_models(home) if e.name.startswith("hf:")]

    path = resolve_model("hf:org/one", tmp_path).path
    assert describe(tmp_path) == [("hf:org/one:One-Q8_0.gguf", "llama", None)]
    path.write_bytes(b"GGUF")
    assert describe(tmp_path) == [("hf:org/one:One-Q8_0.gguf", None, None)]
    write_tiny_llama(path, edit=lambda writer: writer.add_file_type(15))
    assert describe(tmp_path) == [("hf:org/one:One-Q8_0.gguf", "llama", "Q4_K_M")]
    assert resolve_model(describe(tmp_path)[0][0], tmp_path).path == path


def test_the_clients_progress_bars_come_back(tmp_path: Path, hub: FakeHub) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled

    before = are_progress_bars_disabled()
    resolve_model("hf:org/one", tmp_path)
    assert are_progress_bars_disabled() == before
