"""Llama and Gemma 3 as their papers define them: float64, full attention matrices, no cache, no paging.

Reads GGUF files with the `gguf` package and shares nothing with Twinjet. Sources: "LLaMA" (Touvron et al., 2023),
"Gemma 3 Technical Report" (2025), and llama.cpp's description of GGUF metadata: Llama's weights are permuted for
adjacent pairs, Gemma's norms hold one plus the weight.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

GEMMA3_LOCAL_THETA = 10_000.0
GEMMA3_PERIOD = 6


@dataclass
class NaiveModel:
    path: Path

    @cached_property
    def reader(self) -> GGUFReader:
        return GGUFReader(self.path)

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        return {t.name: dequantize(t.data, t.tensor_type).astype(np.float64) for t in self.reader.tensors}

    @property
    def architecture(self) -> str:
        return str(self.field("general.architecture", scoped=False))

    def field(self, name: str, default: Any = None, *, scoped: bool = True) -> Any:
        found = self.reader.get_field(f"{self.architecture}.{name}" if scoped else name)
        return default if found is None else found.contents()

    def logits(self, token_ids: list[int] | tuple[int, ...]) -> np.ndarray:
        """[T, V] of a whole sequence."""
        gemma = self.architecture == "gemma3"
        w, d_model = self.tensors, int(self.field("embedding_length"))
        x = w["token_embd.weight"][list(token_ids)] * (math.sqrt(d_model) if gemma else 1.0)
        for layer in range(int(self.field("block_count"))):
            y = self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm"))
            x = x + (self._norm(y, f"blk.{layer}.post_attention_norm") if gemma else y)
            h = self._norm(x, f"blk.{layer}.ffn_norm")
            gate, up = h @ w[f"blk.{layer}.ffn_gate.weight"].T, h @ w[f"blk.{layer}.ffn_up.weight"].T
            y = ((_gelu_tanh(gate) if gemma else gate / (1 + np.exp(-gate))) * up) @ w[f"blk.{layer}.ffn_down.weight"].T
            x = x + (self._norm(y, f"blk.{layer}.post_ffw_norm") if gemma else y)
        return self._norm(x, "output_norm") @ w.get("output.weight", w["token_embd.weight"]).T

    def greedy(self, token_ids: list[int] | tuple[int, ...], num_new: int) -> list[int]:
        tokens = list(token_ids)
        for _ in range(num_new):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(token_ids) :]

    def _attention(self, layer: int, h: np.ndarray) -> np.ndarray:
        block, w = f"blk.{layer}.", self.tensors
        N, K = int(self.field("attention.head_count")), int(self.field("attention.head_count_kv"))
        H, T = int(self.field("attention.key_length")), len(h)
        q = (h @ w[block + "attn_q.weight"].T).reshape(T, N, H)
        k = (h @ w[block + "attn_k.weight"].T).reshape(T, K, H)
        v = (h @ w[block + "attn_v.weight"].T).reshape(T, K, H)
        windowed = False
        if self.architecture == "gemma3":
            q, k = self._norm(q, block + "attn_q_norm"), self._norm(k, block + "attn_k_norm")
            windowed = layer % GEMMA3_PERIOD != GEMMA3_PERIOD - 1
        q, k = self._rope(q, windowed), self._rope(k, windowed)
        scores = np.einsum("qnh,knh->nqk", q, k.repeat(N // K, axis=1)) / math.sqrt(H)
        distance = np.arange(T)[:, None] - np.arange(T)
        hidden = distance < 0
        if windowed:
            hidden |= distance >= int(self.field("attention.sliding_window"))
        scores[:, hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = np.einsum("nqk,knh->qnh", weights, v.repeat(N // K, axis=1)).reshape(T, N * H)
        return out @ w[block + "attn_output.weight"].T

    def _rope(self, x: np.ndarray, windowed: bool) -> np.ndarray:
        T, _, H = x.shape
        theta, scale = float(self.field("rope.freq_base")), float(self.field("rope.scaling.factor", 1.0))
        if windowed:
            theta, scale = GEMMA3_LOCAL_THETA, 1.0
        factors = self.tensors.get("rope_freqs.weight", np.ones(H // 2))
        angle = np.arange(T)[:, None] / scale * theta ** (-2.0 * np.arange(H // 2) / H) / factors
        turn = np.exp(1j * angle)[:, None]
        out = np.empty_like(x)
        if self.architecture == "gemma3":
            pairs = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * turn
            out[..., : H // 2], out[..., H // 2 :] = pairs.real, pairs.imag
        else:
            pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
            out[..., 0::2], out[..., 1::2] = pairs.real, pairs.imag
        return out

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        eps = float(self.field("attention.layer_norm_rms_epsilon"))
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * self.tensors[name + ".weight"]


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
