"""Which row counts get a program."""

from hypothesis import given
from hypothesis import strategies as st

from twinjet.engine.buckets import bucket_for, choose_buckets

budgets = st.integers(1, 1 << 16)


@given(budgets)
def test_few_ascending_sizes_from_one_row_to_the_budget(token_budget: int) -> None:
    buckets = list(choose_buckets(token_budget))
    assert len(buckets) <= 6
    assert buckets == sorted(set(buckets))
    assert (buckets[0], buckets[-1]) == (1, token_budget)


@given(budgets, st.data())
def test_rows_go_into_the_smallest_bucket_that_holds_them(token_budget: int, data: st.DataObject) -> None:
    buckets = choose_buckets(token_budget)
    num_rows = data.draw(st.integers(1, token_budget))
    bucket = bucket_for(num_rows, buckets)
    assert bucket in buckets
    assert bucket >= num_rows
    assert all(smaller < num_rows for smaller in buckets if smaller < bucket)


@given(budgets)
def test_one_decoding_stream_is_never_padded(token_budget: int) -> None:
    assert bucket_for(1, choose_buckets(token_budget)) == 1
