"""What tests that start real engine processes share, so that each program is compiled once in a test run."""

from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_llama


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of Twinjet's own, without models; engines keep their compiled programs there."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a tiny random model that can chat, with a context of 512 tokens."""
    return str(write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf"))
