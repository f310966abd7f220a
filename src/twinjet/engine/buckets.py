"""Static row counts that steps are padded to. Each costs a compiled program, so there are few."""

MAX_BUCKETS = 6


def choose_buckets(token_budget: int) -> tuple[int, ...]:
    """At most six ascending sizes ending with the budget.

    Small ones grow by four (decoding streams), the large ones by two (chunks), so padding stays under
    half of a large step, where rows are dear.
    """
    sizes = {token_budget, *(size for size in (1, 8, 32, token_budget // 4, token_budget // 2) if size >= 1)}
    return tuple(sorted(size for size in sizes if size <= token_budget))[-MAX_BUCKETS:]


def bucket_for(num_rows: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds the rows."""
    return next(size for size in buckets if size >= num_rows)
