"""The crown test on tiny random models: the same tokens, however a sequence is computed and in whatever company.

The oracle computes the whole sequence anew for every token, in one step each, with no cache to go wrong.
"""

import random
from dataclasses import replace
from typing import get_args

import pytest

from tests.equivalence.drive import GREEDY, Drive, build_engine, sequence
from tests.tiny_models import write_tiny_gemma3, write_tiny_llama
from twinjet.core.config import PolicyName
from twinjet.core.plan import PageGrant, Plan, SequenceWork
from twinjet.core.types import SamplingParams
from twinjet.engine.engine import Engine
from twinjet.engine.interface import run_plan
from twinjet.scheduler.sequence import SequenceSpec

CONTEXT, NUM_PAGES = 512, 256
WRITERS = {"llama": write_tiny_llama, "gemma3": write_tiny_gemma3}
NEW_TOKENS = 12


@pytest.fixture(scope="module", params=[(family, exact) for family in WRITERS for exact in (True, False)], ids=str)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """On the reference ops, and on the kernels where they run."""
    family, exact = request.param
    path = tmp_path_factory.mktemp("equivalence") / f"{family}.gguf"
    WRITERS[family](path, quant="F32" if exact else "Q4_1")
    return build_engine(str(path), context=CONTEXT, num_pages=NUM_PAGES, exact=exact)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 250) for _ in range(length))


