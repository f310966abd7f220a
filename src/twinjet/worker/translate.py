"""Between the wire's messages and the scheduler's terms."""

from collections.abc import Sequence

import numpy as np

from twinjet.core.errors import InvalidRequest
from twinjet.core.types import MAX_LOGPROBS, SamplingParams, TokenLogprobs
from twinjet.scheduler.sequence import Emission, SequenceSpec
from twinjet.wire.messages import Logprobs, StepTokens, Submit


def sequence_spec(message: Submit, vocab_size: int) -> SequenceSpec:
    """What `message` asks to run, less its pages.

    Raises: InvalidRequest, if a device could choke on it. Lengths are for the scheduler to judge.
    """
    if len(message.token_ids) % 4:
        raise InvalidRequest(f"token ids are int32, but come in {len(message.token_ids)} bytes")
    token_ids = np.frombuffer(message.token_ids, "<i4")
    if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise InvalidRequest(
            f"token ids must be from 0 to {vocab_size - 1}, got some from {token_ids.min()} to {token_ids.max()}"
        )
    if message.num_logprobs is not None and not 0 <= message.num_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs must be from 0 to {MAX_LOGPROBS}, got {message.num_logprobs}", "logprobs")
    return SequenceSpec(
        sequence_id=message.sequence_id,
        token_ids=tuple(token_ids.tolist()),
        max_new_tokens=message.max_new_tokens,
        sampling=SamplingParams(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            seed=message.seed,
            choice=message.choice,
        ),
        stop_token_ids=frozenset(message.stop_token_ids),
        num_logprobs=message.num_logprobs,
        priority=message.priority,
        export_pages=message.export_pages,
        use_cache=message.use_cache,
        cache_salt=message.cache_salt,
    )


def step_tokens(step_id: int, emissions: Sequence[Emission], computed_s: float) -> StepTokens:
    """All tokens of a step as one message."""
    logprobs = None
    if any(emission.logprobs is not None for emission in emissions):
        logprobs = [_logprobs(emission.logprobs) for emission in emissions]
    return StepTokens(
        step_id=step_id,
        sequence_ids=[emission.sequence_id for emission in emissions],
        token_ids=[emission.token_id for emission in emissions],
        finish=[emission.finish for emission in emissions],
        logprobs=logprobs,
        num_cached={emission.sequence_id: emission.num_cached for emission in emissions if emission.num_cached},
        computed_s=computed_s,
    )


def _logprobs(logprobs: TokenLogprobs | None) -> Logprobs | None:
    if logprobs is None:
        return None
    return Logprobs(logprobs.logprob, list(logprobs.top_ids), list(logprobs.top_logprobs))
