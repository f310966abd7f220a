"""Who goes first, what a step is for, and how chunks share it.

A policy ranks sequences, says whether streams or prompts have the next step, and divides rows; it knows neither pages
nor slots nor the device. How many rows a step may have is the scheduler's business, and the cost model's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from twinjet.core.config import PolicyName
from twinjet.scheduler.sequence import SequenceSpec

MIN_CHUNK_ROWS = 16
"""A prompt gets on by this many rows in a step at least, beside streams and however tight their target."""

PRIORITY_S = 10.0
"""What a level of priority is worth."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What the next step is for."""

    decodes: bool
    """Every decoding sequence gets its row."""
    chunks: Literal["none", "least", "paced", "full"]
    """Rows of prompts: none; `MIN_CHUNK_ROWS`; as many as the ITL target allows; or as many as give good throughput."""


class Policy(Protocol):
    """What the scheduler asks. Answers depend on the arguments only, so that the same calls give the same plans."""

    def rank(self, spec: SequenceSpec, arrival_s: float) -> tuple[float, ...]:
        """Lower goes first: in admission, in the division of rows, in keeping its pages. Ties: first added first."""
        ...

    def mix(self, num_decoding: int, has_prompts: Callable[[], bool]) -> Mix:
        """
        Args:
            num_decoding: sequences that decode.
            has_prompts: whether a prompt could be computed now; takes a look at all of them.
        """
        ...

    def divide(self, num_rows: int, uncomputed: Sequence[int], now_s: float) -> list[int]:
        """Rows for each prompt: `num_rows` together, or all of `uncomputed` where that is less.

        Args:
            num_rows: rows that prompts may have in this step.
            uncomputed: tokens that each prompt, in order of rank, has still to compute.
            now_s: the clock of `arrival_s`.
        """
        ...


class BalancedPolicy:
    """By arrival; streams first, chunks beside them; a prompt yields half of its rows to much shorter ones.

    A level of priority counts as much as `PRIORITY_S` of waiting, so that no level is ever passed for good.
    Prompts of like length run one after the other, which gives the best mean TTFT: dividing rows equally
    between n equal prompts would delay every first token to the end of the last. But where a prompt behind
    needs at most half as much, the one ahead takes only half of the rows that are left to it, so that a short
    prompt behind a 100,000-token one computes at half speed at once, and the long one never below half of
    what it would get alone. The same rule applies again among those behind. Rows that nobody behind needs
    go back to the front. Nobody starves, since the first in rank always gets at least half.
    """

    def rank(self, spec: SequenceSpec, arrival_s: float) -> tuple[float, ...]:
        return (arrival_s + PRIORITY_S * spec.priority,)

    def mix(self, num_decoding: int, has_prompts: Callable[[], bool]) -> Mix:
        return Mix(True, "paced" if num_decoding else "full")

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


class PrefillFirstPolicy(BalancedPolicy):
    """Streams wait while any prompt can be computed, as in JetStream: the best TTFT, and gaps as long as prompts are.

    Streams get on all the same: prompts need slots, and when all slots decode there is none left.
    """

    def mix(self, num_decoding: int, has_prompts: Callable[[], bool]) -> Mix:
        if has_prompts():
            return Mix(False, "full")
        return Mix(True, "none")


class DecodeFirstPolicy(BalancedPolicy):
    """Prompts get as little as they can do with while anybody decodes: streams hardly feel them, and TTFTs are long.

    Not nothing: the first prompt to decode would then have the engine to itself until its answer ends.
    """

    def mix(self, num_decoding: int, has_prompts: Callable[[], bool]) -> Mix:
        return Mix(True, "least" if num_decoding else "full")


POLICIES: dict[PolicyName, type[BalancedPolicy]] = {
    "balanced": BalancedPolicy,
    "prefill-first": PrefillFirstPolicy,
    "decode-first": DecodeFirstPolicy,
}
