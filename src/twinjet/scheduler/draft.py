"""A plan in the making, and its output taken apart. Decides nothing."""

from dataclasses import dataclass, field

from twinjet.core.plan import PageExport, PageGrant, PageImport, SequenceWork, StepOutput
from twinjet.core.types import TokenLogprobs
from twinjet.scheduler.cost_model import NOTHING, StepShape
from twinjet.scheduler.state import SequenceState


@dataclass(frozen=True, slots=True)
class PrefixMove:
    """A sequence got a cached page to read, or (`written`) one that the plan's rows write for it was cached."""

    seq: SequenceState
    page_id: int
    written: bool


@dataclass(slots=True)
class StepDraft:
    """A plan in the making; afterwards, what is needed to read its output."""

    step_id: int
    work: list[SequenceWork] = field(default_factory=list)
    grants: list[PageGrant] = field(default_factory=list)
    imports: list[PageImport] = field(default_factory=list)
    exports: list[PageExport] = field(default_factory=list)
    members: list[SequenceState] = field(default_factory=list)
    """Sequences with rows, in order."""
    sampled: list[SequenceState] = field(default_factory=list)
    """Those whose last row samples, in order."""
    exported: list[SequenceState] = field(default_factory=list)
    leaving: list[SequenceState] = field(default_factory=list)
    """Sequences that need no further plan."""
    prefix_moves: list[PrefixMove] = field(default_factory=list)
    """What became of cached pages, in order."""
    shape: StepShape = NOTHING
    """Of all rows so far."""
    modelled_ms: float | None = None
    """How long it takes, by the cost model alone; None without one."""
    predicted_ms: float | None = None
    """The same, as steps of late compare with the model."""


def check_output(step: StepDraft, output: StepOutput) -> None:
    """Raises: ValueError, if the output is not of this plan's shape."""
    if len(output.token_ids) != len(step.sampled) or len(output.exports) != len(step.exports):
        raise ValueError(
            f"step {step.step_id} samples {len(step.sampled)} tokens and exports {len(step.exports)} sequences, "
            f"but its output has {len(output.token_ids)} and {len(output.exports)}"
        )
    most = max((seq.num_logprobs for seq in step.sampled if seq.num_logprobs is not None), default=None)
    if most is not None and (output.logprobs is None or (most and _num_top(output) < most)):
        raise ValueError(f"step {step.step_id} was asked for log-probabilities, {most} at most, and gave fewer")


def _num_top(output: StepOutput) -> int:
    if output.top_ids is None or output.top_logprobs is None:
        return 0
    return min(output.top_ids.shape[1], output.top_logprobs.shape[1])


def token_logprobs(output: StepOutput, row: int, num_top: int) -> TokenLogprobs | None:
    """Row `row` of an output, cut to the `num_top` most likely tokens."""
    if output.logprobs is None:
        return None
    logprob = float(output.logprobs[row])
    if not num_top or output.top_ids is None or output.top_logprobs is None:
        return TokenLogprobs(logprob)
    return TokenLogprobs(
        logprob,
        tuple(output.top_ids[row, :num_top].tolist()),
        tuple(output.top_logprobs[row, :num_top].tolist()),
    )
