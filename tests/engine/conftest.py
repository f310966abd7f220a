"""Warm engines on one tiny model and each backend, shared, because each costs seconds of compiling."""

from pathlib import Path

import pytest

from tests.engine.drive import Told, engine_config, warm_engine
from tests.models.naive import NaiveModel
from tests.tiny_models import write_tiny_llama
from twinjet.engine.engine import Engine


@pytest.fixture(scope="package")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("engine") / "tiny.gguf", context=1024)


@pytest.fixture(scope="package")
def naive(model_path: Path) -> NaiveModel:
    return NaiveModel(model_path)


@pytest.fixture(scope="package", params=["reference", "cpu kernels"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="package")
def engine(model_path: Path, backend: str) -> Engine:
    """Pages of 16 tokens, float32; buckets of 1, 8 and 32 rows."""
    engine = warm_engine(engine_config(model_path, 16, "float32", 32, exact=backend == "reference"))
    assert engine.backend.startswith(backend)
    return engine


@pytest.fixture(scope="package")
def small_told(backend: str) -> Told:
    """What `small_engine` told."""
    return Told()


@pytest.fixture(scope="package")
def small_engine(model_path: Path, backend: str, small_told: Told) -> Engine:
    """The smallest there is: one slot, steps of one row; pages of 64 tokens, float16."""
    config = engine_config(model_path, 64, "float16", 1, exact=backend == "reference", max_streams=1)
    return warm_engine(config, small_told)
