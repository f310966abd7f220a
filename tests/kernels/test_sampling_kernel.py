"""The sampling kernel against the reference op and a sorting oracle, and a row's token whatever is round it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.step_calls import call, pack, step_attributes, threads
from tests.ops.ragged import batch_of
from tests.ops.sampling_oracle import draws, is_close_call, kept_probabilities, samples_of, uniform
from twinjet.core.types import MAX_LOGPROBS, MAX_TOP_K, SamplingParams
from twinjet.ops.batch import StepLayout
from twinjet.ops.params import Sampled
from twinjet.ops.sampling import sample

S = 64
"""Rows of most steps here."""

VOCABULARIES = (20, 255, 700, 8191, 20001)
"""Under a stride of 256, odd, and over several parts of 8192."""

KINDS = (
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 500},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"top_k": 30, "top_p": 0.7},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
    {"top_p": 0.6, "min_p": 0.3},
)

Rows = Sequence[tuple[SamplingParams, int]]


@pytest.mark.parametrize("V", [20, 700, 20001])
def test_it_chooses_what_the_reference_and_the_oracle_choose(V: int) -> None:
    """But where a filter or a draw hangs on rounding, of which there are few; there, one of the two neighbours."""
    rng = np.random.default_rng(V)
    num_rows = num_same = num_checked = 0
    for _ in range(6 if V <= 700 else 2):
        logits = _logits(rng, S, V)
        rows = [_random_row(rng) for _ in range(S)]
        chosen, reference = _choose(logits, rows), _reference(logits, rows)
        for row, (params, position) in enumerate(rows):
            num_rows += 1
            num_same += int(chosen[row] == reference[row])
            if params.temperature == 0.0:
                assert chosen[row] == logits[row].argmax()
            elif not is_close_call(logits[row], params):
                num_checked += 1
                expected = draws(kept_probabilities(logits[row], params), uniform(params, position))
                assert int(chosen[row]) in expected, params
    assert num_same >= 0.99 * num_rows, f"{num_rows - num_same} of {num_rows} differ"
    assert num_checked > 0.6 * num_rows


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_draws_as_the_reference_over_thousands_of_rows(kind: dict) -> None:
    rng = np.random.default_rng(len(str(kind)))
    num_rows = num_same = 0
    for _ in range(16):
        logits = _logits(rng, S, 700)
        rows = [(dataclasses.replace(_random_row(rng)[0], **(FILTERS_OFF | kind)), row) for row in range(S)]
        num_same += int((_choose(logits, rows) == _reference(logits, rows)).sum())
        num_rows += S
    assert num_same >= 0.998 * num_rows, f"{num_rows - num_same} of {num_rows} differ"


def test_a_row_gets_the_same_alone_in_company_and_on_any_number_of_threads() -> None:
    V = 20001
    rng = np.random.default_rng(5)
    logits = _logits(rng, S, V)
    rows = [_random_row(rng) for _ in range(S)]
    together = _run(logits, rows, num_with_logprobs=1)
    for count in (1, 3):
        with threads(count):
            np.testing.assert_array_equal(_run(logits, rows, num_with_logprobs=1), together)
    order = rng.permutation(S)[:40]
    np.testing.assert_array_equal(_run(logits[order], [rows[i] for i in order], 1)[:40], together[order])
    for i in range(0, S, 7):
        with threads(1 + i % 2):
            np.testing.assert_array_equal(_run(logits[i : i + 1], rows[i : i + 1], 1, size=1)[0], together[i])


def test_of_equal_logits_greedy_takes_the_first_and_zeros_of_either_sign_are_equal() -> None:
    V = 9000
    tied = np.full((S, V), -1.0, np.float32)
    tied[:, [300, 8500]] = 0.0
    tied[:, 17] = -0.0
    assert set(_choose(tied, [(SamplingParams(temperature=0.0), 1)] * S)) == {17}
    kept = [(SamplingParams(top_k=1, seed=row), 1) for row in range(S)]
    assert set(_choose(tied, kept)) == {17, 300, 8500}


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), {100, 200, 300}),
        (SamplingParams(top_k=4), {100, 200, 300, 400}),
        (SamplingParams(top_p=0.2), {100, 200, 300}),
        (SamplingParams(min_p=0.9), {100, 200, 300}),
        (SamplingParams(top_k=4, top_p=0.8), {100, 200, 300}),
        (SamplingParams(top_k=4, top_p=0.87), {100, 200, 300, 400}),
    ],
    ids=str,
)
def test_ties_at_a_threshold_all_stay(params: SamplingParams, kept: set[int]) -> None:
    tied = np.full((S, 700), -3.0, np.float32)
    tied[:, [100, 200, 300]] = 4.0
    tied[:, 400] = 4.0 - np.log(2.0)
    assert set(_choose(tied, [(dataclasses.replace(params, seed=row), 1) for row in range(S)])) == kept


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(min_p=1.0),
        SamplingParams(top_p=1e-6),
        SamplingParams(top_p=1e-50),
        SamplingParams(temperature=1e-5),
        SamplingParams(temperature=1.2e-38),
        SamplingParams(temperature=1e-300),
    ],
    ids=str,
)
def test_the_narrowest_settings_are_greedy(params: SamplingParams) -> None:
    logits = _logits(np.random.default_rng(6), S, 700)
    logits[::2] *= np.float32(1e30)
    rows = [(dataclasses.replace(params, seed=row), row) for row in range(S)]
    np.testing.assert_array_equal(_choose(logits, rows), logits.argmax(axis=1))


def test_settings_that_filter_nothing_change_no_draw() -> None:
    logits = _logits(np.random.default_rng(7), S, 700)
    plain = _choose(logits, [(SamplingParams(seed=row), 9) for row in range(S)])
    settings: list[dict[str, Any]] = [{"top_k": 700}, {"top_k": MAX_TOP_K}, {"top_p": 1.0 - 1e-12}, {"min_p": 1e-50}]
    for off in settings:
        same = _choose(logits, [(SamplingParams(seed=row, **off), 9) for row in range(S)])
        np.testing.assert_array_equal(same, plain)


def test_draws_reach_both_ends_of_the_vocabulary_and_nothing_between() -> None:
    V = 8193
    ends = np.full((S, V), -np.inf, np.float32)
    ends[:, [0, V - 1]] = 0.0
    kinds: list[dict[str, Any]] = [{}, {"top_k": 2}, {"top_p": 0.99}, {"min_p": 0.5}]
    for kind in kinds:
        assert set(_choose(ends, [(SamplingParams(seed=row, **kind), 1) for row in range(S)])) == {0, V - 1}


@pytest.mark.parametrize("V", VOCABULARIES)
def test_log_probabilities_are_those_of_the_logits_as_they_came(V: int) -> None:
    rng = np.random.default_rng(8)
    logits = _logits(rng, S, V)
    logits[0] = 3.0  # all tied: the first ids
    rows = [_random_row(rng) for _ in range(S)]
    result = _run(logits, rows, num_with_logprobs=1)
    n = min(V, MAX_LOGPROBS)
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    logp = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    top_ids = np.argsort(-logits, axis=1, kind="stable")[:, :n]
    np.testing.assert_array_equal(result[:, 2 : 2 + n], top_ids)
    got = result.view(np.float32)
    np.testing.assert_allclose(got[:, 2 + n :], np.take_along_axis(logp, top_ids, 1), rtol=3e-7, atol=2e-6)
    np.testing.assert_allclose(got[:, 1], np.take_along_axis(logp, result[:, :1], 1)[:, 0], rtol=3e-7, atol=2e-6)
    reference = _sample(logits, samples_of(rows, S, 1))
    np.testing.assert_allclose(got[:, 2 + n :], reference.top_logprobs, rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(_run(logits, rows)[:, 0], result[:, 0])
    assert not _run(logits, rows)[:, 1:].any()


def test_the_number_of_a_seed_is_jax_s_own() -> None:
    """Its bits, read off a flat distribution over 2**16 tokens, whose token is the number's first 16 bits."""
    V, size = 1 << 16, 16
    flat = np.zeros((size, V), np.float32)
    rng = np.random.default_rng(9)
    for _ in range(4):
        rows = [
            (SamplingParams(seed=int(rng.integers(1 << 63)), choice=int(rng.integers(8))), int(rng.integers(1 << 20)))
            for _ in range(size)
        ]
        expected = [int(uniform(params, position) * V) for params, position in rows]
        np.testing.assert_array_equal(_run(flat, rows, size=size)[:, 0], expected)


