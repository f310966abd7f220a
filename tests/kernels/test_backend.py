"""Which backend an engine gets, and what it says where the kernels cannot run."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels.products import kernels
from tests.tiny_models import write_tiny_llama
from twinjet.checkpoints.gguf import read_checkpoint
from twinjet.core.config import CacheConfig, EngineConfig, SchedulerConfig
from twinjet.engine import backend
from twinjet.engine.backend import choose_ops
from twinjet.kernels import KernelsUnavailable
from twinjet.models.config import ModelConfig
from twinjet.ops.cpu_library import load_library

CONFIG = EngineConfig(
    model_path="",
    cache=CacheConfig(page_size=16, num_pages=8, dtype="float16"),
    scheduler=SchedulerConfig(max_streams=2, context=64, token_budget=16),
    exact=False,
    threads=2,
)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return read_checkpoint(str(write_tiny_llama(tmp_path / "tiny.gguf"))).config


def test_kernels_unless_exact_is_asked_for(model: ModelConfig, capsys: pytest.CaptureFixture[str]) -> None:
    kernels()
    assert choose_ops(CONFIG, model).name.startswith("cpu kernels (AVX")
    assert choose_ops(replace(CONFIG, exact=True), model).name == "reference (cpu)"
    assert capsys.readouterr().err == ""


def test_a_missing_library_is_said_loudly(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backend, "load_library", lambda: load_library(tmp_path / "none.so"))
    assert choose_ops(CONFIG, model).name == "reference (cpu)"
    said = capsys.readouterr().err
    assert "WARNING" in said
    assert "install a C++ compiler" in said
    assert said.count("\n") == 1


def test_a_library_that_does_not_load_is_told_from_one_that_is_missing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    with pytest.raises(KernelsUnavailable, match="do not load"):
        load_library(broken)


@pytest.mark.parametrize("change", ["heads", "pages"])
def test_models_that_do_not_fit_get_the_reference_ops(
    change: str, model: ModelConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    if change == "heads":
        ops = choose_ops(CONFIG, replace(model, head_dim=24))
    else:
        ops = choose_ops(replace(CONFIG, cache=replace(CONFIG.cache, page_size=8)), model)
    assert ops.name == "reference (cpu)"
    assert "whole 16s" in capsys.readouterr().err
