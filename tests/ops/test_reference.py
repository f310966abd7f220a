"""Norm, products, MLP and KV append of the reference backend against numpy in float64."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.ragged import Rows, batch_of, table_width
from twinjet.core.rope import RopeConfig
from twinjet.ops.batch import StepLayout
from twinjet.ops.params import KVCache, Layer, Params
from twinjet.ops.reference import ReferenceOps, matmul, rms_norm
from twinjet.ops.specs import EmbedSpec, HeadSpec, MLPSpec, ProjectSpec, QKVSpec

T, D, F = 5, 48, 96
EPS = 1e-5
OPS = ReferenceOps(page_size=4)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_rms_norm_divides_by_the_root_mean_square(rng: np.random.Generator) -> None:
    x, weight = _normal(rng, T, 3, D), _normal(rng, D)
    x[0] *= 1e-4  # small enough that eps shows
    x[1] *= 1e6
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(weight), EPS), _norm(x, weight), rtol=1e-5)
    zeros = rms_norm(jnp.zeros((2, D)), jnp.asarray(weight), EPS)
    np.testing.assert_array_equal(np.asarray(zeros), np.zeros((2, D), np.float32))


def test_products_keep_float32_precision(rng: np.random.Generator) -> None:
    x, w = _normal(rng, T, 1000), _normal(rng, 77, 1000)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_allclose(np.asarray(matmul(jnp.asarray(x), jnp.asarray(w))), exact, atol=2e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("post_norm", [False, True])
def test_mlp(rng: np.random.Generator, activation, post_norm: bool) -> None:
    weights = {
        "mlp_norm": _normal(rng, D),
        "gate_up": _normal(rng, 2 * F, D) * D**-0.5 * 3,
        "down": _normal(rng, D, F) * F**-0.5,
        "mlp_post_norm": _normal(rng, D),
    }
    x = _normal(rng, T, D)
    out = OPS.mlp_add(_layer(weights), jnp.asarray(x), None, MLPSpec(activation, EPS, post_norm))
    gate, up = np.split(_norm(x, weights["mlp_norm"]) @ weights["gate_up"].T.astype(np.float64), 2, axis=1)
    curve = {"silu": lambda g: g / (1 + np.exp(-g)), "gelu_tanh": _gelu_tanh}[activation]
    y = (curve(gate) * up) @ weights["down"].T.astype(np.float64)
    expected = x + (_norm(y, weights["mlp_post_norm"]) if post_norm else y)
    np.testing.assert_allclose(np.asarray(out), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("post_norm", [False, True])
def test_project(rng: np.random.Generator, post_norm: bool) -> None:
    weights = {"out": _normal(rng, D, F), "out_post_norm": _normal(rng, D)}
    attended, x = _normal(rng, T, F), _normal(rng, T, D)
    out = OPS.project_add(_layer(weights), jnp.asarray(attended), jnp.asarray(x), None, ProjectSpec(EPS, post_norm))
    y = attended.astype(np.float64) @ weights["out"].T
    expected = x + (_norm(y, weights["out_post_norm"]) if post_norm else y)
    np.testing.assert_allclose(np.asarray(out), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_qkv_appends_to_the_pages_of_each_row_and_nowhere_else(
    rng: np.random.Generator, dtype: str, qk_norm: bool
) -> None:
    N, K, H, G, L = 4, 2, 16, OPS.page_size, 2
    weights = {
        "attn_norm": _normal(rng, D),
        "qkv": _normal(rng, (N + 2 * K) * H, D) * D**-0.5,
        "q_norm": _normal(rng, H),
        "k_norm": _normal(rng, H),
    }
    layout = StepLayout(8, 3, table_width(128, G))
    page_table = np.full((3, layout.table_width), 11, np.int32)
    page_table[2, :2], page_table[0, :1] = [7, 1], [4]
    batch = batch_of(layout, [Rows(2, 2, 4), Rows(0, 3, 1)], page_table)  # and three rows of padding
    before = _normal(rng, L, 12 * G, K, H).astype(dtype)
    x = _normal(rng, 8, D)
    spec = QKVSpec(N, K, H, EPS, (RopeConfig(10_000.0, H, "halves", scale=1e9),) * L, qk_norm)  # turns nothing
    cache = KVCache(jnp.asarray(before), jnp.asarray(before))
    q, after = OPS.qkv(_layer(weights, index=1), jnp.asarray(x), cache, batch, spec)

    heads = (_norm(x, weights["attn_norm"]) @ weights["qkv"].T.astype(np.float64)).reshape(8, N + 2 * K, H)
    queries, keys, values = heads[:, :N], heads[:, N : N + K], heads[:, N + K :]
    if qk_norm:
        queries, keys = _norm(queries, weights["q_norm"]), _norm(keys, weights["k_norm"])
    np.testing.assert_allclose(np.asarray(q)[:5], queries[:5], atol=1e-5)
    # Positions 2, 3 lie in page 7, 4 and 5 in page 1; position 3 of the other sequence in page 4.
    where = [7 * G + 2, 7 * G + 3, 1 * G, 1 * G + 1, 4 * G + 3]
    tolerance = 1e-5 if dtype == "float32" else 5e-3
    for pool, fresh in ((after.keys, keys), (after.values, values)):
        assert pool.dtype == dtype
        np.testing.assert_allclose(np.asarray(pool)[1, where].astype(np.float64), fresh[:5], atol=tolerance)
        others = np.ones(before.shape[:2], bool)
        others[1, where] = False
        np.testing.assert_array_equal(np.asarray(pool)[others], before[others])


def test_the_pool_stays_finite_whatever_a_sequence_writes(rng: np.random.Generator) -> None:
    """Hidden values are multiplied by zero, so an infinity of one sequence would be a NaN of all others."""
    K, H = 1, 16
    weights = {"attn_norm": np.full(D, 1e7, np.float32), "qkv": _normal(rng, 3 * K * H, D)}
    layout = StepLayout(8, 3, table_width(128, OPS.page_size))
    batch = batch_of(layout, [Rows(0, 0, 8)], np.zeros((3, layout.table_width), np.int32))
    zeros = jnp.asarray(np.zeros((1, 16, K, H), np.float16))
    spec = QKVSpec(1, K, H, EPS, (RopeConfig(10_000.0, H, "halves"),))
    x = _normal(rng, 8, D)
    _, cache = OPS.qkv(_layer(weights), jnp.asarray(x), KVCache(zeros, zeros), batch, spec)
    for pool in (cache.keys, cache.values):
        assert np.isfinite(np.asarray(pool)).all()
        assert np.abs(np.asarray(pool)).max() == np.finfo(np.float16).max


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head(rng: np.random.Generator, tied: bool) -> None:
    V = 30
    embedding, head, final_norm = _normal(rng, V, D), _normal(rng, V, D), _normal(rng, D)
    params = Params(jnp.asarray(embedding), {}, jnp.asarray(final_norm), head=None if tied else jnp.asarray(head))
    batch = _with_rows(batch_of(StepLayout(8, 3, 32), [Rows(0, 0, 6)], np.zeros((3, 32), np.int32)), [5, 0, 3])
    embedded = OPS.embed(params, batch, EmbedSpec(scale=math.sqrt(D)))
    np.testing.assert_allclose(np.asarray(embedded), embedding[np.arange(8)] * math.sqrt(D), rtol=1e-6)
    logits = OPS.head(params, embedded, batch, HeadSpec(EPS))
    matrix = embedding if tied else head
    rows = (embedding * math.sqrt(D))[[5, 0, 3]]
    np.testing.assert_allclose(np.asarray(logits), _norm(rows, final_norm) @ matrix.T, atol=1e-4)


def test_layers_are_packed_by_part_and_run_in_order(rng: np.random.Generator) -> None:
    @dataclass(frozen=True)
    class Tensor:
        name: str
        values: np.ndarray
        quant: str = "F32"

        @property
        def data(self) -> np.ndarray:
            return self.values

        @property
        def shape(self) -> tuple[int, ...]:
            return self.values.shape

        def dequantize(self) -> np.ndarray:
            return self.values

    def layer(seed: int) -> dict[str, Sequence[Tensor]]:
        a, b = _normal(rng, 2, 3) + seed, _normal(rng, 1, 3) + seed
        return {"pair": [Tensor("a", a), Tensor("b", b)], "norm": [Tensor("n", _normal(rng, 3))]}

    raw = [layer(index) for index in range(3)]
    packed = OPS.pack_layers(iter(raw), 3)
    assert {part: weights.shape for part, weights in packed.items()} == {"pair": (3, 3, 3), "norm": (3, 3)}
    for index, parts in enumerate(raw):
        np.testing.assert_array_equal(packed["pair"][index], np.concatenate([t.values for t in parts["pair"]]))

    def block(layer: Layer, x: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        x = x @ layer.weights["pair"] + layer.weights["norm"] * layer.index
        return x, KVCache(cache.keys.at[layer.index].set(x.sum()), cache.values)

    empty = jnp.zeros((3, 1, 1, 1))
    params = Params(jnp.zeros((1, 3)), packed, jnp.zeros(3), None)
    x = _normal(rng, 2, 3)
    out, cache = OPS.run_layers(block, params, jnp.asarray(x), KVCache(empty, empty))
    sums = []
    for index in range(3):
        x = x @ np.asarray(packed["pair"][index]) + np.asarray(packed["norm"][index]) * index
        sums.append(x.sum())
    np.testing.assert_allclose(np.asarray(out), x, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(cache.keys).ravel(), sums, rtol=1e-4)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(0, 1, shape).astype(np.float32)


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    exact = x.astype(np.float64)
    return exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + EPS) * weight


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _layer(weights: dict[str, np.ndarray], index: int = 0) -> Layer:
    return Layer(index, {name: jnp.asarray(values) for name, values in weights.items()})


def _with_rows(batch, rows: list[int]):
    """The batch with token ids 0, 1, 2... and with samples taken from `rows`."""
    samples = dataclasses.replace(batch.samples, row=jnp.asarray(np.array(rows, np.int32)))
    token_ids = jnp.asarray(np.arange(batch.token_ids.shape[0], dtype=np.int32))
    return dataclasses.replace(batch, token_ids=token_ids, samples=samples)
