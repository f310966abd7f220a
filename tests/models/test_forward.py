"""Logits of tiny random models against a forward pass written from the papers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.forward import whole_prompt_logits
from tests.models.naive import NaiveModel
from tests.tiny_models import write_tiny_gemma3, write_tiny_llama

LLAMAS: dict[str, dict[str, Any]] = {
    "tied, quantised": {"quant": "Q8_0"},
    "untied, every head its own keys": {"tied": False, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "seed": 1},
    "rope factors": {"rope_factors": np.linspace(1.0, 8.0, 8).tolist(), "rope_theta": 500_000.0},
    "scaled positions, one head of keys": {"rope_scale": 4.0, "num_kv_heads": 1, "num_layers": 3},
}
GEMMAS: dict[str, dict[str, Any]] = {
    "windows of 24": {},
    "windows over everything, scaled positions": {"sliding_window": 4096, "rope_scale": 8.0, "num_kv_heads": 2},
    "windows of 1, a group of layers cut short": {"sliding_window": 1, "num_layers": 8, "seed": 4},
}


@pytest.mark.parametrize("change", LLAMAS.values(), ids=LLAMAS)
def test_llama(tmp_path: Path, change: dict) -> None:
    _check(write_tiny_llama(tmp_path / "model.gguf", **change))


@pytest.mark.parametrize("change", GEMMAS.values(), ids=GEMMAS)
def test_gemma3(tmp_path: Path, change: dict) -> None:
    _check(write_tiny_gemma3(tmp_path / "model.gguf", **change))


def _check(path: Path) -> None:
    token_ids = np.random.default_rng(0).integers(0, 270, 150).tolist()
    expected = NaiveModel(path).logits(token_ids)
    assert expected.std() > 0.5  # else an absolute tolerance says little
    np.testing.assert_allclose(whole_prompt_logits(path, token_ids), expected, atol=1e-4, rtol=0)
