"""Small random models as complete GGUF files, on which a whole server can run.

Owns shapes, random weights and tokenizer metadata; knows nothing of how Twinjet reads them (it uses the `gguf`
package's writer only). Weights are scaled so that logits are well spread and depend on the whole context: the layers
outweigh the token's own embedding in the residual.

Rows of every matrix are a multiple of 32 long, as the quantised types need; K-quants need multiples of 256, which
`d_model=256, d_mlp=256, head_dim=32, num_heads=8` gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_EMBEDDING_STD = 0.1
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True, slots=True)
class TinyVocab:
    """Tokenizer metadata as GGUF keeps it."""

    model: str
    tokens: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    pre: str | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    unknown_id: int | None = None
    add_bos: bool | None = None
    add_space_prefix: bool | None = None
    chat_template: str | None = None


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (as GPT-2 defined it)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def bpe_vocab(*, pre: str = "smollm", chat_template: str | None = CHATML) -> TinyVocab:
    """Byte-level BPE: three control tokens, 256 bytes, and what a handful of merges make."""
    merges = ["Ġ t", "h e", "i n", "Ġ a", "Ġt he", "o n", "r e", "e r", "Ġ w", "l l", "o r", "Ġw or", "l d", "Ġwor ld"]
    merges += ["H e", "He ll", "Hell o", "a t", "Ġ s", "Ġs at", "1 2", "Ċ Ċ"]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = control + byte_symbols() + [merge.replace(" ", "") for merge in merges]
    return TinyVocab(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        types=[CONTROL] * len(control) + [NORMAL] * (len(tokens) - len(control)),
        merges=merges,
        bos_id=1,
        eos_id=2,
        unknown_id=0,
        add_bos=False,
        chat_template=chat_template,
    )


def spm_vocab(*, chat_template: str | None = None) -> TinyVocab:
    """SentencePiece-style: control tokens, 256 byte tokens, single characters, and a few scored pieces."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    pieces = ["▁t", "he", "▁the", "in", "▁a", "▁w", "or", "ld", "orld", "▁world", "ll", "He", "Hell", "Hello", "▁▁"]
    characters = ["▁", *(chr(code) for code in range(0x21, 0x7F))]
    scores = [-float(rank) for rank in range(len(pieces) + len(characters))]
    return TinyVocab(
        model="llama",
        tokens=control + [f"<0x{byte:02X}>" for byte in range(256)] + pieces + characters,
        types=[CONTROL, CONTROL, CONTROL, UNKNOWN, CONTROL, CONTROL]
        + [BYTE] * 256
        + [NORMAL] * (len(pieces) + len(characters)),
        scores=[0.0] * (len(control) + 256) + scores,
        bos_id=2,
        eos_id=1,
        unknown_id=3,
        add_bos=True,
        add_space_prefix=False,
        chat_template=chat_template,
    )


def write_tiny_llama(
    path: Path,
    *,
    seed: int = 0,
    quant: str = "F32",
    num_layers: int = 2,
    d_model: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    d_mlp: int = 128,
    context: int = 512,
    rope_theta: float = 10_000.0,
    rope_factors: Sequence[float] | None = None,
    rope_scale: float = 1.0,
    tied: bool = True,
    vocab: TinyVocab | None = None,
    name: str = "tiny-llama",
    edit: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """Write a llama-architecture model; matrices and embedding in `quant`, norms in F32. `edit` may add more."""
    vocab = vocab or bpe_vocab()
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama")
    _add_shape(writer, name, num_layers, d_model, num_heads, num_kv_heads, head_dim, d_mlp, context, rope_theta, 1e-5)
    writer.add_vocab_size(len(vocab.tokens))
    writer.add_rope_dimension_count(head_dim)
    if rope_scale != 1.0:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope_scale)
    _add_vocab(writer, vocab)
    weights = _Weights(writer, rng, quant)
    weights.matrix("token_embd.weight", len(vocab.tokens), d_model, std=_EMBEDDING_STD)
    weights.norm("output_norm.weight", d_model, mean=0.3 / _EMBEDDING_STD)
    if not tied:
        weights.matrix("output.weight", len(vocab.tokens), d_model, std=_EMBEDDING_STD)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, np.float32))
    for layer in range(num_layers):
        block = f"blk.{layer}."
        weights.norm(block + "attn_norm.weight", d_model)
        _add_attention(weights, block, d_model, num_heads, num_kv_heads, head_dim)
        weights.norm(block + "ffn_norm.weight", d_model)
        _add_mlp(weights, block, d_model, d_mlp)
    return _finish(writer, path, edit)


