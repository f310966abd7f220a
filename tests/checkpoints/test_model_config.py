"""What a GGUF file says about the shape and arithmetic of its model."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from tests.tiny_models import bpe_vocab, spm_vocab, write_tiny_gemma3, write_tiny_llama
from twinjet.checkpoints.gguf import read_checkpoint
from twinjet.checkpoints.tensors import required_tensors
from twinjet.core.errors import CheckpointError

Edit = Callable[[GGUFWriter], None]


def set_key(key: str, value: object, kind: GGUFValueType, sub_type: GGUFValueType | None = None) -> Edit:
    """Add a key, or change it whatever its type was."""

    def edit(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, kind, sub_type=sub_type)

    return edit


def drop_key(*keys: str) -> Edit:
    def edit(writer: GGUFWriter) -> None:
        for key in keys:
            del writer.kv_data[0][key]

    return edit


def test_llama(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", num_layers=3, context=777, rope_theta=5e5, name="Tiny One")
    checkpoint = read_checkpoint(path)
    config = checkpoint.config
    assert (config.architecture, config.name, config.num_layers) == ("llama", "Tiny One", 3)
    assert (config.d_model, config.d_mlp, config.num_heads, config.num_kv_heads) == (64, 128, 4, 2)
    assert (config.head_dim, config.context_length, config.vocab_size) == (16, 777, len(bpe_vocab().tokens))
    assert config.norm_eps == pytest.approx(1e-5)
    assert (config.activation, config.tied_head) == ("silu", True)
    assert (config.rope.theta, config.rope.dims, config.rope.pairing) == (5e5, 16, "adjacent")
    assert (config.rope.scale, config.rope.factors) == (1.0, None)
    assert (config.rope_local, config.sliding_window, config.embedding_scale) == (None, None, 1.0)
    assert not any(config.is_windowed(layer) for layer in range(3))
    assert set(checkpoint.tensors) == {name for name, _ in required_tensors(config)}
    assert checkpoint.size_bytes == path.stat().st_size
    assert checkpoint.path == path


def test_llama_with_its_own_head_scaled_positions_and_frequency_factors(tmp_path: Path) -> None:
    factors = [1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    path = write_tiny_llama(tmp_path / "m.gguf", tied=False, rope_scale=4.0, rope_factors=factors)
    checkpoint = read_checkpoint(path)
    assert not checkpoint.config.tied_head
    assert checkpoint.tensors["output.weight"].shape == (len(bpe_vocab().tokens), 64)
    assert checkpoint.config.rope.scale == 4.0
    assert checkpoint.config.rope.factors == tuple(factors)
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_head_size_defaults_to_the_share_of_the_width(tmp_path: Path) -> None:
    edit = drop_key(
        "llama.attention.key_length",
        "llama.attention.value_length",
        "llama.rope.dimension_count",
        "llama.vocab_size",
        "llama.rope.freq_base",
        "general.name",
    )
    config = read_checkpoint(write_tiny_llama(tmp_path / "nameless.gguf", edit=edit)).config
    assert (config.head_dim, config.rope.dims, config.rope.theta) == (16, 16, 10_000.0)
    assert (config.vocab_size, config.name) == (len(bpe_vocab().tokens), "nameless")


def test_key_value_heads_default_to_the_heads(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", num_kv_heads=4, edit=drop_key("llama.attention.head_count_kv"))
    assert read_checkpoint(path).config.num_kv_heads == 4


@pytest.mark.parametrize("kind", ["UINT8", "UINT16", "INT32", "UINT32", "INT64", "UINT64"])
def test_integers_of_any_width(tmp_path: Path, kind: str) -> None:
    edit = set_key("llama.attention.head_count_kv", 2, GGUFValueType[kind])
    assert read_checkpoint(write_tiny_llama(tmp_path / "m.gguf", edit=edit)).config.num_kv_heads == 2


def test_one_value_repeated_for_each_layer(tmp_path: Path) -> None:
    key = "llama.feed_forward_length"
    same = set_key(key, [128, 128], GGUFValueType.ARRAY, GGUFValueType.INT32)
    assert read_checkpoint(write_tiny_llama(tmp_path / "same.gguf", edit=same)).config.d_mlp == 128
    other = set_key(key, [128, 64], GGUFValueType.ARRAY, GGUFValueType.INT32)
    path = write_tiny_llama(tmp_path / "other.gguf", edit=other)
    with pytest.raises(CheckpointError, match=r"feed_forward_length differs from layer to layer"):
        read_checkpoint(path)


def test_scaling_without_a_type_is_linear_and_none_is_none(tmp_path: Path) -> None:
    factor = set_key("llama.rope.scaling.factor", 8.0, GGUFValueType.FLOAT32)
    assert read_checkpoint(write_tiny_llama(tmp_path / "a.gguf", edit=factor)).config.rope.scale == 8.0
    old = set_key("llama.rope.scale_linear", 2.0, GGUFValueType.FLOAT32)
    assert read_checkpoint(write_tiny_llama(tmp_path / "b.gguf", edit=old)).config.rope.scale == 2.0

    def none(writer: GGUFWriter) -> None:
        factor(writer)
        writer.add_string("llama.rope.scaling.type", "none")

    assert read_checkpoint(write_tiny_llama(tmp_path / "c.gguf", edit=none)).config.rope.scale == 1.0


def test_gemma3(tmp_path: Path) -> None:
    path = write_tiny_gemma3(tmp_path / "m.gguf", num_layers=7, rope_scale=8.0)
    checkpoint = read_checkpoint(path)
    config = checkpoint.config
    assert (config.architecture, config.num_layers, config.activation, config.tied_head) == (
        "gemma3",
        7,
        "gelu_tanh",
        True,
    )
    assert config.vocab_size == len(spm_vocab().tokens)
    assert config.embedding_scale == math.sqrt(64)
    assert config.query_scale == pytest.approx(32**-0.5)
    assert (config.rope.theta, config.rope.scale, config.rope.pairing) == (1e6, 8.0, "halves")
    assert config.rope_local is not None
    assert (config.rope_local.theta, config.rope_local.scale, config.rope_local.pairing) == (1e4, 1.0, "halves")
    assert config.sliding_window == 24
    assert [config.is_windowed(layer) for layer in range(7)] == [True] * 5 + [False, True]
    assert checkpoint.tensors["blk.6.post_ffw_norm.weight"].shape == (64,)
    assert checkpoint.tensors["blk.0.attn_k_norm.weight"].shape == (32,)


def test_gemma3_local_base_and_period_from_the_file(tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_rope_freq_base_swa(20_000.0)
        writer.add_sliding_window_pattern(3)

    config = read_checkpoint(write_tiny_gemma3(tmp_path / "m.gguf", edit=edit)).config
    assert config.rope_local is not None
    assert config.rope_local.theta == 20_000.0
    assert [config.is_windowed(layer) for layer in range(6)] == [True, True, False, True, True, False]


@pytest.mark.parametrize(
    "windowed",
    [[True, False] * 3, [True] * 5 + [False], [True] * 6, [False] * 6, [True, True, True, False, True, True]],
)
def test_gemma3_windowed_layers_marked_one_by_one(tmp_path: Path, windowed: list[bool]) -> None:
    path = write_tiny_gemma3(tmp_path / "m.gguf", edit=lambda writer: writer.add_sliding_window_pattern(windowed))
    config = read_checkpoint(path).config
    assert [config.is_windowed(layer) for layer in range(6)] == windowed


def test_gemma3_windowed_layers_without_a_period_are_refused(tmp_path: Path) -> None:
    windowed = [False, True, True, False, False, True]
    path = write_tiny_gemma3(tmp_path / "m.gguf", edit=lambda writer: writer.add_sliding_window_pattern(windowed))
    with pytest.raises(CheckpointError, match="sliding_window_pattern"):
        read_checkpoint(path)


def test_gemma3_without_a_window(tmp_path: Path) -> None:
    path = write_tiny_gemma3(tmp_path / "m.gguf", edit=drop_key("gemma3.attention.sliding_window"))
    config = read_checkpoint(path).config
    assert (config.sliding_window, config.rope_local) == (None, None)
    assert not any(config.is_windowed(layer) for layer in range(6))


def test_gemma3_of_62_layers_scales_queries_by_the_width_per_head(tmp_path: Path) -> None:
    path = write_tiny_gemma3(tmp_path / "m.gguf", num_layers=62, d_model=32, d_mlp=32, num_heads=2, head_dim=32)
    assert read_checkpoint(path).config.query_scale == pytest.approx((32 // 2) ** -0.5)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop_key("llama.block_count"), r"lacks the key llama\.block_count"),
        (drop_key("llama.context_length"), r"lacks the key llama\.context_length"),
        (drop_key("llama.attention.layer_norm_rms_epsilon"), r"lacks the key .*epsilon"),
        (drop_key("general.architecture"), r"lacks the key general\.architecture"),
        (
            set_key("general.architecture", "qwen2", GGUFValueType.STRING),
            r"'qwen2', which is not supported; .*gemma3, llama",
        ),
        (
            set_key("general.architecture", 5, GGUFValueType.UINT32),
            r"general\.architecture is of type UINT32, expected a string",
        ),
        (set_key("llama.block_count", "two", GGUFValueType.STRING), r"block_count is of type STRING, expected"),
        (
            set_key("llama.block_count", 2.0, GGUFValueType.FLOAT32),
            r"block_count is of type FLOAT32, expected an integer",
        ),
        (set_key("llama.block_count", 0, GGUFValueType.UINT32), r"block_count is 0, expected 1"),
        (set_key("llama.context_length", -1, GGUFValueType.INT32), r"context_length is -1"),
        (set_key("llama.attention.head_count_kv", 3, GGUFValueType.UINT32), r"4 attention heads cannot share 3"),
        (set_key("llama.attention.value_length", 32, GGUFValueType.UINT32), r"value_length is 32 with heads of 16"),
        (set_key("llama.rope.dimension_count", 8, GGUFValueType.UINT32), r"dimension_count is 8 with heads of 16"),
        (
            set_key("llama.rope.scaling.type", "yarn", GGUFValueType.STRING),
            r"'yarn', which is not supported; supported: none, linear",
        ),
        (set_key("llama.rope.scaling.factor", -2.0, GGUFValueType.FLOAT32), r"scaling\.factor is -2"),
        (set_key("llama.rope.freq_base", 0.0, GGUFValueType.FLOAT32), r"freq_base is 0\.0, expected a positive"),
        (set_key("llama.rope.freq_base", math.nan, GGUFValueType.FLOAT32), r"freq_base is nan, expected a finite"),
        (set_key("llama.expert_count", 8, GGUFValueType.UINT32), r"expert_count is 8, which is not supported"),
        (set_key("llama.final_logit_softcapping", 30.0, GGUFValueType.FLOAT32), r"final_logit_softcapping is 30"),
        (set_key("llama.attention.causal", False, GGUFValueType.BOOL), r"not a causal model"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, edit: Edit, message: str) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", edit=edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_frequency_factors_are_refused(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", rope_factors=[1.0] * 7 + [0.0])
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight .* must be positive"):
        read_checkpoint(path)
    path = write_tiny_llama(tmp_path / "n.gguf", rope_factors=[1.0] * 5)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight .* has the shape \[5\], expected \[8\]"):
        read_checkpoint(path)
    ones = np.ones(16, np.float32)
    path = write_tiny_gemma3(tmp_path / "g.gguf", edit=lambda writer: writer.add_tensor("rope_freqs.weight", ones))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight, which is not supported in a gemma3 model"):
        read_checkpoint(path)


def test_a_model_larger_than_memory_opens_at_once(tmp_path: Path) -> None:
    """The server process reads configuration and vocabulary only; here the tensors are 80 GB of hole."""
    small = read_checkpoint(write_tiny_llama(tmp_path / "small.gguf"))
    d_mlp = 300_000_000
    path = tmp_path / "large.gguf"
    writer = GGUFWriter(path, "llama")
    small_file = GGUFReader(tmp_path / "small.gguf")
    for key, field in small_file.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
    set_key("llama.feed_forward_length", d_mlp, GGUFValueType.UINT32)(writer)
    set_key("llama.block_count", 1, GGUFValueType.UINT32)(writer)
    config = replace(small.config, num_layers=1, d_mlp=d_mlp)
    size_bytes = 0
    for name, shape in required_tensors(config):
        num_bytes = 2 * math.prod(shape)
        writer.add_tensor_info(name, shape, np.dtype(np.float16), num_bytes, GGMLQuantizationType.F16)
        size_bytes += GGUFWriter.ggml_pad(num_bytes, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, GGUFWriter.ggml_pad(path.stat().st_size, 32) + size_bytes)
    checkpoint = read_checkpoint(path)
    assert checkpoint.size_bytes > 80e9
    assert checkpoint.config == config
    assert checkpoint.vocab == small.vocab
    assert checkpoint.tensors["blk.0.ffn_down.weight"].data[-1, -1] == 0.0


def test_the_vocabulary_is_read_when_asked_for(tmp_path: Path) -> None:
    """The engine process never builds it, and so never fails for it."""
    path = write_tiny_llama(
        tmp_path / "m.gguf", edit=set_key("tokenizer.ggml.model", "wordpiece", GGUFValueType.STRING)
    )
    checkpoint = read_checkpoint(path)
    assert checkpoint.tensors["output_norm.weight"].dequantize().shape == (64,)
    with pytest.raises(CheckpointError, match=r"'wordpiece', which is not supported; supported: gpt2, llama"):
        _ = checkpoint.vocab


def test_reading_a_checkpoint_does_not_import_jax(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    script = (
        "import sys; from twinjet.checkpoints.gguf import read_checkpoint; import twinjet.checkpoints.pull;"
        f"read_checkpoint({str(path)!r}).vocab; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
