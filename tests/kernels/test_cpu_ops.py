"""Whole models on the CPU kernels beside the reference ops in float32: the same models, as near as eight bits allow."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden_files import golden_cases
from tests.kernels.products import kernels
from tests.kernels.step_calls import pack
from tests.models.forward import whole_prompt_logits
from tests.ops.ragged import Rows, batch_of, table_width
from tests.tiny_models import write_tiny_gemma3, write_tiny_llama
from twinjet.checkpoints.gguf import read_checkpoint
from twinjet.core.config import CacheConfig
from twinjet.engine.kv_cache import pool_shape
from twinjet.models.config import ModelConfig
from twinjet.models.registry import forward_of, load_params
from twinjet.ops.batch import StepLayout
from twinjet.ops.cpu import CpuOps

PAGE_SIZE = 16


def kernel_logits(path: Path, token_ids: list[int], dtype: str = "float16") -> np.ndarray:
    """[T, V] of one chunk, as `whole_prompt_logits` has them."""
    checkpoint = read_checkpoint(str(path))
    config, T = checkpoint.config, len(token_ids)
    ops = CpuOps(kernels(), PAGE_SIZE)
    params = load_params(ops, config, checkpoint.tensors, lambda stage, done, total: None)
    layout = StepLayout(T, T, table_width(T, PAGE_SIZE))
    num_pages = layout.table_width + 1
    page_table = np.zeros((T, layout.table_width), np.int32)
    page_table[1] = np.arange(num_pages - 1, 0, -1)
    batch = batch_of(layout, [Rows(1, 0, T)], page_table)
    samples = dataclasses.replace(batch.samples, count=jnp.asarray(T), row=jnp.arange(T, dtype=jnp.int32))
    batch = dataclasses.replace(batch, token_ids=jnp.asarray(np.array(token_ids, np.int32)), samples=samples)
    cache = ops.create_cache(pool_shape(config, CacheConfig(PAGE_SIZE, num_pages, dtype)))  # pyright: ignore[reportArgumentType]
    logits, _ = _forward(ops, config, layout, params, cache, pack(layout, batch), np.zeros(T, np.int32))
    return np.asarray(logits)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _forward(ops: CpuOps, config: ModelConfig, layout: StepLayout, params, cache, packed, last_token):
    logits, cache = forward_of(config)(ops, config, params, cache, ops.read_batch(layout, packed, last_token))
    return logits, cache


def divergence(expected: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Kullback-Leibler, from the float32 model's distribution to the kernels', of each row."""
    p, q = (np.asarray(jax.nn.log_softmax(logits.astype(np.float32), axis=1), np.float64) for logits in (expected, got))
    return (np.exp(p) * (p - q)).sum(axis=1)


WRITERS = {"llama": write_tiny_llama, "gemma3": write_tiny_gemma3}
PROMPT = [int(token) for token in np.random.default_rng(3).integers(3, 250, 45)]


@pytest.mark.parametrize("family", list(WRITERS))
def test_float_models_agree_to_rounding(family: str, tmp_path: Path) -> None:
    path = WRITERS[family](tmp_path / "tiny.gguf")
    expected, got = whole_prompt_logits(path, PROMPT), kernel_logits(path, PROMPT, "float32")
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("family", "quant", "limit"),
    [("llama", "Q4_1", 2e-3), ("llama", "Q8_0", 4e-3), ("gemma3", "Q4_0", 4e-3), ("gemma3", "Q5_1", 4e-3)],
)
def test_quantised_models_are_close(family: str, quant: str, limit: float, tmp_path: Path) -> None:
    path = WRITERS[family](tmp_path / "tiny.gguf", quant=quant)
    expected = whole_prompt_logits(path, PROMPT)
    assert divergence(expected, kernel_logits(path, PROMPT)).mean() < limit


def test_an_untied_head_and_other_rotations(tmp_path: Path) -> None:
    path = write_tiny_llama(
        tmp_path / "tiny.gguf", tied=False, rope_scale=2.0, rope_factors=[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    )
    expected, got = whole_prompt_logits(path, PROMPT), kernel_logits(path, PROMPT, "float32")
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max())


def golden_ids(model: str, length: int) -> list[int]:
    case = max(golden_cases(model), key=lambda case: len(case["prompt_ids"]))
    return case["prompt_ids"][:length]


@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_real_models_stay_close_to_float32(model: str, smollm2_path: Path, gemma3_path: Path) -> None:
    """Activations of 8 bits make nearly all of the difference, and a few tokens of such a short text most of its mean.

    benchmarks/divergence.py has it on 20,000 tokens, beside another engine's.
    """
    path = {"smollm2-135m": smollm2_path, "gemma3-270m": gemma3_path}[model]
    ids = golden_ids(model, 128 if model == "smollm2-135m" else 64)
    expected, got = whole_prompt_logits(path, ids), kernel_logits(path, ids)
    distances = divergence(expected, got)
    assert np.median(distances) < 4e-3
    assert distances.mean() < 2e-2
    assert (expected.argmax(axis=1) == got.argmax(axis=1)).mean() > 0.9