def write_tiny_gemma3(
    path: Path,
    *,
    seed: int = 0,
    quant: str = "F32",
    num_layers: int = 6,
    d_model: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 1,
    head_dim: int = 32,
    d_mlp: int = 128,
    context: int = 512,
    sliding_window: int = 24,
    rope_theta: float = 1_000_000.0,
    rope_scale: float = 1.0,
    vocab: TinyVocab | None = None,
    name: str = "tiny-gemma3",
    edit: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """Write a gemma3-architecture text model; six layers, so that one sees everything and five are windowed."""
    vocab = vocab or spm_vocab()
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "gemma3")
    _add_shape(writer, name, num_layers, d_model, num_heads, num_kv_heads, head_dim, d_mlp, context, rope_theta, 1e-6)
    writer.add_sliding_window(sliding_window)
    if rope_scale != 1.0:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope_scale)
    _add_vocab(writer, vocab)
    weights = _Weights(writer, rng, quant)
    weights.matrix("token_embd.weight", len(vocab.tokens), d_model, std=_EMBEDDING_STD)
    weights.norm("output_norm.weight", d_model, mean=0.3 / _EMBEDDING_STD)
    for layer in range(num_layers):
        block = f"blk.{layer}."
        weights.norm(block + "attn_norm.weight", d_model)
        _add_attention(weights, block, d_model, num_heads, num_kv_heads, head_dim)
        weights.norm(block + "attn_q_norm.weight", head_dim)
        weights.norm(block + "attn_k_norm.weight", head_dim)
        # The embedding is scaled by sqrt(d_model), so the layers' share must grow as well.
        weights.norm(block + "post_attention_norm.weight", d_model, mean=1.5)
        weights.norm(block + "ffn_norm.weight", d_model)
        _add_mlp(weights, block, d_model, d_mlp)
        weights.norm(block + "post_ffw_norm.weight", d_model, mean=1.5)
    return _finish(writer, path, edit)


def random_blocks(rng: np.random.Generator, quant: str, rows: int, columns: int, std: float) -> np.ndarray:
    """[rows, bytes of a row] uint8: random weights of the standard deviation `std`, in a GGUF type."""
    kind = GGMLQuantizationType[quant]
    if quant not in _K_QUANT_SCALES:
        weights = rng.normal(0.0, std, (rows, columns)).astype(np.float32)
        # float16 and float32 come back as such; the others as bytes.
        return quantize(weights, kind)
    # The package cannot quantise to K-quants: draw the integers, then set the block's scales to fit.
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // block_size, block_bytes), np.uint8)
    scale_at, min_at, centre = _K_QUANT_SCALES[quant]

    def set_scales(scale: float) -> None:
        blocks[:, scale_at : scale_at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        if min_at is not None:
            blocks[:, min_at : min_at + 2] = np.frombuffer(np.float16(scale * centre).tobytes(), np.uint8)

    set_scales(1.0)
    set_scales(std / float(dequantize(blocks, kind).std()))
    return blocks.reshape(rows, -1)


_K_QUANT_SCALES: dict[str, tuple[int, int | None, float]] = {
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
}
"""Byte offsets of a block's scale and minimum, and the middle of its integers, which the minimum shifts to zero."""


class _Weights:
    def __init__(self, writer: GGUFWriter, rng: np.random.Generator, quant: str) -> None:
        self._writer, self._rng, self._quant = writer, rng, quant

    def matrix(self, name: str, rows: int, columns: int, *, std: float | None = None) -> None:
        blocks = random_blocks(self._rng, self._quant, rows, columns, columns**-0.5 if std is None else std)
        self._writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[self._quant])

    def norm(self, name: str, size: int, *, mean: float = 1.0) -> None:
        self._writer.add_tensor(name, (mean * self._rng.uniform(0.8, 1.2, size)).astype(np.float32))


def _add_shape(
    writer: GGUFWriter,
    name: str,
    num_layers: int,
    d_model: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    d_mlp: int,
    context: int,
    rope_theta: float,
    norm_eps: float,
) -> None:
    writer.add_name(name)
    writer.add_block_count(num_layers)
    writer.add_context_length(context)
    writer.add_embedding_length(d_model)
    writer.add_feed_forward_length(d_mlp)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope_theta)
    writer.add_layer_norm_rms_eps(norm_eps)


def _add_vocab(writer: GGUFWriter, vocab: TinyVocab) -> None:
    writer.add_tokenizer_model(vocab.model)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    optional: list[tuple[Any, Callable[[Any], None]]] = [
        (vocab.pre, writer.add_tokenizer_pre),
        (vocab.scores or None, writer.add_token_scores),
        (vocab.merges or None, writer.add_token_merges),
        (vocab.bos_id, writer.add_bos_token_id),
        (vocab.eos_id, writer.add_eos_token_id),
        (vocab.unknown_id, writer.add_unk_token_id),
        (vocab.add_bos, writer.add_add_bos_token),
        (vocab.add_space_prefix, writer.add_add_space_prefix),
        (vocab.chat_template, writer.add_chat_template),
    ]
    for value, add in optional:
        if value is not None:
            add(value)


def _add_attention(
    weights: _Weights, block: str, d_model: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    # Sharper than plain attention of random weights, which would be nearly uniform.
    weights.matrix(block + "attn_q.weight", num_heads * head_dim, d_model, std=1.5 * d_model**-0.5)
    weights.matrix(block + "attn_k.weight", num_kv_heads * head_dim, d_model, std=1.5 * d_model**-0.5)
    weights.matrix(block + "attn_v.weight", num_kv_heads * head_dim, d_model)
    weights.matrix(
        block + "attn_output.weight", d_model, num_heads * head_dim, std=1.5 * (num_heads * head_dim) ** -0.5
    )


def _add_mlp(weights: _Weights, block: str, d_model: int, d_mlp: int) -> None:
    weights.matrix(block + "ffn_gate.weight", d_mlp, d_model, std=1.5 * d_model**-0.5)
    weights.matrix(block + "ffn_up.weight", d_mlp, d_model)
    weights.matrix(block + "ffn_down.weight", d_model, d_mlp)


def _finish(writer: GGUFWriter, path: Path, edit: Callable[[GGUFWriter], None] | None) -> Path:
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
