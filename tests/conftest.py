"""What tests share: the real models, and what is slow to make, made once in a test run."""

import os
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_llama
from twinjet import kernels
from twinjet.checkpoints.pull import resolve_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        type=lambda path: Path(path).resolve(),
        help="library of CPU kernels to test; default: the package's own",
    )


def pytest_configure(config: pytest.Config) -> None:
    library = config.getoption("kernels")
    if library is not None:
        kernels.LIBRARY = library  # before the modules that take its path are imported


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of Twinjet's own, without models; engines keep their compiled programs there."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a tiny random model that can chat, with a context of 512 tokens."""
    return str(write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model, fetched if it is not on this machine."""
    return resolve_model("smollm2", _users_home()).path


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """The base model with a SentencePiece vocabulary, fetched if it is not on this machine."""
    return resolve_model("gemma3-270m", _users_home()).path


def _users_home() -> Path:
    """Where `twinjet pull` puts models, so that a test run fetches none twice."""
    return Path(os.environ.get("TWINJET_HOME") or "~/.cache/twinjet").expanduser()