def test_padding_gives_zeros_and_tokens_go_to_their_slots_only() -> None:
    layout = StepLayout(8, 8, 8)
    logits = _logits(np.random.default_rng(10), 8, 700)
    logits[3:] = np.nan
    samples = samples_of([(SamplingParams(temperature=0.0), 1)] * 3, 8)
    samples = dataclasses.replace(samples, slot=jnp.asarray(np.array([5, 0, 7, 8, 8, 8, 8, 8], np.int32)))
    result, last = _call(layout, logits, samples, np.arange(100, 108, dtype=np.int32))
    top = logits[:3].argmax(axis=1)
    np.testing.assert_array_equal(result[:, 0], [*top, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(last, [top[1], 101, 102, 103, 104, top[0], 106, top[2]])
    nobody = samples_of([], 8)
    result, last = _call(layout, logits, nobody, np.arange(8, dtype=np.int32))
    assert not result.any()
    np.testing.assert_array_equal(last, np.arange(8))


FILTERS_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}

_sample = jax.jit(sample)


def _logits(rng: np.random.Generator, rows: int, V: int) -> np.ndarray:
    """From nearly flat to sharp."""
    return (rng.normal(0, 1, (rows, V)) * rng.uniform(0.3, 4, (rows, 1))).astype(np.float32)


def _random_row(rng: np.random.Generator) -> tuple[SamplingParams, int]:
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 3.0, float(rng.uniform(0.2, 2.5))])),
        top_k=int(rng.choice([0, 0, 1, 5, 100, MAX_TOP_K])),
        top_p=float(rng.choice([0.01, 0.3, 0.8, 0.999, 1.0, 1.0])),
        min_p=float(rng.choice([0.0, 0.0, 0.001, 0.2, 1.0])),
        seed=int(rng.integers(1 << 63)),
        choice=int(rng.integers(4)),
    )
    return params, int(rng.integers(1 << 20))


