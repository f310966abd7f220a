"""Loading weights: what is missing is named, and progress is told."""

import numpy as np
import pytest

from tests.tiny_models import write_tiny_gemma3, write_tiny_llama
from twinjet.checkpoints.gguf import Checkpoint, read_checkpoint
from twinjet.core.errors import CheckpointError
from twinjet.models.registry import load_params
from twinjet.ops.params import Params
from twinjet.ops.reference import ReferenceOps

LAYER = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
GEMMA3_LAYER = [*LAYER, "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = write_tiny_llama(tmp_path_factory.mktemp("registry") / "llama.gguf", tied=False)
    return read_checkpoint(str(path))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return read_checkpoint(str(write_tiny_gemma3(tmp_path_factory.mktemp("registry") / "gemma3.gguf")))


@pytest.mark.parametrize(
    "name", ["token_embd", "output_norm", "output", *(f"blk.{layer}.{part}" for layer in (0, 1) for part in LAYER)]
)
def test_a_missing_tensor_of_llama_is_named(llama: Checkpoint, name: str) -> None:
    _check_missing(llama, f"{name}.weight")


@pytest.mark.parametrize("name", ["token_embd", "output_norm", *(f"blk.5.{part}" for part in GEMMA3_LAYER)])
def test_a_missing_tensor_of_gemma3_is_named(gemma3: Checkpoint, name: str) -> None:
    _check_missing(gemma3, f"{name}.weight")


def test_weights_are_stacked_in_order(llama: Checkpoint) -> None:
    params = _load(llama)
    for layer in range(2):
        parts = [llama.tensors[f"blk.{layer}.attn_{part}.weight"].dequantize() for part in "qkv"]
        np.testing.assert_array_equal(params.layers["qkv"][layer], np.concatenate(parts))
        parts = [llama.tensors[f"blk.{layer}.ffn_{part}.weight"].dequantize() for part in ("gate", "up")]
        np.testing.assert_array_equal(params.layers["gate_up"][layer], np.concatenate(parts))
    assert params.head is not None
    np.testing.assert_array_equal(params.head, llama.tensors["output.weight"].dequantize())
    np.testing.assert_array_equal(params.embedding, llama.tensors["token_embd.weight"].dequantize())


def test_a_tied_head_takes_no_memory(gemma3: Checkpoint) -> None:
    assert _load(gemma3).head is None


def test_progress_grows_to_its_total(gemma3: Checkpoint) -> None:
    told: list[tuple[int, int]] = []
    _load(gemma3, told)
    total = gemma3.config.num_layers + 2
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert {each for _, each in told} == {total}
    assert told[-1] == (total, total)


def _check_missing(checkpoint: Checkpoint, name: str) -> None:
    tensors = {each: tensor for each, tensor in checkpoint.tensors.items() if each != name}
    assert len(tensors) == len(checkpoint.tensors) - 1
    with pytest.raises(CheckpointError, match=rf"no tensor {name},"):
        load_params(ReferenceOps(16), checkpoint.config, tensors, lambda stage, done, total: None)


def _load(checkpoint: Checkpoint, told: list[tuple[int, int]] | None = None) -> Params:
    told = [] if told is None else told
    return load_params(
        ReferenceOps(16), checkpoint.config, checkpoint.tensors, lambda stage, done, total: told.append((done, total))
    )
