"""Choosing tokens on the device, in plain jnp.

Nothing sorts the vocabulary: thresholds of top-k and top-p are found by bisection over the bits of the
probabilities, which order like the numbers. A row draws one uniform number from a counter-based key of
(seed, choice, position) and inverts the cumulative distribution, so its choice does not depend on the
other rows, and a replay repeats it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from twinjet.core.types import MAX_LOGPROBS
from twinjet.ops.batch import Samples
from twinjet.ops.params import Sampled

STRIDE = 256
"""Probabilities summed together at the first level of a draw."""

ONE_BITS = 0x3F800000
"""Bits of 1.0, the largest probability."""


def sample(logits: Float[Array, "S V"], samples: Samples) -> Sampled:
    """Greedy where the temperature is 0. Parts that no row of the step needs are skipped at run time."""
    live = jnp.arange(logits.shape[0]) < samples.count
    drawing = live & (samples.temperature > 0.0)
    greedy = jnp.argmax(logits, axis=1).astype(jnp.int32)
    token_ids = lax.cond(
        jnp.any(drawing),
        lambda: jnp.where(drawing, _draw(logits, samples, drawing), greedy),
        lambda: greedy,
    )
    n = min(MAX_LOGPROBS, logits.shape[1])
    logprobs, top_ids, top_logprobs = lax.cond(
        samples.with_logprobs > 0,
        lambda: _logprobs(logits, token_ids, n),
        lambda: (
            jnp.zeros(logits.shape[:1], jnp.float32),
            jnp.zeros((logits.shape[0], n), jnp.int32),
            jnp.zeros((logits.shape[0], n), jnp.float32),
        ),
    )
    return Sampled(token_ids, logprobs, top_ids, top_logprobs)


def _logprobs(logits: Float[Array, "S V"], token_ids: Int[Array, " S"], n: int) -> tuple[Array, Array, Array]:
    logp = jax.nn.log_softmax(logits, axis=1)
    top, ids = lax.top_k(logp, n)
    return jnp.take_along_axis(logp, token_ids[:, None], axis=1)[:, 0], ids.astype(jnp.int32), top


def _draw(logits: Float[Array, "S V"], samples: Samples, drawing: Bool[Array, " S"]) -> Int[Array, " S"]:
    V = logits.shape[1]
    temperature = jnp.where(drawing, samples.temperature, 1.0)
    # The largest becomes 0 before the division, which could overflow otherwise: a tiny temperature is greedy.
    probs = jax.nn.softmax((logits - logits.max(axis=1, keepdims=True)) / temperature[:, None], axis=1)
    filtered = (samples.top_k > 0) & (samples.top_k < V) | (samples.top_p < 1.0) | (samples.min_p > 0.0)
    probs = lax.cond(jnp.any(drawing & filtered), lambda: _filter(probs, samples), lambda: probs)
    return _invert(probs, _uniform(samples))


def _invert(probs: Float[Array, "S V"], u: Float[Array, " S"]) -> Int[Array, " S"]:
    """First index at which the cumulative sum exceeds u times the total.

    In two levels: sums of strides first, then within the stride that holds the target. A single
    cumulative sum over a vocabulary costs XLA more to compile and to run than the rest of the draw.
    """
    S, V = probs.shape
    strides = jnp.pad(probs, ((0, 0), (0, -V % STRIDE))).reshape(S, -1, STRIDE)
    shares = strides.sum(axis=2)
    before = jnp.cumsum(shares, axis=1)  # [S, strides], up to the end of each
    target = (u * before[:, -1])[:, None]
    stride = _first_with_share(shares, before > target)[:, None]
    base = jnp.where(stride > 0, jnp.take_along_axis(before, jnp.maximum(stride - 1, 0), axis=1), 0.0)
    chosen = jnp.take_along_axis(strides, stride[:, :, None], axis=1)[:, 0]  # [S, STRIDE]
    within = _first_with_share(chosen, base + jnp.cumsum(chosen, axis=1) > target)
    return (stride[:, 0] * STRIDE + within).astype(jnp.int32)


def _first_with_share(shares: Float[Array, "S n"], over: Bool[Array, "S n"]) -> Int[Array, " S"]:
    """First index that is over the target and has a share; the last that has one, where rounding leaves none.

    Without the second condition a token that was filtered out may be drawn: the sums of the two levels round
    differently, and a parallel cumulative sum may move by rounding where nothing is added.
    """
    has_share = shares > 0.0
    found = over & has_share
    last = shares.shape[1] - 1 - jnp.argmax(has_share[:, ::-1], axis=1)
    return jnp.where(found.any(axis=1), jnp.argmax(found, axis=1), last)


def _uniform(samples: Samples) -> Float[Array, " S"]:
    """In [0, 1), by Threefry (Salmon et al., 2011) as JAX has it."""

    def one(seed, choice, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, choice), position), ())

    return jax.vmap(one)(samples.seed, samples.choice, samples.position)


def _filter(probs: Float[Array, "S V"], samples: Samples) -> Float[Array, "S V"]:
    """Zero what top-k, then top-p, then min-p leave out. Equal probabilities at a threshold all stay."""
    V = probs.shape[1]
    k = jnp.where(samples.top_k > 0, jnp.minimum(samples.top_k, V), V)
    probs = _keep(probs, lambda kept: kept.sum(axis=1) >= k)
    total = probs.sum(axis=1)
    # At 1 nothing may go, not even what rounding of the sum would drop; near 0 something has to stay.
    mass = jnp.where(samples.top_p < 1.0, jnp.maximum(samples.top_p * total, jnp.finfo(jnp.float32).tiny), jnp.inf)
    probs = _keep(probs, lambda kept: jnp.where(kept, probs, 0.0).sum(axis=1) >= mass)
    floor = samples.min_p * probs.max(axis=1)
    return jnp.where(probs >= floor[:, None], probs, 0.0)


def _keep(probs: Float[Array, "S V"], enough: Callable[[Bool[Array, "S V"]], Bool[Array, " S"]]) -> Array:
    """Keep the entries at or over the highest threshold for which what is kept is still `enough` (or everything)."""
    bits = lax.bitcast_convert_type(probs, jnp.int32)  # probabilities are not negative, so bits order like them

    def narrow(_, bounds):
        low, high = bounds  # low: enough, or 0; high: not enough
        middle = (low + high) // 2
        suffices = enough(bits >= middle[:, None])
        return jnp.where(suffices, middle, low), jnp.where(suffices, high, middle)

    S = probs.shape[0]
    low, _ = lax.fori_loop(0, 30, narrow, (jnp.zeros(S, jnp.int32), jnp.full(S, ONE_BITS + 1, jnp.int32)))
    return jnp.where(bits >= low[:, None], probs, 0.0)
