"""Sampling against an oracle that sorts the vocabulary, and what a seed promises."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from tests.ops.sampling_oracle import draws, is_close_call, kept_probabilities, samples_of, uniform
from twinjet.core.types import MAX_LOGPROBS, MAX_TOP_K, SamplingParams
from twinjet.ops.params import Sampled
from twinjet.ops.sampling import sample

V = 700
S = 256
"""Most tests share one program, of this shape."""

_sample = jax.jit(sample)


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    """[S, V] float32, from nearly flat rows to sharp ones."""
    rng = np.random.default_rng(0)
    return (rng.normal(0, 1, (S, V)) * rng.uniform(0.3, 4, (S, 1))).astype(np.float32)


def test_temperature_zero_takes_the_most_likely_and_ignores_the_rest(logits: np.ndarray) -> None:
    params = SamplingParams(temperature=0.0, top_k=3, top_p=0.1, min_p=0.9, seed=5)
    np.testing.assert_array_equal(_choose(logits, [(params, 1)] * S), logits.argmax(axis=1))


def test_of_equal_logits_greedy_takes_the_first() -> None:
    tied = np.zeros((S, V), np.float32)
    tied[:, [300, 17, 650]] = 2.0
    assert set(_choose(tied, [(SamplingParams(temperature=0.0), 1)] * S)) == {17}


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 30, "top_p": 0.7},
        {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
        {"top_p": 0.6, "min_p": 0.3},
    ],
    ids=str,
)
def test_every_draw_inverts_the_distribution_of_what_the_filters_keep(logits: np.ndarray, kind: dict) -> None:
    rng = np.random.default_rng(1)
    rows = [
        (SamplingParams(float(rng.uniform(0.2, 2.5)), seed=int(rng.integers(1 << 63)), choice=row % 3, **kind), row)
        for row in range(S)
    ]
    _check(logits, rows)


def test_rows_of_one_step_have_their_own_parameters(logits: np.ndarray) -> None:
    rng = np.random.default_rng(2)
    rows = [
        (
            SamplingParams(
                temperature=float(rng.choice([0.0, 0.3, 1.0, 3.0])),
                top_k=int(rng.choice([0, 1, 2, 5, 100, V - 1, V, MAX_TOP_K])),
                top_p=float(rng.choice([0.01, 0.3, 0.8, 0.999, 1.0])),
                min_p=float(rng.choice([0.0, 0.001, 0.2, 1.0])),
                seed=int(rng.integers(1 << 63)),
            ),
            int(rng.integers(1 << 20)),
        )
        for _ in range(S)
    ]
    _check(logits, rows)


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
    ids=lambda params: f"t{params.temperature} k{params.top_k} p{params.top_p} m{params.min_p}",
)
def test_the_narrowest_settings_are_greedy(logits: np.ndarray, params: SamplingParams) -> None:
    rows = [(dataclasses.replace(params, seed=row), row) for row in range(S)]
    np.testing.assert_array_equal(_choose(logits, rows), logits.argmax(axis=1))


def test_settings_that_filter_nothing_change_no_draw(logits: np.ndarray) -> None:
    plain = _choose(logits, [(SamplingParams(seed=row), 9) for row in range(S)])
    for off in (
        SamplingParams(top_k=V),
        SamplingParams(top_k=MAX_TOP_K),
        SamplingParams(top_p=1.0 - 1e-12),
        SamplingParams(min_p=1e-50),
    ):
        same = _choose(logits, [(dataclasses.replace(off, seed=row), 9) for row in range(S)])
        np.testing.assert_array_equal(same, plain)


def test_the_hottest_setting_still_draws_from_everything() -> None:
    steep = np.tile(np.linspace(0, 50, V, dtype=np.float32), (S, 1))
    chosen = _choose(steep, [(SamplingParams(temperature=100.0, seed=row), 1) for row in range(S)])
    assert len(set(chosen)) > S // 2
    assert chosen.min() < V // 10
    assert chosen.max() > V - V // 10


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), {100, 200, 300}),
        (SamplingParams(top_k=4), {100, 200, 300, 400}),
        (SamplingParams(top_p=0.2), {100, 200, 300}),
        (SamplingParams(min_p=0.9), {100, 200, 300}),
        # Each of the three has 2/7 of what top-k leaves, the fourth 1/7: renormalised, two thirds need all three.
        (SamplingParams(top_k=4, top_p=0.8), {100, 200, 300}),
        (SamplingParams(top_k=4, top_p=0.87), {100, 200, 300, 400}),
    ],
    ids=str,
)
def test_ties_at_a_threshold_all_stay(params: SamplingParams, kept: set[int]) -> None:
    tied = np.full((S, V), -3.0, np.float32)
    tied[:, [100, 200, 300]] = 4.0
    tied[:, 400] = 4.0 - np.log(2.0)
    assert set(_choose(tied, [(dataclasses.replace(params, seed=row), 1) for row in range(S)])) == kept


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    few = np.full((S, V), -np.inf, np.float32)
    few[:, [600, 20, 400, 300]] = np.log(shares)
    for top_p, kept in ((0.39, {600}), (0.41, {600, 20}), (0.69, {600, 20}), (0.71, {600, 20, 400})):
        rows = [(SamplingParams(top_p=top_p, seed=row), 1) for row in range(S)]
        assert set(_choose(few, rows)) == kept, top_p


def test_a_token_that_was_filtered_out_is_never_drawn_however_sums_round() -> None:
    """Draws are aimed at where two kept tokens meet, with hundreds that were filtered out between them."""
    rng = np.random.default_rng(3)
    wide, half = 8192, 20
    for _ in range(3):
        rows = [(SamplingParams(top_k=2 * half, seed=int(rng.integers(1 << 63))), row) for row in range(S)]
        early = np.sort([rng.choice(wide // 4, half, replace=False) for _ in range(S)], axis=1)
        allowed = np.concatenate([early, early + wide * 3 // 4], axis=1)
        probs = np.full((S, wide), 1e-12)
        for row, (params, position) in enumerate(rows):
            u = uniform(params, position)
            shares = [u * rng.dirichlet(np.full(half, 9.0)), (1 - u) * rng.dirichlet(np.full(half, 9.0))]
            probs[row, allowed[row]] = np.concatenate(shares)
        chosen = _choose(np.log(probs).astype(np.float32), rows)
        assert (allowed == chosen[:, None]).any(axis=1).all()


@pytest.mark.parametrize("varied", ["seed", "choice", "position"])
def test_frequencies_follow_the_distribution(varied: str) -> None:
    """Chi-square over many draws that differ in one part of the key only."""
    shares = np.array([0.35, 0.25, 0.15, 0.1, 0.08, 0.05, 0.02])
    flat = np.full((S, V), -np.inf, np.float32)
    flat[:, 10:696:98] = np.log(shares)
    counts = np.zeros(len(shares))
    for first in range(0, 16 * S, S):
        numbers = range(first, first + S)
        rows = [
            (
                SamplingParams(
                    seed=number if varied == "seed" else 11, choice=number if varied == "choice" else 0, top_p=0.9999
                ),
                number if varied == "position" else 3,
            )
            for number in numbers
        ]
        tokens, seen = np.unique(_choose(flat, rows), return_counts=True)
        counts[(tokens - 10) // 98] += seen
    expected = shares * 16 * S
    assert ((counts - expected) ** 2 / expected).sum() < 22.5  # 6 degrees of freedom, p = 0.001


def test_seed_choice_and_position_each_give_other_draws(logits: np.ndarray) -> None:
    base = SamplingParams(temperature=2.0, seed=(7 << 40) + 5, choice=1)

    def draw(params: SamplingParams, position: int) -> np.ndarray:
        return _choose(logits, [(params, position + row) for row in range(S)])

    plain = draw(base, 100)
    np.testing.assert_array_equal(draw(base, 100), plain)
    others = [
        (dataclasses.replace(base, seed=base.seed + 1), 100),
        (dataclasses.replace(base, seed=base.seed ^ (1 << 62)), 100),
        (dataclasses.replace(base, seed=5), 100),
        (dataclasses.replace(base, choice=0), 100),
        (dataclasses.replace(base, choice=2), 100),
        (base, 100 + S),
    ]
    for params, position in others:
        assert (draw(params, position) != plain).mean() > 0.5


def test_a_row_is_chosen_alike_in_any_company_and_any_bucket() -> None:
    rng = np.random.default_rng(4)
    rows = [
        (SamplingParams(0.8, seed=1), 5),
        (SamplingParams(1.3, top_k=20, seed=2), 6),
        (SamplingParams(1.0, top_p=0.8, min_p=0.05, seed=1 << 62, choice=3), 7),
        (SamplingParams(0.0), 8),
    ]
    mine = rng.normal(0, 2, (len(rows), V)).astype(np.float32)
    others = [(SamplingParams(float(rng.uniform(0, 2)), top_k=int(rng.integers(9)), seed=row), row) for row in range(S)]
    theirs = rng.normal(0, 5, (S, V)).astype(np.float32)
    alone = [_run(mine[row : row + 1], [rows[row]], 1) for row in range(len(rows))]
    expected = [int(one.token_ids[0]) for one in alone]
    for before in (0, 3, 100, S - 4):
        for after in (0, S - 4 - before):  # padding, or strangers
            company = [*others[:before], *rows, *others[S - after :]]
            stacked = np.concatenate([theirs[:before], mine, theirs[S - after :]])
            chosen = _run(stacked, company, S).token_ids[before : before + 4]
            assert chosen.tolist() == expected, (before, after)


def test_log_probabilities_are_of_the_model_itself(logits: np.ndarray) -> None:
    """Before temperature and filters, with the most likely tokens in order."""
    rows = [(SamplingParams(float(row % 3), top_k=5 * (row % 2), seed=row), row) for row in range(S)]
    sampled = _run(logits, rows, S, num_with_logprobs=1)
    exact = logits - _log_sum_exp(logits)[:, None]
    tokens = np.asarray(sampled.token_ids)
    np.testing.assert_allclose(sampled.logprobs, exact[np.arange(S), tokens], atol=1e-5)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(sampled.top_ids, order)
    np.testing.assert_allclose(sampled.top_logprobs, np.take_along_axis(exact, order, axis=1), atol=1e-5)
    np.testing.assert_array_equal(tokens, _choose(logits, rows))


def test_nobody_who_asks_gets_zeros(logits: np.ndarray) -> None:
    sampled = _run(logits, [(SamplingParams(), 1)] * S, S)
    assert not np.asarray(sampled.logprobs).any()
    assert not np.asarray(sampled.top_ids).any()
    assert not np.asarray(sampled.top_logprobs).any()


def test_a_step_in_which_nobody_samples_runs(logits: np.ndarray) -> None:
    sampled = _run(logits, [], S, num_with_logprobs=0)
    assert sampled.token_ids.shape == (S,)


def test_a_vocabulary_of_a_quarter_million() -> None:
    size = 262_144
    rng = np.random.default_rng(5)
    wide = rng.normal(0, 2, (4, size)).astype(np.float32)
    kinds = (SamplingParams(seed=1), SamplingParams(0.7, top_k=64, top_p=0.95, seed=2), SamplingParams(0.0))
    for position in range(3):
        rows = [(params, position) for params in kinds]
        sampled = _run(wide, rows, 4, num_with_logprobs=1)
        for row, token in enumerate(_expected(wide, rows)):
            assert int(sampled.token_ids[row]) in token
        np.testing.assert_array_equal(sampled.top_ids, np.argsort(-wide, axis=1)[:, :MAX_LOGPROBS])


def test_draws_reach_both_ends_of_the_vocabulary() -> None:
    """Odd sizes, so that no power of two hides a tail that is cut off."""
    ends = np.full((S, V), -np.inf, np.float32)
    ends[:, [0, V - 1]] = 0.0
    assert set(_choose(ends, [(SamplingParams(seed=row), 1) for row in range(S)])) == {0, V - 1}


def _run(
    logits: np.ndarray, rows: Sequence[tuple[SamplingParams, int]], size: int, num_with_logprobs: int = 0
) -> Sampled:
    """With logits of padding that would show if they were ever looked at."""
    padded = np.full((size, logits.shape[1]), np.nan, np.float32)
    padded[: len(logits)] = logits
    return _sample(padded, samples_of(rows, size, num_with_logprobs))


def _choose(logits: np.ndarray, rows: Sequence[tuple[SamplingParams, int]]) -> np.ndarray:
    return np.asarray(_run(logits, rows, S).token_ids)


def _expected(logits: np.ndarray, rows: Sequence[tuple[SamplingParams, int]]) -> list[set[int]]:
    return [
        {int(logits[row].argmax())}
        if params.temperature == 0.0
        else draws(kept_probabilities(logits[row], params), uniform(params, position))
        for row, (params, position) in enumerate(rows)
    ]


def _check(logits: np.ndarray, rows: Sequence[tuple[SamplingParams, int]]) -> None:
    """Every row's token is the one that its number gives, but for sets that hang on rounding, of which few may be."""
    num_checked = num_sharp = 0
    for row, (token, expected) in enumerate(zip(_choose(logits, rows), _expected(logits, rows), strict=True)):
        params = rows[row][0]
        if params.temperature > 0.0 and is_close_call(logits[row], params):
            continue
        assert int(token) in expected, params
        num_checked += 1
        num_sharp += len(expected) == 1
    assert num_checked > 0.9 * len(rows)
    assert num_sharp > 0.9 * len(rows)


def _log_sum_exp(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    top = exact.max(axis=1)
    return top + np.log(np.exp(exact - top[:, None]).sum(axis=1))