def _call(layout: StepLayout, logits: np.ndarray, samples, last_token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    table = np.zeros((layout.num_slots, layout.table_width), np.int32)
    packed = pack(layout, dataclasses.replace(batch_of(layout, [], table), samples=samples))
    width = 2 + 2 * min(MAX_LOGPROBS, logits.shape[1])
    shapes = [
        jax.ShapeDtypeStruct((layout.max_samples, width), np.int32),
        jax.ShapeDtypeStruct(last_token.shape, np.int32),
    ]
    result, last = call("twinjet_sample", shapes, [logits, packed, last_token], {2: 1}, **step_attributes(layout))
    return result, last


def _run(logits: np.ndarray, rows: Rows, num_with_logprobs: int = 0, size: int = S) -> np.ndarray:
    """[size, 2 + 2 n], with logits of padding that would show if they were ever looked at."""
    padded = np.full((size, logits.shape[1]), np.nan, np.float32)
    padded[: len(logits)] = logits
    samples = samples_of(rows, size, num_with_logprobs)
    return _call(StepLayout(size, size, 8), padded, samples, np.zeros(size, np.int32))[0]


def _choose(logits: np.ndarray, rows: Rows) -> np.ndarray:
    return _run(logits, rows)[:, 0]


def _reference(logits: np.ndarray, rows: Rows) -> np.ndarray:
    sampled: Sampled = _sample(logits, samples_of(rows, S))
    return np.asarray(sampled.token_ids)
