"""The oracle itself: each part of it shows in the logits, so that agreeing with it means something."""

from pathlib import Path

import numpy as np
import pytest

from tests.models.naive import NaiveModel
from tests.tiny_models import write_tiny_gemma3, write_tiny_llama

TOKENS = list(range(3, 60))


@pytest.mark.parametrize("part", ["attn_q_norm", "post_attention_norm", "post_ffw_norm", "ffn_gate", "attn_output"])
def test_every_part_of_gemma3_matters(tmp_path: Path, part: str) -> None:
    model = NaiveModel(write_tiny_gemma3(tmp_path / "model.gguf"))
    whole = model.logits(TOKENS)
    name = f"blk.2.{part}.weight"
    model.tensors[name] = model.tensors[name] * np.linspace(0.5, 1.5, model.tensors[name].shape[-1])
    assert np.abs(model.logits(TOKENS) - whole).max() > 0.01


def test_windows_and_both_ropes_matter(tmp_path: Path) -> None:
    def logits(**change) -> np.ndarray:
        return NaiveModel(write_tiny_gemma3(tmp_path / "model.gguf", **change)).logits(TOKENS)

    plain = logits()
    for change in ({"sliding_window": 23}, {"rope_scale": 2.0}, {"rope_theta": 10_000.0}):
        assert np.abs(logits(**change) - plain).max() > 0.01, change


def test_rope_factors_matter(tmp_path: Path) -> None:
    def logits(**change) -> np.ndarray:
        return NaiveModel(write_tiny_llama(tmp_path / "model.gguf", **change)).logits(TOKENS)

    assert np.abs(logits(rope_factors=[2.0] * 8) - logits()).max() > 0.01
    np.testing.assert_allclose(logits(rope_factors=[2.0] * 8), logits(rope_scale=2.0), atol=1e-9)
