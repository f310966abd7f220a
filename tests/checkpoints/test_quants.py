"""Values of every supported type against a slow decoder of each, written from the description of the format."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from tests.tiny_models import bpe_vocab, random_blocks, write_tiny_llama
from twinjet.checkpoints.gguf import read_checkpoint
from twinjet.checkpoints.tensors import SUPPORTED_QUANTS

Decoder = Callable[[bytes], list[float]]


def half(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def nibbles(packed: bytes) -> list[int]:
    """Low halves of all bytes first, then the high halves."""
    return [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]


def decode_q4_0(block: bytes) -> list[float]:
    return [half(block, 0) * (q - 8) for q in nibbles(block[2:])]


def decode_q4_1(block: bytes) -> list[float]:
    return [half(block, 0) * q + half(block, 2) for q in nibbles(block[4:])]


def decode_q5_0(block: bytes) -> list[float]:
    high = int.from_bytes(block[2:6], "little")
    return [half(block, 0) * ((q | (high >> i & 1) << 4) - 16) for i, q in enumerate(nibbles(block[6:]))]


def decode_q5_1(block: bytes) -> list[float]:
    high = int.from_bytes(block[4:8], "little")
    return [half(block, 0) * (q | (high >> i & 1) << 4) + half(block, 2) for i, q in enumerate(nibbles(block[8:]))]


def decode_q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * q for q in struct.unpack("<32b", block[2:])]


def scale_and_minimum(scales: bytes, group: int) -> tuple[int, int]:
    """Twelve bytes hold eight 6-bit scales and eight 6-bit minima."""
    if group < 4:
        return scales[group] & 63, scales[group + 4] & 63
    low = scales[group + 4]
    return (low & 15) | (scales[group - 4] >> 6) << 4, (low >> 4) | (scales[group] >> 6) << 4


def decode_q4_k(block: bytes) -> list[float]:
    weights = []
    for group in range(8):
        scale, minimum = scale_and_minimum(block[4:16], group)
        for byte in block[16 + group // 2 * 32 : 48 + group // 2 * 32]:
            q = byte >> 4 if group % 2 else byte & 15
            weights.append(half(block, 0) * scale * q - half(block, 2) * minimum)
    return weights


def decode_q5_k(block: bytes) -> list[float]:
    weights = []
    for group in range(8):
        scale, minimum = scale_and_minimum(block[4:16], group)
        for i in range(32):
            byte = block[48 + group // 2 * 32 + i]
            q = (byte >> 4 if group % 2 else byte & 15) | (block[16 + i] >> group & 1) << 4
            weights.append(half(block, 0) * scale * q - half(block, 2) * minimum)
    return weights


def decode_q6_k(block: bytes) -> list[float]:
    weights = []
    scales = struct.unpack("<16b", block[192:208])
    for i in range(256):
        part, quarter, place = i // 128, i % 128 // 32, i % 32
        low_byte = block[part * 64 + quarter % 2 * 32 + place]
        low = low_byte >> 4 if quarter >= 2 else low_byte & 15
        high = block[128 + part * 32 + place] >> 2 * quarter & 3
        weights.append(half(block, 208) * scales[i // 16] * ((low | high << 4) - 32))
    return weights


def decode_bf16(block: bytes) -> list[float]:
    return list(struct.unpack("<f", b"\0\0" + block))


DECODERS: dict[str, tuple[int, Decoder]] = {
    "F32": (4, lambda block: list(struct.unpack("<f", block))),
    "F16": (2, lambda block: [half(block, 0)]),
    "BF16": (2, decode_bf16),
    "Q4_0": (18, decode_q4_0),
    "Q4_1": (20, decode_q4_1),
    "Q5_0": (22, decode_q5_0),
    "Q5_1": (24, decode_q5_1),
    "Q8_0": (34, decode_q8_0),
    "Q4_K": (144, decode_q4_k),
    "Q5_K": (176, decode_q5_k),
    "Q6_K": (210, decode_q6_k),
}


def test_every_supported_type_is_checked() -> None:
    assert set(DECODERS) == set(SUPPORTED_QUANTS)


@pytest.mark.parametrize("quant", DECODERS)
def test_values_equal_the_slow_decoder(tmp_path: Path, quant: str) -> None:
    path = write_tiny_llama(
        tmp_path / "model.gguf", quant=quant, num_layers=1, d_model=256, d_mlp=768, num_heads=8, head_dim=32
    )
    tensors = read_checkpoint(path).tensors
    block_bytes, decode = DECODERS[quant]
    # 281 rows, which cannot be joined; 768 rows of 256; 256 rows of 768.
    for name in ("token_embd.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"):
        tensor = tensors[name]
        assert tensor.quant == quant
        values = tensor.dequantize()
        assert values.shape == tensor.shape
        assert values.dtype == np.float32
        raw = np.ascontiguousarray(tensor.data).tobytes()
        blocks = [raw[at : at + block_bytes] for at in range(0, len(raw), block_bytes)]
        per_block = values.size // len(blocks)
        flat = values.reshape(-1)
        for index in {0, 1, len(blocks) // 2 + 1, len(blocks) - 1}:
            expected = decode(blocks[index])
            found = flat[index * per_block : (index + 1) * per_block]
            assert len(expected) == per_block
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("quant", ["Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q8_0"])
def test_extreme_scales_give_numbers_and_no_exception(tmp_path: Path, quant: str) -> None:
    """Infinite and NaN scales pass through: the engine refuses them when it loads."""

    def add_damaged(writer: GGUFWriter) -> None:
        blocks = random_blocks(np.random.default_rng(0), quant, 281, 256, 1.0)
        blocks[:] = 0xFF
        writer.add_tensor("output.weight", blocks, raw_dtype=GGMLQuantizationType[quant])

    path = write_tiny_llama(tmp_path / "m.gguf", d_model=256, d_mlp=256, num_heads=8, head_dim=32, edit=add_damaged)
    assert not np.isfinite(read_checkpoint(path).tensors["output.weight"].dequantize()).all()


def test_mapped_bytes_cannot_be_written(tmp_path: Path) -> None:
    tensors = read_checkpoint(write_tiny_llama(tmp_path / "m.gguf", quant="Q8_0")).tensors
    for tensor in tensors.values():
        assert not tensor.data.flags.writeable
        assert tensor.data.base is not None


def test_vocabulary_has_the_rows_of_the_embedding(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_tiny_llama(tmp_path / "m.gguf", quant="Q4_1"))
    assert checkpoint.tensors["token_embd.weight"].shape == (len(bpe_vocab().tokens), 64)
    assert checkpoint.tensors["token_embd.weight"].data.shape == (len(bpe_vocab().tokens), 64 // 32 * 20)
