"""Static row counts that steps are padded to. Each costs a compiled program, so there are few."""


def choose_buckets(token_budget: int) -> tuple[int, ...]:
    """At most five ascending sizes ending with the budget: three for decoding streams, two for chunks."""
    sizes = {1, 8, 32, max(1, token_budget // 4), token_budget}
    return tuple(sorted(size for size in sizes if size <= token_budget))


def bucket_for(num_rows: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds the rows."""
    return next(size for size in buckets if size >= num_rows)
