"""How "auto" is resolved: pure arithmetic on a made-up model and machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twinjet.assemble import PAGE_SIZE, OpenedModel, engine_config, kv_bytes_per_token, open_model
from twinjet.core.config import EngineConfig
from twinjet.core.errors import CheckpointError, ConfigError
from twinjet.options import EngineOptions, default_home

from .tiny_models import write_tiny_llama

MEMORY = 8 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    folder = tmp_path_factory.mktemp("model")
    return open_model(str(write_tiny_llama(folder / "tiny.gguf", context=512)), folder)


def resolve(model: OpenedModel, memory: int = MEMORY, cores: int = 4, **options: Any) -> EngineConfig:
    chosen = replace(EngineOptions(), **options)  # pyright: ignore[reportArgumentType]
    return engine_config(model, chosen, Path("/home"), memory_bytes=memory, physical_cores=cores)


def test_the_home_is_the_environments_or_the_users(tmp_path: Path):
    assert default_home({"TWINJET_HOME": str(tmp_path)}) == tmp_path
    assert default_home({}) == default_home({"TWINJET_HOME": ""}) == Path.home() / ".cache" / "twinjet"


def test_an_opened_model_says_what_it_is(model: OpenedModel):
    assert model.name == "tiny"
    assert model.config.architecture == "llama"
    assert model.size_bytes == model.path.stat().st_size
    assert model.num_parameters > model.config.vocab_size * model.config.d_model
    assert model.template is not None


def test_a_file_that_is_no_model_is_refused(tmp_path: Path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(CheckpointError):
        open_model(str(tmp_path / "bad.gguf"), tmp_path)


def test_a_token_takes_keys_and_values_of_all_layers(model: OpenedModel):
    config = replace(model.config, num_layers=30, num_kv_heads=3, head_dim=64)
    assert kv_bytes_per_token(config, "float16") == 2 * 30 * 3 * 64 * 2 == 23040
    assert kv_bytes_per_token(config, "float32") == 2 * 23040


def test_a_large_machine_gives_every_stream_a_whole_context(model: OpenedModel):
    config = resolve(model, max_streams=8)
    assert config.scheduler.context == 512
    assert config.cache.num_pages * PAGE_SIZE == 8 * 512
    assert config.cache.dtype == "float16"
    assert config.threads == 4
    assert (config.scheduler.token_budget, config.scheduler.max_streams) == (512, 8)
    assert config.cache_dir == "/home/cache"
    assert config.packed_dir == "/home/packed"


def test_a_smaller_one_gives_an_eighth_of_its_memory(model: OpenedModel):
    per_token = kv_bytes_per_token(model.config, "float16")
    config = resolve(model, memory=8 * 2000 * per_token)
    assert config.cache.num_pages == 2000 // PAGE_SIZE


def test_one_context_may_take_more_than_the_eighth(model: OpenedModel):
    per_token = kv_bytes_per_token(model.config, "float16")
    config = resolve(model, memory=2 * 600 * per_token)
    assert config.scheduler.context == 512
    assert config.cache.num_pages == 512 // PAGE_SIZE


def test_a_context_that_would_take_more_than_half_is_capped(model: OpenedModel):
    per_token = kv_bytes_per_token(model.config, "float16")
    config = resolve(model, memory=2 * 300 * per_token)
    assert config.scheduler.context == 288
    assert config.cache.num_pages == 288 // PAGE_SIZE


def test_exact_keeps_the_cache_in_float32(model: OpenedModel):
    config = resolve(model, exact=True)
    assert config.exact
    assert config.cache.dtype == "float32"


def test_the_prefix_cache_is_on_unless_it_is_switched_off(model: OpenedModel):
    assert resolve(model).cache.prefix_cache
    assert not resolve(model, prefix_cache=False).cache.prefix_cache


def test_only_paced_engines_measure_their_steps(model: OpenedModel):
    assert resolve(model).calibration_s == 0
    config = resolve(model, paced=True, itl_target_ms=50.0, policy="decode-first")
    assert config.calibration_s > 0
    assert (config.scheduler.itl_target_ms, config.scheduler.policy) == (50.0, "decode-first")


@pytest.mark.parametrize(("limit", "match"), [({"itl_target_ms": 0.0}, "over 0 ms"), ({"policy": "x"}, "one of bal")])
def test_limits_that_cannot_work_are_refused(model: OpenedModel, limit: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        resolve(model, **limit)


def test_kv_memory_is_taken_as_it_is_and_caps_the_context(model: OpenedModel):
    per_token = kv_bytes_per_token(model.config, "float16")
    assert resolve(model, kv_memory=1000 * per_token).cache.num_pages == 1000 // PAGE_SIZE
    assert resolve(model, kv_memory=100 * per_token).scheduler.context == 96
    with pytest.raises(ConfigError, match="raise --kv-memory"):
        resolve(model, kv_memory=per_token)
    with pytest.raises(ConfigError, match=r"context of 200 tokens .* lower --context or raise --kv-memory"):
        resolve(model, kv_memory=100 * per_token, context=200)


def test_a_context_beyond_the_models_is_refused(model: OpenedModel):
    assert resolve(model, context=100).scheduler.context == 100
    with pytest.raises(ConfigError, match="512 tokens that the model was trained for"):
        resolve(model, context=513)


def test_the_budget_has_a_row_for_every_stream(model: OpenedModel):
    assert resolve(model, max_streams=1000).scheduler.token_budget == 1000
    with pytest.raises(ConfigError, match="raise --token-budget"):
        resolve(model, token_budget=16)


def test_engines_share_cores_and_memory(model: OpenedModel):
    assert EngineOptions(prefill_engines=1, decode_engines=2).roles == ("prefill", "decode", "decode")
    per_token = kv_bytes_per_token(model.config, "float16")
    config = resolve(model, memory=3 * 8 * 1600 * per_token, cores=4, prefill_engines=1, decode_engines=2)
    assert config.threads == 1
    assert config.cache.num_pages == 1600 // PAGE_SIZE


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_engines": 1},
        {"decode_engines": 2},
        {"prefill_engines": -1, "decode_engines": -1},
        {"context": 0},
        {"max_waiting": -1},
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, int]):
    with pytest.raises(ConfigError):
        EngineOptions(**options)  # pyright: ignore[reportArgumentType]
