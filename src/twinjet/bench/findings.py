"""What the results say about prompts computed at once, and about memory; in sentences."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from twinjet.bench.results import Result

NOISE_SHARE = 0.03
"""Differences up to this share are taken for noise, however well the repetitions agree."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Prompts of one length at once, against one at a time, repetition by repetition: a pair lies close in time."""

    result: Result
    alone: Result

    @property
    def ratios(self) -> list[float]:
        """Throughput against that of one at a time, for each turn in which both ran."""
        streams = self.result.test.concurrency
        pairs = zip(self.result.stream_rates, self.alone.stream_rates, strict=False)
        return [together * streams / alone for together, alone in pairs]

    @property
    def ratio(self) -> float:
        """The middle one."""
        return statistics.median(self.ratios)

    @property
    def noise(self) -> float:
        """Up to where a difference of the ratio means nothing: two standard deviations, at least `NOISE_SHARE`.

        Infinite for one pair, which tells nothing of noise.
        """
        ratios = self.ratios
        return max(NOISE_SHARE, 2 * statistics.stdev(ratios)) if len(ratios) > 1 else math.inf

    @property
    def slower(self) -> bool:
        return self.ratio < 1 - self.noise

    @property
    def faster(self) -> bool:
        return self.ratio > 1 + self.noise

    def __str__(self) -> str:
        spread = f" ± {self.noise:.2f}" if math.isfinite(self.noise) else " (once)"
        return f"{self.ratio:.2f}x{spread}"


def compare_prefill(results: Sequence[Result]) -> dict[int, list[Comparison]]:
    """By prompt length, for those that were measured both one at a time and several at once."""
    prompts = [result for result in results if result.test.kind == "pp"]
    alone = {result.test.num_tokens: result for result in prompts if result.test.concurrency == 1}
    found: dict[int, list[Comparison]] = {}
    for result in prompts:
        one = alone.get(result.test.num_tokens)
        if one is not None and result is not one:
            found.setdefault(result.test.num_tokens, []).append(Comparison(result, one))
    return found


def findings(results: Sequence[Result]) -> list[str]:
    """Lines for people; none where the tests allow no comparison."""
    return [*_prefill_lines(compare_prefill(results)), *_memory_lines(results)]


def _prefill_lines(by_length: dict[int, list[Comparison]]) -> list[str]:
    if not by_length:
        return []
    lines = ["Prefilling several prompts at once, throughput against one at a time:"]
    for length, comparisons in by_length.items():
        lines.append(f"  pp {length}: " + ", ".join(f"{c.result.test.concurrency} at once {c}" for c in comparisons))
    every = [comparison for comparisons in by_length.values() for comparison in comparisons]
    if not any(math.isfinite(c.noise) for c in every):
        return [*lines, "  More repetitions (-r, --max-time) would tell what of this is noise."]
    slower = [f"{c.result.test.name} x {c.result.test.concurrency} ({c})" for c in every if c.slower]
    unjudged = "" if all(math.isfinite(c.noise) for c in every) else " What was measured once is not judged."
    verdict = f"Slower than one at a time: {', '.join(slower)}." if slower else "Never slower, within noise."
    lines.append(f"  {verdict}{unjudged}")
    lines.append(f"  Crossover: {_crossover(by_length)}")
    return lines


def _crossover(by_length: dict[int, list[Comparison]]) -> str:
    """Up to which prompt length going together is a gain."""
    gains = [length for length, comparisons in by_length.items() if any(c.faster for c in comparisons)]
    if not gains:
        return "at none of these lengths is anything gained."
    beyond = [length for length in by_length if length > max(gains)]
    if not beyond:
        return f"not reached, prompts of {max(gains)} tokens still gain."
    return f"prompts of up to {max(gains)} tokens gain, those from {min(beyond)} on do not."


def _memory_lines(results: Sequence[Result]) -> list[str]:
    """The longest prompt beside as many tokens in several prompts."""
    prompts = [result for result in results if result.test.kind == "pp" and result.peak_mib is not None]
    alone = sorted((r for r in prompts if r.test.concurrency == 1), key=lambda r: -r.test.num_tokens)
    for one in alone:
        same = [r for r in prompts if r is not one and r.test.total_tokens == one.test.num_tokens]
        if same:
            several = max(same, key=lambda r: r.test.num_tokens)
            return [
                f"Peak memory: {one.test.name} {one.peak_mib:.1f} MiB, "
                f"{several.test.name} x {several.test.concurrency} {several.peak_mib:.1f} MiB."
            ]
    return []
