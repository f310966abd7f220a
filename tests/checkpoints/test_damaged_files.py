"""Files that are not whole, not GGUF, or of a kind that is not supported: one clear line each."""

import struct
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_models import write_tiny_gemma3, write_tiny_llama
from twinjet.checkpoints.gguf import Checkpoint, read_checkpoint
from twinjet.core.errors import CheckpointError

MAX_PEAK_BYTES = 64 << 20


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


def test_no_file_and_no_gguf(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "absent.gguf")
    assert "is a directory" in refusal(tmp_path)
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    assert "is empty" in refusal(empty)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "is not a GGUF file: it begins with b'PK" in refusal(other)
    stub = tmp_path / "stub.gguf"
    stub.write_bytes(b"GGUF\x03\0\0\0")
    assert "is truncated: 8 bytes" in refusal(stub)


def test_versions_and_byte_orders_that_nobody_reads(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    assert "of GGUF version 1; supported: 2 and 3" in refusal(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1))
    assert "claims 1152921504606846976 tensors" in refusal(path)
    writer = GGUFWriter(tmp_path / "big.gguf", "llama", endianess=GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "big-endian" in refusal(tmp_path / "big.gguf")


def test_version_2_is_read(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    raw = bytearray(path.read_bytes())
    raw[4:8] = struct.pack("<I", 2)
    path.write_bytes(raw)
    assert read_checkpoint(path).config.architecture == "llama"


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_gemma3])
def test_a_file_cut_short_names_the_first_tensor_that_is_not_whole(tmp_path: Path, write: Callable[..., Path]) -> None:
    path = write(tmp_path / "m.gguf", quant="Q4_1")
    whole = path.read_bytes()
    last = max(read_checkpoint(path).tensors.values(), key=lambda tensor: tensor.data.__array_interface__["data"][0])
    path.write_bytes(whole[: len(whole) - last.data.nbytes // 2 - 32])
    message = refusal(path)
    assert f"{last.name} (type {last.quant}) ends at byte" in message
    assert "truncated, fetch it again" in message


def test_a_file_cut_in_its_header(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    whole = path.read_bytes()
    for kept in (24, 30, 100, 700, 3000, 5000):
        path.write_bytes(whole[:kept])
        assert "its header refers to byte" in refusal(path)


@pytest.mark.parametrize(
    ("quant", "named"), [("IQ2_XS", "type IQ2_XS"), ("Q8_K", "type Q8_K"), ("I8", "type I8"), ("F64", "type F64")]
)
def test_a_type_that_is_not_supported_is_named(tmp_path: Path, quant: str, named: str) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", d_model=256, d_mlp=256, num_heads=8, head_dim=32)
    kind = GGMLQuantizationType[quant]
    patch_tensor_type(path, "blk.1.ffn_up.weight", kind.value)
    message = refusal(path)
    assert "blk.1.ffn_up.weight" in message
    assert f"is of {named}, which is not supported; supported: F32, F16, BF16, Q4_0" in message


def test_a_type_that_nobody_knows_is_named_by_number(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    patch_tensor_type(path, "blk.0.attn_q.weight", 4242)
    assert "blk.0.attn_q.weight" in refusal(path)
    assert "is of type 4242, which is not supported" in refusal(path)


def patch_tensor_type(path: Path, name: str, raw_type: int) -> None:
    """Overwrite the type in a matrix's entry: name, number of dimensions, two dimensions, type, offset."""
    raw = bytearray(path.read_bytes())
    at = raw.index(name.encode()) + len(name) + 4 + 16
    raw[at : at + 4] = struct.pack("<I", raw_type)
    path.write_bytes(raw)


def test_rows_that_do_not_fill_a_block(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    patch_tensor_type(path, "blk.0.attn_q.weight", GGMLQuantizationType.Q4_K.value)
    message = refusal(path)
    assert "blk.0.attn_q.weight is of type Q4_K and has rows of 64, which must be a multiple of 256" in message


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", edit=lambda writer: set_d_mlp(writer, 64))
    assert "blk.0.ffn_gate.weight" in refusal(path)
    assert "has the shape [128, 64], expected [64, 64] (type F32)" in refusal(path)


def set_d_mlp(writer: GGUFWriter, d_mlp: int) -> None:
    del writer.kv_data[0]["llama.feed_forward_length"]
    writer.add_feed_forward_length(d_mlp)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", edit=lambda writer: drop_tensor(writer, "blk.1.attn_v.weight"))
    assert "lacks blk.1.attn_v.weight, which a llama model needs" in refusal(path)


def drop_tensor(writer: GGUFWriter, name: str) -> None:
    del writer.tensors[0][name]


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.ffn_gate_exps.weight", "mm.0.weight"])
def test_a_tensor_that_would_be_left_out_is_refused(tmp_path: Path, name: str) -> None:
    zeros = np.zeros(64, np.float32)
    path = write_tiny_llama(tmp_path / "m.gguf", edit=lambda writer: writer.add_tensor(name, zeros))
    assert f"holds {name} (type F32), which this llama model would leave unused" in refusal(path)


def test_a_harmless_relic_is_ignored(tmp_path: Path) -> None:
    name = "blk.0.attn_rot_embd.weight"
    zeros = np.zeros(8, np.float32)
    path = write_tiny_llama(tmp_path / "m.gguf", edit=lambda writer: writer.add_tensor(name, zeros))
    assert name not in read_checkpoint(path).tensors


def test_names_that_would_break_the_line(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"blk.0.attn_q.weight", b"blk.0.a\n\n\n_q.weight"))
    assert "is corrupt: it names a tensor 'blk.0.a\\n" in refusal(path)
    path.write_bytes(raw.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"))
    assert "is corrupt: it holds blk.0.attn_k.weight twice" in refusal(path)


def test_nested_arrays_and_unknown_value_types(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    nested = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1) + bytes(64)
    path.write_bytes(nested)
    assert "arrays of ARRAY" in refusal(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 99) + bytes(64))
    assert "is not a valid GGUF file (99 is not a valid GGUFValueType)" in refusal(path)


@cache
def whole_file(folder: Path) -> tuple[bytes, int]:
    """A small model and the length of its header."""
    path = write_tiny_llama(folder / "whole.gguf", num_layers=1, rope_factors=[1.0] * 8, quant="Q8_0")
    tensors = read_checkpoint(path).tensors.values()
    return path.read_bytes(), path.stat().st_size - sum(tensor.data.nbytes for tensor in tensors)


def read_damaged(path: Path, raw: bytes) -> Checkpoint | None:
    """The checkpoint with its vocabulary and values read, or None where it was refused as it should be."""
    path.write_bytes(raw)
    message = ""
    tracemalloc.start()
    try:
        checkpoint = read_checkpoint(path)
        _ = checkpoint.vocab
        for tensor in checkpoint.tensors.values():
            assert tensor.dequantize().shape == tensor.shape
    except CheckpointError as error:
        checkpoint, message = None, str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_PEAK_BYTES
    assert "\n" not in message
    return checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


def test_the_whole_file_is_read(folder: Path) -> None:
    raw, _ = whole_file(folder)
    assert read_damaged(folder / "m.gguf", raw) is not None


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0.0, 1.0, exclude_max=True))
def test_any_truncation_is_refused(folder: Path, share: float) -> None:
    raw, _ = whole_file(folder)
    # What pads the last tensor may be missing.
    kept = int(share * (len(raw) - 32))
    assert read_damaged(folder / "m.gguf", raw[:kept]) is None


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_flipped_bits_in_the_header_never_end_in_anything_but_a_refusal(folder: Path, data: st.DataObject) -> None:
    raw, header_bytes = whole_file(folder)
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header_bytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    read_damaged(folder / "m.gguf", bytes(damaged))


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_overwritten_numbers_in_the_header_never_end_in_anything_but_a_refusal(
    folder: Path, data: st.DataObject
) -> None:
    """Lengths, counts and offsets replaced by the values most likely to hurt."""
    raw, header_bytes = whole_file(folder)
    hurtful = st.sampled_from([0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(8, header_bytes - 8))
        damaged[at : at + 8] = struct.pack("<Q", data.draw(hurtful | st.integers(0, 2**20)))
    read_damaged(folder / "m.gguf", bytes(damaged))


@settings(max_examples=60, deadline=None)
@given(noise=st.binary(max_size=600))
def test_noise_after_the_magic(folder: Path, noise: bytes) -> None:
    assert read_damaged(folder / "m.gguf", b"GGUF\x03\0\0\0" + noise) is None
