"""The crown test on the real small model: whole prompt = chunks = batched with strangers = another order."""

from pathlib import Path

import pytest

from tests.equivalence.drive import Drive, build_engine, sequence
from tests.golden_files import golden_cases
from twinjet.core.types import SamplingParams
from twinjet.engine.engine import Engine
from twinjet.scheduler.sequence import SequenceSpec

CONTEXT, NUM_PAGES, NEW_TOKENS = 2048, 512, 16


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Engine:
    return build_engine(str(smollm2_path), context=CONTEXT, num_pages=NUM_PAGES, exact=False)


def spec_of(name: str, sequence_id: int, sampling: SamplingParams | None = None) -> SequenceSpec:
    case = next(case for case in golden_cases("smollm2-135m") if case["name"] == name)
    changes = {} if sampling is None else {"sampling": sampling}
    return sequence(sequence_id, case["prompt_ids"], NEW_TOKENS, **changes)


@pytest.fixture(scope="module")
def specs() -> list[SequenceSpec]:
    return [
        spec_of("multi-turn", 0),
        spec_of("medium-700", 1),
        spec_of("raw-code", 2, SamplingParams(temperature=0.7, top_p=0.95, seed=11)),
    ]


@pytest.fixture(scope="module")
def whole(engine: Engine, specs: list[SequenceSpec]) -> dict[int, list[int]]:
    """Each alone; prompts of up to 512 tokens in one piece."""
    tokens: dict[int, list[int]] = {}
    for spec in specs:
        tokens |= Drive(engine, {0: [spec]}, CONTEXT, NUM_PAGES, max_streams=1).run().tokens
    return tokens


@pytest.mark.parametrize(("chunk", "names"), [(1, [0, 2]), (7, [0, 2]), (64, [0, 1, 2])])
def test_chunks(
    engine: Engine, specs: list[SequenceSpec], whole: dict[int, list[int]], chunk: int, names: list[int]
) -> None:
    for index in names:
        drive = Drive(engine, {0: [specs[index]]}, CONTEXT, NUM_PAGES, token_budget=chunk, max_streams=1).run()
        assert drive.tokens == {index: whole[index]}


def test_with_strangers_and_in_another_order(
    engine: Engine, specs: list[SequenceSpec], whole: dict[int, list[int]]
) -> None:
    strangers = [spec_of(name, 10 + i) for i, name in enumerate(["list", "colours", "unicode", "one-token"])]
    arrivals = {0: [strangers[0], specs[2]], 2: [specs[1], *strangers[1:3]], 4: [strangers[3]], 6: [specs[0]]}
    drive = Drive(engine, arrivals, CONTEXT, NUM_PAGES, token_budget=128).run()
    assert {i: drive.tokens[i] for i in whole} == whole
    assert engine.compiles_total == 0


def test_after_a_prefix_hit(engine: Engine, specs: list[SequenceSpec], whole: dict[int, list[int]]) -> None:
    before = [sequence(20 + spec.sequence_id, (*spec.token_ids, 5), 2) for spec in specs]
    drive = Drive(engine, {0: before, 1: specs}, CONTEXT, NUM_PAGES, token_budget=256).run()
    assert {i: drive.tokens[i] for i in whole} == whole
    assert {i: drive.cached[i] for i in whole} == {s.sequence_id: (len(s.token_ids) - 1) // 16 * 16 for s in specs}
