"""With `--exact`, the real models say what transformers in float32 says (tests/golden), through the Python interface.

All cases run at once, so they share steps: in company as well as alone.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.golden_files import golden_cases
from twinjet import LLM, SamplingParams
from twinjet.api import Completion
from twinjet.options import EngineOptions

TOLERANCE = 2e-3
"""On log-probabilities, and between the reference's two best for its choice to count as settled."""

Pairs = list[tuple[dict[str, Any], Completion]]


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def answers(request: pytest.FixtureRequest, smollm2_path: Path, gemma3_path: Path) -> Pairs:
    """Each golden case with what the engine answers."""
    path = {"smollm2-135m": smollm2_path, "gemma3-270m": gemma3_path}[request.param]
    cases = golden_cases(request.param)
    options = EngineOptions(exact=True, context=2048, max_streams=16)
    with LLM(str(path), options=options) as llm:
        completions = llm.generate(
            [case["prompt_ids"] for case in cases],
            SamplingParams(temperature=0.0),
            max_tokens=max(len(case["output_ids"]) for case in cases),
            ignore_eos=True,
            logprobs=20,
        )
    return list(zip(cases, completions, strict=True))


def settled(case: dict[str, Any]) -> int:
    """Steps up to and with the first whose best two the reference itself hardly tells apart."""
    for step, top in enumerate(case["top5"]):
        if top[0][1] - top[1][1] < TOLERANCE:
            return step
    return len(case["top5"])


def test_tokens(answers: Pairs) -> None:
    for case, answer in answers:
        steps = settled(case)
        assert list(answer.token_ids[:steps]) == case["output_ids"][:steps], case["name"]


def test_log_probabilities(answers: Pairs) -> None:
    for case, answer in answers:
        assert answer.logprobs is not None
        # One step more than the tokens: its prefix is still the same.
        for step in range(min(settled(case) + 1, len(case["top5"]))):
            got = dict(zip(answer.logprobs[step].top_ids, answer.logprobs[step].top_logprobs, strict=True))
            for token_id, expected in case["top5"][step]:
                assert got[token_id] == pytest.approx(expected, abs=TOLERANCE), (case["name"], step)


def test_most_steps_are_settled(answers: Pairs) -> None:
    assert sum(settled(case) for case, _ in answers) > 0.8 * sum(len(case["top5"]) for case, _ in answers)