def naive(engine: Engine, spec: SequenceSpec) -> list[int]:
    """Every token from a computation of the whole sequence from position 0."""
    tokens = list(spec.token_ids)
    pages = PageGrant(0, 0, tuple(range(CONTEXT // 16)))
    for _ in range(spec.max_new_tokens):
        work = SequenceWork(0, 0, 0, len(tokens), tuple(tokens), True, spec.sampling)
        tokens.append(int(run_plan(engine, Plan(0, (work,), (pages,))).token_ids[0]))
    return tokens[len(spec.token_ids) :]


SPECS = [
    sequence(0, prompt(0, 1), NEW_TOKENS),
    sequence(1, prompt(1, 37), NEW_TOKENS),
    sequence(2, prompt(2, 300), NEW_TOKENS, sampling=SamplingParams(temperature=0.8, top_p=0.9, seed=7)),
    sequence(3, prompt(3, 128), NEW_TOKENS, sampling=SamplingParams(temperature=1.2, top_k=20, seed=2**62 + 1)),
    sequence(4, prompt(4, 129), NEW_TOKENS, sampling=SamplingParams(temperature=1.0, min_p=0.02, seed=9, choice=3)),
]


@pytest.fixture(scope="module")
def oracle(engine: Engine) -> dict[int, list[int]]:
    return {spec.sequence_id: naive(engine, spec) for spec in SPECS}


def strangers(count: int, first_id: int = 100) -> list[SequenceSpec]:
    return [sequence(first_id + i, prompt(first_id + i, 5 + 17 * i), 4 + 5 * i) for i in range(count)]


def test_the_models_say_different_things(oracle: dict[int, list[int]]) -> None:
    assert len({tuple(tokens) for tokens in oracle.values()}) == len(SPECS)
    assert max(len(set(tokens)) for tokens in oracle.values()) > NEW_TOKENS // 2


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks_of_any_size_alone(engine: Engine, oracle: dict[int, list[int]], chunk: int) -> None:
    for spec in SPECS:
        drive = Drive(engine, {0: [spec]}, CONTEXT, NUM_PAGES, token_budget=chunk, max_streams=1).run()
        assert drive.tokens == {spec.sequence_id: oracle[spec.sequence_id]}
        assert drive.largest_step == min(chunk, len(spec.token_ids))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_among_strangers_that_come_and_go(engine: Engine, oracle: dict[int, list[int]], depth: int) -> None:
    others = strangers(11)
    arrivals = {0: [*others[:4], *SPECS[:3]], 3: [*others[4:8], *SPECS[3:]], 9: others[8:]}
    drive = Drive(engine, arrivals, CONTEXT, NUM_PAGES, token_budget=64, pipeline_depth=depth).run()
    assert {i: drive.tokens[i] for i in oracle} == oracle
    assert drive.most_chunks > 1


def test_in_any_order(engine: Engine, oracle: dict[int, list[int]]) -> None:
    for seed in range(3):
        specs = random.Random(seed).sample([*SPECS, *strangers(3)], len(SPECS) + 3)
        drive = Drive(engine, {i: [spec] for i, spec in enumerate(specs)}, CONTEXT, NUM_PAGES, token_budget=128).run()
        assert {i: drive.tokens[i] for i in oracle} == oracle


def test_preempted_and_resumed(engine: Engine, oracle: dict[int, list[int]]) -> None:
    # Contexts grow while they run, so a pool that admits all cannot hold all.
    growers = [sequence(50 + i, prompt(50 + i, 100), 220) for i in range(3)]
    alone = {i.sequence_id: Drive(engine, {0: [i]}, CONTEXT, NUM_PAGES).run().tokens[i.sequence_id] for i in growers}
    drive = Drive(engine, {0: growers, 4: SPECS}, CONTEXT, num_pages=CONTEXT // 16 + 2, token_budget=64).run()
    assert drive.preemptions > 0
    assert drive.tokens == oracle | alone


def test_preempted_and_resumed_without_its_pages(engine: Engine, oracle: dict[int, list[int]]) -> None:
    growers = [sequence(50 + i, prompt(50 + i, 100), 220) for i in range(3)]
    few = CONTEXT // 16 + 2
    drive = Drive(engine, {0: growers, 4: SPECS}, CONTEXT, few, token_budget=64, prefix_cache=False).run()
    assert drive.preemptions > 0
    assert {i: drive.tokens[i] for i in oracle} == oracle


@pytest.mark.parametrize("depth", [1, 3])
def test_after_a_prefix_hit(engine: Engine, oracle: dict[int, list[int]], depth: int) -> None:
    """Behind somebody with the same prompt, in the same step and later; among strangers, on pages long let go."""
    first = [sequence(200 + s.sequence_id, (*s.token_ids, 7), 3) for s in SPECS]
    again = [replace(s, sequence_id=300 + s.sequence_id) for s in SPECS]
    arrivals = {0: [*first, *strangers(3)], 6: SPECS, 40: again}
    drive = Drive(engine, arrivals, CONTEXT, NUM_PAGES, token_budget=64, pipeline_depth=depth).run()
    assert {i: drive.tokens[i] for i in oracle} == oracle
    assert {i: drive.tokens[300 + i] for i in oracle} == oracle
    for spec in SPECS:
        whole_pages = (len(spec.token_ids) - 1) // 16 * 16
        assert drive.cached[spec.sequence_id] == drive.cached[300 + spec.sequence_id] == whole_pages


def test_a_second_turn_on_generated_pages(engine: Engine) -> None:
    turns = {spec.sequence_id: spec for spec in SPECS}
    one = Drive(engine, {0: SPECS}, CONTEXT, NUM_PAGES).run()
    longer = [
        replace(spec, token_ids=(*spec.token_ids, *one.tokens[i], 9, 8, 7), sequence_id=100 + i)
        for i, spec in turns.items()
    ]
    apart = Drive(engine, {0: longer}, CONTEXT, NUM_PAGES, prefix_cache=False).run()
    both = Drive(engine, {0: SPECS, 40: longer}, CONTEXT, NUM_PAGES, token_budget=64).run()
    assert {i: both.tokens[i] for i in apart.tokens} == apart.tokens
    assert sum(both.cached[100 + i] for i in turns) > sum((len(s.token_ids) - 1) // 16 * 16 for s in SPECS)
    assert set(apart.cached.values()) == {0}


@pytest.mark.parametrize("policy", get_args(PolicyName))
@pytest.mark.parametrize("target_ms", [None, 10.0, 60.0, 500.0])
def test_with_any_target_and_policy(
    engine: Engine, oracle: dict[int, list[int]], policy: PolicyName, target_ms: float | None
) -> None:
    arrivals = {0: [*strangers(4), *SPECS[:3]], 3: SPECS[3:]}
    drive = Drive(engine, arrivals, CONTEXT, NUM_PAGES, policy=policy, itl_target_ms=target_ms).run()
    assert {i: drive.tokens[i] for i in oracle} == oracle


def test_prefilled_in_one_place_and_decoded_in_another(engine: Engine, oracle: dict[int, list[int]]) -> None:
    sending = [SequenceSpec(s.sequence_id, s.token_ids, s.max_new_tokens, s.sampling, export_pages=True) for s in SPECS]
    first = Drive(engine, {0: sending}, CONTEXT, NUM_PAGES, token_budget=100).run()
    resumed = [
        SequenceSpec(
            spec.sequence_id,
            (*spec.token_ids, *first.tokens[spec.sequence_id]),
            spec.max_new_tokens - 1,
            spec.sampling,
            imports=(first.exported[spec.sequence_id],),
        )
        for spec in SPECS
    ]
    # The pages come to lie elsewhere, among strangers.
    second = Drive(engine, {0: strangers(3), 2: resumed}, CONTEXT, NUM_PAGES, token_budget=100).run()
    assert {i: first.tokens[i] + second.tokens[i] for i in oracle} == oracle


def test_replayed_from_the_tokens_already_out(engine: Engine, oracle: dict[int, list[int]]) -> None:
    for spec in SPECS:
        for emitted in (1, 5, NEW_TOKENS - 1):
            known = (*spec.token_ids, *oracle[spec.sequence_id][:emitted])
            again = SequenceSpec(0, known, NEW_TOKENS - emitted, spec.sampling)
            drive = Drive(engine, {0: [again]}, CONTEXT, NUM_PAGES, token_budget=96).run()
            assert drive.tokens[0] == oracle[spec.sequence_id][emitted:]


def test_nothing_compiles_after_warm_up(engine: Engine) -> None:
    assert engine.compiles_total == 0


def test_a_stop_token_ends_it_where_the_oracle_has_it(engine: Engine, oracle: dict[int, list[int]]) -> None:
    tokens = oracle[1]
    stop = tokens[4]
    spec = sequence(1, SPECS[1].token_ids, NEW_TOKENS, stop_token_ids=frozenset({stop}), sampling=GREEDY)
    drive = Drive(engine, {0: [spec]}, CONTEXT, NUM_PAGES).run()
    assert drive.tokens[1] == tokens[: tokens.index(stop) + 1]
