"""How long a request would wait for its first token, by what an engine foretold and what it has to do.

An estimate: prefixes that the engine has cached, and answers that end early, make it shorter.
"""

from bisect import bisect_left
from collections.abc import Sequence

from twinjet.core.types import Forecast


def ttft_s(
    forecast: Forecast, num_prompt: int, ahead: Sequence[int], remaining: Sequence[int], max_streams: int
) -> float:
    """Seconds to the first token of a prompt that arrives now.

    Args:
        num_prompt: its tokens.
        ahead: uncomputed prompt tokens of each sequence before it.
        remaining: tokens that each sequence on the engine has still to generate, these included.
        max_streams: slots of the engine.
    """
    table = forecast.busy_ttft_ms if len(remaining) > len(ahead) else forecast.ttft_ms
    # Longer prompts ahead give up half of the rows, each of what is left to it; shorter ones go first.
    shorter = sum(need for need in ahead if need < 2 * num_prompt)
    num_longer = sum(need >= 2 * num_prompt for need in ahead)
    tokens = min(sum(ahead) + num_prompt, shorter + (num_prompt << min(num_longer, 32)))
    return slot_wait_s(forecast, remaining, max_streams) + _interpolate(table, tokens) / 1e3


def slot_wait_s(forecast: Forecast, remaining: Sequence[int], max_streams: int) -> float:
    """Seconds until a slot is free for one more sequence, if all of these run to their last token."""
    num_over = len(remaining) - max_streams
    if num_over < 0:
        return 0.0
    return sorted(remaining)[num_over] * forecast.itl_ms[-1][1] / 1e3


def _interpolate(table: Sequence[tuple[int, float]], tokens: int) -> float:
    """Milliseconds for so many tokens: straight lines from nothing through the table, the last of which goes on."""
    points = [(0, 0.0), *table]
    after = min(max(bisect_left(points, (tokens, 0.0)), 1), len(points) - 1)
    (low, low_ms), (high, high_ms) = points[after - 1], points[after]
    return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)
