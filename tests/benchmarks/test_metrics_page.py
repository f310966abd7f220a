"""Figures between two readings of /metrics, and tokens that tell the time."""

import pytest

from benchmarks.metrics_page import Buckets, Gain
from benchmarks.simulated import FIRST_TOKEN, NUM_TICKS, TICK_S, token_age_s

INF = float("inf")


def page(steps: float, short: float, all_: float) -> dict[tuple[str, str], float]:
    return {
        ("twinjet_steps_total", ""): steps,
        ("twinjet_gap_seconds_bucket", "0.1"): short,
        ("twinjet_gap_seconds_bucket", "+Inf"): all_,
    }


def test_a_gain_is_the_difference_of_two_pages() -> None:
    gain = Gain(page(10, 3, 4), page(25, 8, 11))
    assert gain.total("steps_total") == 15
    assert gain.buckets("gap_seconds") == Buckets((0.1, INF), (5, 2))
    assert gain.buckets("step_seconds") is None


def test_what_the_first_page_lacks_was_zero() -> None:
    gain = Gain({}, page(25, 8, 11))
    assert gain.total("steps_total") == 25
    assert gain.buckets("gap_seconds") == Buckets((0.1, INF), (8, 3))


@pytest.mark.parametrize(("share", "expected_s"), [(0.25, 0.05), (0.5, 0.1), (0.875, 0.3), (1.0, 0.3)])
def test_values_lie_evenly_in_their_bucket(share: float, expected_s: float) -> None:
    assert Buckets((0.1, 0.3, INF), (4, 3, 1)).quantile_s(share) == pytest.approx(expected_s)


def test_nothing_has_no_quantiles() -> None:
    assert Buckets((0.1, INF), (0, 0)).quantile_s(0.5) is None


@pytest.mark.parametrize("tick", [0, 1, 39_999, 40_000, 123_456_789])
@pytest.mark.parametrize("age_s", [-0.05, 0.0, 0.0031, 3.8])
def test_a_token_tells_its_age(tick: int, age_s: float) -> None:
    token_id = FIRST_TOKEN + tick % NUM_TICKS
    assert token_age_s(token_id, tick * TICK_S + age_s) == pytest.approx(age_s, abs=1e-6)


def test_a_word_does_not_tell_the_time() -> None:
    with pytest.raises(ValueError, match="tells the time"):
        token_age_s(FIRST_TOKEN - 1, 1.0)
