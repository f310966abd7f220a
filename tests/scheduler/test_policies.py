import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.device import spec
from twinjet.scheduler.policies import FairPolicy

POLICY = FairPolicy()


@pytest.mark.parametrize(
    ("num_rows", "uncomputed", "shares"),
    [
        (16, [], []),
        (16, [5], [5]),
        (16, [100], [16]),
        (16, [100, 100], [16, 0]),  # equals: one after the other
        (16, [100, 51], [16, 0]),  # not shorter by half
        (16, [100, 50], [8, 8]),
        (16, [100_000, 3], [13, 3]),  # what the short one leaves goes back
        (16, [3, 100_000], [3, 13]),
        (16, [100_000, 1_000, 10], [8, 4, 4]),
        (16, [100, 100, 10], [8, 4, 4]),
        (1, [100_000, 3], [1, 0]),
        (0, [100_000, 3], [0, 0]),
    ],
)
def test_divide(num_rows: int, uncomputed: list[int], shares: list[int]) -> None:
    assert POLICY.divide(num_rows, uncomputed, 0.0) == shares


@given(st.integers(0, 300), st.lists(st.integers(1, 2000), min_size=1, max_size=12))
def test_divide_uses_every_row_and_the_first_gets_half(num_rows: int, uncomputed: list[int]) -> None:
    shares = POLICY.divide(num_rows, uncomputed, 0.0)
    assert sum(shares) == min(num_rows, sum(uncomputed))
    assert all(0 <= share <= need for share, need in zip(shares, uncomputed, strict=True))
    assert shares[0] >= min(uncomputed[0], (num_rows + 1) // 2)


def test_rank_is_priority_then_arrival() -> None:
    late_but_urgent = POLICY.rank(spec(1, priority=-1), 9.0)
    early = POLICY.rank(spec(2), 1.0)
    late = POLICY.rank(spec(3), 2.0)
    assert late_but_urgent < early < late
