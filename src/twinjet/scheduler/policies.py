"""Who goes first, and how chunks share a step.

A policy ranks sequences and divides rows; it knows neither pages nor slots nor the device. Decoding rows
are not its business: each decoding sequence gets its row before any chunk.
"""

from collections.abc import Sequence
from typing import Protocol

from twinjet.scheduler.sequence import SequenceSpec


class Policy(Protocol):
    """What the scheduler asks. Answers depend on the arguments only, so that the same calls give the same plans."""

    def rank(self, spec: SequenceSpec, arrival_s: float) -> tuple[float, ...]:
        """Lower goes first: in admission, in the division of rows, in keeping its pages. Ties: first added first."""
        ...

    def divide(self, num_rows: int, uncomputed: Sequence[int], now_s: float) -> list[int]:
        """Rows for each prompt, at most `num_rows` together and at most `uncomputed[i]` each.

        Args:
            num_rows: rows that the decoding sequences left of the token budget.
            uncomputed: tokens that each prompt, in order of rank, has still to compute.
            now_s: the clock of `arrival_s`.
        """
        ...


class FairPolicy:
    """Priority, then arrival; a prompt yields half of the rows to much shorter ones behind it.

    Prompts of like length run one after the other, which gives the best mean TTFT: dividing rows equally
    between n equal prompts would delay every first token to the end of the last. But where a prompt behind
    needs at most half as much, the one ahead takes only half of the rows that are left to it, so that a short
    prompt behind a 100,000-token one computes at half speed at once, and the long one never below half of
    what it would get alone. The same rule applies again among those behind. Rows that nobody behind needs
    go back to the front. Nobody starves, since the first in rank always gets at least half.
    """

    def rank(self, spec: SequenceSpec, arrival_s: float) -> tuple[float, ...]:
        return (spec.priority, arrival_s)

    def divide(self, num_rows: int, uncomputed: Sequence[int], now_s: float) -> list[int]:
        num_prompts = len(uncomputed)
        if num_prompts == 1:
            return [min(num_rows, uncomputed[0])]
        shares = [0] * num_prompts
        if num_prompts == 0:
            return shares
        shortest_from = list(uncomputed)  # shortest_from[i]: least of uncomputed[i:]
        for i in range(num_prompts - 2, -1, -1):
            shortest_from[i] = min(shortest_from[i], shortest_from[i + 1])

        left = num_rows
        for i, need in enumerate(uncomputed):
            yields = i + 1 < num_prompts and shortest_from[i + 1] * 2 <= need
            shares[i] = min(need, (left + 1) // 2 if yields else left)
            left -= shares[i]
            if left == 0:
                return shares
        for i, need in enumerate(uncomputed):
            extra = min(need - shares[i], left)
            shares[i] += extra
            left -= extra
        return shares
