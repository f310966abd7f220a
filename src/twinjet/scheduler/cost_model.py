"""How long a step takes, from what is in it: a model fitted to steps that were measured.

A step costs something fixed, something for its rows, which is not proportional (weights are read once for all rows, and
a backend may pad them), something for each token sampled, and something for the KV that its rows read. Attention's work
is proportional to the pairs of a row and a position it sees, but a sequence's single row reads its KV for itself, while
the rows of a chunk share what is read, so the two have prices of their own:

    ms = base(rows) + sample_ms * samples + single_ms * single_pairs + chunk_ms * chunk_pairs

`base` rises, in straight lines between the row counts that were measured. Knows no queue, no device and no clock.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_ROUNDS = 2000
"""Of the fit; each costs microseconds, and few are needed."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's time depends on."""

    rows: int = 0
    samples: int = 0
    """Rows whose logits choose a token."""
    single_pairs: int = 0
    """Positions seen, over the sequences that have one row."""
    chunk_pairs: int = 0
    """Positions seen, over all rows of the sequences that have more."""

    def plus(self, start: int, num_rows: int, samples: bool) -> "StepShape":
        """With one more sequence, `num_rows` of it at positions [start, start + num_rows)."""
        pairs = num_rows * start + num_rows * (num_rows + 1) // 2
        return StepShape(
            self.rows + num_rows,
            self.samples + samples,
            self.single_pairs + (pairs if num_rows == 1 else 0),
            self.chunk_pairs + (pairs if num_rows > 1 else 0),
        )


NOTHING = StepShape()


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that was run."""

    shape: StepShape
    ms: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices in milliseconds; `rows` and `base_ms` are the corners of `base`."""

    rows: tuple[int, ...]
    base_ms: tuple[float, ...]
    sample_ms: float
    single_ms: float
    chunk_ms: float

    def predict_ms(self, shape: StepShape) -> float:
        """Of a step with at least one row."""
        return (
            self._base(shape.rows)
            + self.sample_ms * shape.samples
            + self.single_ms * shape.single_pairs
            + self.chunk_ms * shape.chunk_pairs
        )

    def _base(self, rows: int) -> float:
        corners, base = self.rows, self.base_ms
        if len(corners) == 1:
            return base[0]
        # Beyond the last corner the last line goes on.
        after = min(max(bisect_left(corners, rows), 1), len(corners) - 1)
        before = after - 1
        slope = (base[after] - base[before]) / (corners[after] - corners[before])
        return base[before] + slope * max(0, rows - corners[before])


def fit(steps: Sequence[MeasuredStep]) -> CostModel:
    """Least squares of the relative errors, with no negative price (a projected coordinate descent).

    Raises: ValueError, without steps.
    """
    if not steps:
        raise ValueError("a cost model needs at least one measured step")
    corners = sorted({step.shape.rows for step in steps})
    features = np.array([_features(step.shape, corners) for step in steps])
    relative = features / np.array([[step.ms] for step in steps])
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    relative /= scale
    gram, target = relative.T @ relative, relative.sum(axis=0)
    weights = np.zeros(len(scale))
    for _ in range(_ROUNDS):
        for i in range(len(weights)):
            if gram[i, i]:
                weights[i] = max(0.0, weights[i] + (target[i] - gram[i] @ weights) / gram[i, i])
    prices = weights / scale
    base = np.cumsum(prices[: len(corners)])
    sample_ms, single_ms, chunk_ms = (float(price) for price in prices[len(corners) :])
    return CostModel(tuple(corners), tuple(float(ms) for ms in base), sample_ms, single_ms, chunk_ms)


def _features(shape: StepShape, corners: Sequence[int]) -> list[float]:
    """What each price is multiplied with: the fixed part, how much of each line of `base` is used, and the rest."""
    lines = [min(1.0, max(0.0, (shape.rows - low) / (high - low))) for low, high in pairwise(corners)]
    return [1.0, *lines, shape.samples, shape.single_pairs, shape.chunk_pairs]
