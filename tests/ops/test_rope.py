"""Rotary embedding against complex rotation in float64, for every convention that checkpoints have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from twinjet.core.rope import RopeConfig
from twinjet.ops.reference import rope_angles, rope_frequencies, rotate

POSITIONS = np.array([0, 1, 2, 77, 1000, 8191], np.int32)

CONFIGS = [
    RopeConfig(10_000.0, 16, "adjacent"),
    RopeConfig(10_000.0, 16, "halves"),
    RopeConfig(1_000_000.0, 64, "halves", scale=8.0),
    RopeConfig(500_000.0, 32, "adjacent", factors=tuple(np.linspace(1, 32, 16).tolist())),
    RopeConfig(100_000.0, 8, "adjacent", scale=2.0),  # fewer than the head has
    RopeConfig(100_000.0, 8, "halves"),
]


@pytest.mark.parametrize("rope", CONFIGS, ids=lambda rope: f"{rope.pairing}-{rope.dims}-{rope.scale}")
def test_each_pair_turns_by_its_angle(rope: RopeConfig) -> None:
    head_dim = max(rope.dims, 16)
    x = np.random.default_rng(0).normal(0, 1, (len(POSITIONS), 3, head_dim)).astype(np.float32)
    rotated = np.asarray(_rotate(jnp.asarray(x), jnp.asarray(POSITIONS), (rope,), 0))
    # Angles are float32, as everywhere in the field: at thousands of radians they are good to 1e-3.
    tolerance = 1e-6 + 2**-23 * POSITIONS / rope.scale
    error = np.abs(rotated - _turn(x.astype(np.float64), POSITIONS, rope)).max(axis=(1, 2))
    assert (error <= 4 * tolerance).all(), error
    np.testing.assert_array_equal(rotated[..., rope.dims :], x[..., rope.dims :])
    np.testing.assert_allclose(np.linalg.norm(rotated, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_frequencies_of_each_pair() -> None:
    factors = (1.0, 2.0, 8.0, 32.0)
    frequencies = rope_frequencies(RopeConfig(10_000.0, 8, "halves", scale=4.0, factors=factors))
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, np.array([1, 0.1, 0.01, 0.001]) / 4 / np.array(factors), rtol=1e-6)


def test_position_zero_turns_nothing() -> None:
    x = np.random.default_rng(1).normal(0, 1, (6, 2, 16)).astype(np.float32)
    for rope in CONFIGS[:2]:
        still = _rotate(jnp.asarray(x), jnp.asarray(np.zeros(6, np.int32)), (rope,), 0)
        np.testing.assert_array_equal(np.asarray(still), x)


@pytest.mark.parametrize("pairing", ["adjacent", "halves"])
def test_products_depend_on_the_distance_only(pairing) -> None:
    rope = RopeConfig(10_000.0, 16, pairing)
    rng = np.random.default_rng(2)
    q, k = (np.tile(rng.normal(0, 1, (1, 1, 16)).astype(np.float32), (4, 1, 1)) for _ in range(2))
    position = np.array([5, 40, 300, 900], np.int32)
    queries = np.asarray(_rotate(jnp.asarray(q), jnp.asarray(position + 7), (rope,), 0))
    keys = np.asarray(_rotate(jnp.asarray(k), jnp.asarray(position), (rope,), 0))
    products = (queries * keys).sum(axis=(1, 2))
    np.testing.assert_allclose(products, products[0], atol=1e-3)
    assert abs(products[0] - (q * k)[0].sum()) > 0.05


def test_each_layer_has_its_own_frequencies_also_when_it_is_traced() -> None:
    ropes = (CONFIGS[0], RopeConfig(1_000_000.0, 16, "adjacent", scale=8.0), CONFIGS[0])
    x = np.random.default_rng(3).normal(0, 1, (len(POSITIONS), 1, 16)).astype(np.float32)
    traced = jax.jit(lambda layer: _rotate(jnp.asarray(x), jnp.asarray(POSITIONS), ropes, layer))
    for layer, rope in enumerate(ropes):
        expected = np.asarray(_rotate(jnp.asarray(x), jnp.asarray(POSITIONS), (rope,), 0))
        np.testing.assert_allclose(np.asarray(traced(np.int32(layer))), expected, atol=1e-5)


def _rotate(x: jax.Array, position: jax.Array, ropes: tuple[RopeConfig, ...], layer) -> jax.Array:
    cos, sin = rope_angles(position, ropes, layer)
    return rotate(x, cos, sin, ropes[0])


def _turn(x: np.ndarray, position: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Pairs as complex numbers, times exp(i angle)."""
    half = rope.dims // 2
    first, second = (
        (slice(0, rope.dims, 2), slice(1, rope.dims, 2))
        if rope.pairing == "adjacent"
        else (slice(0, half), slice(half, rope.dims))
    )
    angle = position[:, None] / rope.scale * rope.theta ** (-2.0 * np.arange(half) / rope.dims)
    if rope.factors is not None:
        angle = angle / np.array(rope.factors)
    pairs = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)[:, None]
    out = x.copy()
    out[..., first], out[..., second] = pairs.real, pairs.imag
    return out
