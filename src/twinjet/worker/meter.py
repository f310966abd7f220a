"""What steps took, beside what they should have: sums and histograms for the reports of an engine process.

By the stamps of a step's begin and end: the device's own, where it has a clock, else the engine's.
"""

from bisect import bisect_left

from twinjet.core.plan import StepOutput
from twinjet.scheduler.pace import Pace
from twinjet.scheduler.sequence import CompletedStep
from twinjet.wire.messages import DURATION_BOUNDS_S, Durations


class StepMeter:
    """Takes steps in order."""

    def __init__(self) -> None:
        self.pace: Pace | None = None
        """Whose stall bound to watch."""
        self.busy_s_total = 0.0
        self.padding_rows_total = 0
        self.predicted_s_total = 0.0
        self.stall_bound_violations_total = 0
        self._step_counts = [0] * (len(DURATION_BOUNDS_S) + 1)
        self._gap_counts = [0] * (len(DURATION_BOUNDS_S) + 1)
        self._gap_s_total = 0.0
        self._ended_s: float | None = None
        """End of the last step, if it left work behind."""

    def add(self, output: StepOutput, step: CompletedStep, *, more_work: bool) -> None:
        """`more_work`: at its end there was something left to compute, so that time until the next step is a gap."""
        took_s = output.ended_s - output.started_s
        self.busy_s_total += took_s
        self.padding_rows_total += output.num_padding_rows
        self.predicted_s_total += (step.predicted_ms or 0.0) / 1e3
        self._step_counts[bisect_left(DURATION_BOUNDS_S, took_s)] += 1
        if self._ended_s is not None:
            gap_s = max(0.0, output.started_s - self._ended_s)
            self._gap_s_total += gap_s
            self._gap_counts[bisect_left(DURATION_BOUNDS_S, gap_s)] += 1
            # Who decodes had its last token with the step before, at best.
            since_token_ms = (output.ended_s - self._ended_s) * 1e3
            if step.decodes and self._is_over(since_token_ms, step.predicted_ms):
                self.stall_bound_violations_total += 1
        self._ended_s = output.ended_s if more_work else None

    def _is_over(self, waited_ms: float, predicted_ms: float | None) -> bool:
        if self.pace is None or predicted_ms is None:
            return False
        bound_ms = self.pace.wait_bound_ms(predicted_ms)
        return bound_ms is not None and waited_ms > bound_ms

    def steps(self) -> Durations:
        """Of the steps themselves."""
        return Durations(list(self._step_counts), self.busy_s_total)

    def gaps(self) -> Durations:
        """Between steps, while there was work."""
        return Durations(list(self._gap_counts), self._gap_s_total)
