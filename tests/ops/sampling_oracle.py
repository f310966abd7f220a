"""What sampling should give, in numpy float64, one row at a time, with the vocabulary sorted."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from twinjet.core.types import SamplingParams
from twinjet.ops.batch import Samples

ROUNDING = 3e-6
"""Shares of the distribution that float32 may move over a threshold or over a draw."""


def kept_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """[V] float64, not renormalised: zero where a filter leaves a token out."""
    scaled = logits.astype(np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if 0 < params.top_k < len(probs):
        probs[probs < np.sort(probs)[-params.top_k]] = 0.0
    if params.top_p < 1.0:
        probs /= probs.sum()
        descending = np.sort(probs)[::-1]
        needed = np.searchsorted(np.cumsum(descending), params.top_p)  # first index at which the sum reaches it
        probs[probs < descending[min(needed, len(probs) - 1)]] = 0.0
    probs[probs < params.min_p * probs.max()] = 0.0
    return probs


def is_close_call(logits: np.ndarray, params: SamplingParams) -> bool:
    """Whether a little more or less of a filter gives another set of tokens."""
    kept = kept_probabilities(logits, params) > 0
    for factor in (1 - 1e-5, 1 + 1e-5):
        top_p = params.top_p if params.top_p == 1.0 else min(params.top_p * factor, 0.9999999)
        min_p = min(params.min_p * factor, 1.0)
        moved = SamplingParams(params.temperature, params.top_k, top_p, min_p)
        if ((kept_probabilities(logits, moved) > 0) != kept).any():
            return True
    return False


def draws(probs: np.ndarray, u: float) -> set[int]:
    """Tokens that a draw of `u` from [0, 1) may give: one, or two where `u` is within rounding of where they meet."""
    cumulative = np.cumsum(probs) / probs.sum()
    around = [np.searchsorted(cumulative, u + shift, side="right") for shift in (-ROUNDING, 0.0, ROUNDING)]
    last = np.flatnonzero(probs)[-1]
    return {int(min(index, last)) for index in around}


def uniform(params: SamplingParams, position: int) -> float:
    """The number that belongs to (seed, choice, position): Threefry, a 64-bit key, choice and position folded in."""
    words = np.array([params.seed >> 32, params.seed & 0xFFFFFFFF], np.uint32)
    return float(_uniform(words, np.int32(params.choice), np.int32(position)))


@jax.jit
def _uniform(words: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, choice), position))


def samples_of(rows: Sequence[tuple[SamplingParams, int]], size: int, num_with_logprobs: int = 0) -> Samples:
    """(parameters, position) of each row, padded with zeros to `size` entries."""
    padded = [*rows, *[None] * (size - len(rows))]

    def column(of, dtype) -> jax.Array:
        return jnp.asarray(np.array([0 if row is None else of(*row) for row in padded], dtype))

    seeds = [[0, 0] if row is None else [row[0].seed >> 32, row[0].seed & 0xFFFFFFFF] for row in padded]
    return Samples(
        count=jnp.asarray(np.int32(len(rows))),
        with_logprobs=jnp.asarray(np.int32(num_with_logprobs)),
        row=column(lambda params, position: 0, np.int32),
        slot=column(lambda params, position: 0, np.int32),
        position=column(lambda params, position: position, np.int32),
        temperature=column(lambda params, position: params.temperature, np.float32),
        top_k=column(lambda params, position: params.top_k, np.int32),
        top_p=column(lambda params, position: params.top_p, np.float32),
        min_p=column(lambda params, position: params.min_p, np.float32),
        seed=jnp.asarray(np.array(seeds, np.uint32)),
        choice=column(lambda params, position: params.choice, np.int32),
    )
