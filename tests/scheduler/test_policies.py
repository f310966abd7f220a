from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.device import Rig, prompt, spec
from twinjet.core.config import PolicyName
from twinjet.scheduler.policies import MIN_CHUNK_ROWS, POLICIES, PRIORITY_S, BalancedPolicy, Mix

POLICY = BalancedPolicy()


@pytest.mark.parametrize(
    ("num_rows", "uncomputed", "shares"),
    [
        (16, [], []),
        (16, [5], [5]),
        (16, [100], [16]),
        (16, [100, 100], [16, 0]),  # equals: one after the other
        (16, [100, 51], [16, 0]),  # not shorter by half
        (16, [100, 50], [8, 8]),
        (16, [100_000, 3], [13, 3]),  # what the short one leaves goes back
        (16, [3, 100_000], [3, 13]),
        (16, [100_000, 1_000, 10], [8, 4, 4]),
        (16, [100, 100, 10], [8, 4, 4]),
        (1, [100_000, 3], [1, 0]),
        (0, [100_000, 3], [0, 0]),
    ],
)
def test_divide(num_rows: int, uncomputed: list[int], shares: list[int]) -> None:
    assert POLICY.divide(num_rows, uncomputed, 0.0) == shares


@given(st.integers(0, 300), st.lists(st.integers(1, 2000), min_size=1, max_size=12))
def test_divide_uses_every_row_and_the_first_gets_half(num_rows: int, uncomputed: list[int]) -> None:
    shares = POLICY.divide(num_rows, uncomputed, 0.0)
    assert sum(shares) == min(num_rows, sum(uncomputed))
    assert all(0 <= share <= need for share, need in zip(shares, uncomputed, strict=True))
    assert shares[0] >= min(uncomputed[0], (num_rows + 1) // 2)


def test_a_level_of_priority_is_worth_a_time_of_waiting() -> None:
    urgent = POLICY.rank(spec(1, priority=-1), 100.0)
    assert POLICY.rank(spec(2), 100.0 - PRIORITY_S - 1) < urgent < POLICY.rank(spec(3), 100.0 - PRIORITY_S + 1)


def test_rank_is_priority_and_arrival() -> None:
    late_but_urgent = POLICY.rank(spec(1, priority=-1), 9.0)
    early = POLICY.rank(spec(2), 1.0)
    late = POLICY.rank(spec(3), 2.0)
    assert late_but_urgent < early < late


def test_what_a_step_is_for() -> None:
    def mixes(name: PolicyName) -> list[Mix]:
        policy = POLICIES[name]()
        return [policy.mix(num, lambda any=any: any) for num, any in ((0, True), (3, True), (3, False))]

    assert mixes("balanced") == [Mix(True, "full"), Mix(True, "paced"), Mix(True, "paced")]
    assert mixes("prefill-first") == [Mix(False, "full"), Mix(False, "full"), Mix(True, "none")]
    assert mixes("decode-first") == [Mix(True, "full"), Mix(True, "least"), Mix(True, "least")]


@pytest.mark.parametrize("policy", get_args(PolicyName))
@pytest.mark.parametrize("num_pages", [6, 64])
def test_every_policy_gives_the_same_tokens(policy: PolicyName, num_pages: int) -> None:
    rig = Rig(policy=POLICIES[policy](), num_pages=num_pages, context=24, prefix_cache=True)
    for i in range(9):
        rig.add(spec(i, prompt(2 * i + 1, i), 5))
        rig.schedule()
    rig.run(3)
    rig.check_tokens()


def plans(policy: PolicyName) -> list[tuple[list[int], list[int]]]:
    """(who decodes, whose prompt is computed) in each plan, with a prompt arriving while two sequences decode."""
    rig = Rig(policy=POLICIES[policy](), token_budget=8)
    rig.add(spec(1, prompt(4), 6), spec(2, prompt(4), 6))
    rig.plan()
    rig.plan()
    rig.add(spec(3, prompt(16), 2))
    rig.run()
    return [
        ([w.sequence_id for w in plan.work if w.token_ids is None], [w.sequence_id for w in plan.work if w.token_ids])
        for plan in rig.plans[2:]
    ]


def test_balanced_streams_go_on_beside_a_prompt() -> None:
    assert plans("balanced")[:3] == [([1, 2], [3])] * 3


def test_prefill_first_streams_wait() -> None:
    assert plans("prefill-first")[:3] == [([], [3]), ([], [3]), ([1, 2, 3], [])]


def test_decode_first_prompts_get_the_least_chunk() -> None:
    rig = Rig(policy=POLICIES["decode-first"](), token_budget=64, context=128)
    rig.add(spec(1, prompt(50), 5))
    assert [w.num_tokens for w in rig.plan().work] == [50], "nobody decodes yet"
    rig.add(spec(2, prompt(90), 5), spec(3, prompt(5), 5))
    rows = [{w.sequence_id: w.num_tokens for w in rig.plan().work} for _ in range(4)]
    assert rows[0] == {1: 1, 2: 11, 3: 5}, "divided as ever, and no more together"
    assert rows[1] == {1: 1, 3: 1, 2: MIN_CHUNK_ROWS}
    rig.run(2)
    rig.check_tokens()


def test_sequences_left_out_are_counted() -> None:
    rig = Rig(policy=POLICIES["prefill-first"](), token_budget=8, max_streams=2)
    rig.add(spec(1, prompt(4), 6))
    rig.plan()
    assert rig.scheduler.stats().num_skipped == 0
    rig.add(spec(2, prompt(16), 2), spec(3, prompt(9), 2, num_imported=8))
    rig.plan()
    assert rig.scheduler.stats().num_skipped == 2, "one that decodes, and one that was prefilled elsewhere"
    rig.run()
    rig.check_tokens()
    balanced = Rig(token_budget=8)
    balanced.add(spec(1, prompt(4), 6), spec(2, prompt(30), 2))
    while balanced.schedule() is not None:
        assert balanced.scheduler.stats().num_skipped == 0
    balanced.run()
