"""The numbers of a forecast by name, and what was measured against them. Knows no engine and no clock."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinjet.core.types import Forecast

PREFILL, DECODE = "prefill", "decode"
"""Names of the two throughputs."""


def ttft_name(num_tokens: int, num_streams: int) -> str:
    return f"TTFT {num_tokens} tokens, " + (f"beside {num_streams} streams" if num_streams else "alone")


def itl_name(num_streams: int, *, beside_prompt: bool = False) -> str:
    return f"ITL {num_streams} streams" + (", beside a prompt" if beside_prompt else "")


@dataclass(frozen=True, slots=True)
class Prediction:
    """One number of a forecast."""

    kind: str
    """"TTFT" or "ITL", in milliseconds, or "throughput", in tokens per second."""
    name: str
    value: float

    @property
    def unit(self) -> str:
        return "tokens/s" if self.kind == "throughput" else "ms"


def predictions(told: Forecast) -> list[Prediction]:
    """All that can be measured. The rest is the engine's own choice (rows, target) or a bound."""
    return [
        *(Prediction("TTFT", ttft_name(n, 0), ms) for n, ms in told.ttft_ms),
        *(Prediction("TTFT", ttft_name(n, told.busy_streams), ms) for n, ms in told.busy_ttft_ms),
        *(Prediction("ITL", itl_name(n), ms) for n, ms in told.itl_ms),
        Prediction("ITL", itl_name(told.busy_streams, beside_prompt=True), told.busy_itl_ms),
        Prediction("throughput", PREFILL, told.prefill_tokens_s),
        Prediction("throughput", DECODE, told.decode_tokens_s),
    ]


def errors_percent(prediction: Prediction, values: Sequence[float]) -> np.ndarray:
    """[N], each measurement's distance from what was foretold, relative to that, without sign."""
    return 100 * abs(np.array(values) / prediction.value - 1)


def compare(prediction: Prediction, values: Sequence[float]) -> dict[str, Any]:
    """One row of the table. `p95` is what 95% of the measurements were no worse than."""
    middle = float(np.median(values))
    worse = 5 if prediction.kind == "throughput" else 95
    return {
        "kind": prediction.kind,
        "quantity": prediction.name,
        "unit": prediction.unit,
        "predicted": round(prediction.value, 2),
        "median": round(middle, 2),
        "p95": round(float(np.percentile(values, worse)), 2),
        "num_measured": len(values),
        "error_of_median_percent": round(100 * (middle / prediction.value - 1), 1),
        "error_p95_percent": round(float(np.percentile(errors_percent(prediction, values), 95)), 1),
    }


def stalls(told: Forecast, gaps_ms: Sequence[float]) -> dict[str, Any]:
    """Gaps of streams beside prompts, and the bound that was told for them."""
    keeps = dict(told.itl_ms)[told.busy_streams] <= told.itl_target_ms
    bound_ms = told.stall_bound_ms if keeps else told.full_stall_bound_ms
    return {
        "decoding_alone_keeps_to_target": keeps,
        "bound_ms": None if bound_ms is None else round(bound_ms, 1),
        "longest_ms": round(max(gaps_ms), 1),
        "num_gaps": len(gaps_ms),
        "num_beyond": 0 if bound_ms is None else sum(gap_ms > bound_ms for gap_ms in gaps_ms),
    }


def summarise(errors: Sequence[tuple[str, np.ndarray]]) -> dict[str, dict[str, float]]:
    """Median and 95th percentile of (kind, errors in percent), by kind and over all."""
    by_kind: dict[str, list[np.ndarray]] = defaultdict(list)
    for kind, each in errors:
        # As many numbers of each prediction: a gap is measured a hundred times as often as a first token.
        spread = np.percentile(each, range(101))
        by_kind["all"].append(spread)
        by_kind[kind].append(spread)
    return {
        kind: {
            "median_percent": round(float(np.median(spreads)), 1),
            "p95_percent": round(float(np.percentile(spreads, 95)), 1),
        }
        for kind, spreads in by_kind.items()
    }
