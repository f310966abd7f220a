"""Nobody waits for ever: how long a prompt may take, whatever comes after it."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.device import Rig, prompt, spec
from twinjet.scheduler.policies import PRIORITY_S


def run_under_fire(
    rig: Rig, watched: list[int], arrive: Callable[[int], list], most_live: int, max_steps: int
) -> dict[int, int]:
    """Steps until each watched sequence has its first token, while others keep arriving."""
    first: dict[int, int] = {}
    number = 1000
    for step in range(1, max_steps + 1):
        while len(rig.scheduler._live) < most_live:
            for new in arrive(number):
                rig.add(new)
            number += 1
        rig.schedule()
        rig.complete()
        for sequence_id in watched:
            if rig.tokens[sequence_id] and sequence_id not in first:
                first[sequence_id] = step
        if len(first) == len(watched):
            return first
    raise AssertionError(f"after {max_steps} steps only {first} had a first token")


@given(
    needs=st.lists(st.integers(1, 120), min_size=1, max_size=5),
    shorts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    token_budget=st.integers(9, 40),
)
@settings(max_examples=60, deadline=None)
def test_a_prompt_is_held_up_by_those_before_it_and_by_half_of_the_rows_at_most(
    needs: list[int], shorts: list[int], token_budget: int
) -> None:
    """The bound: the first in rank gets at least half of the rows that decoding leaves, so with r such rows the k-th
    has its first token within the sum of ceil(2 need / r) + 1 over itself and those before it, whatever comes later."""
    rig = Rig(max_streams=8, context=160, token_budget=token_budget, page_size=4, num_pages=400)
    for i, need in enumerate(needs):
        rig.add(spec(i, prompt(need, i), 3))
    rows = token_budget - 7  # whoever has the watched prompt's slot does not decode
    bound, bounds = 0, []
    for need in needs:
        bound += -(-2 * need // rows) + 1
        bounds.append(bound)

    def arrive(number: int) -> list:
        return [spec(number, prompt(shorts[number % len(shorts)], number), 2)]

    first = run_under_fire(rig, list(range(len(needs))), arrive, most_live=20, max_steps=bounds[-1])
    for i, most in enumerate(bounds):
        assert first[i] <= most, f"prompt {i} of {needs} took {first[i]} steps, and {most} at most were promised"


@pytest.mark.parametrize("max_streams", [1, 3])
def test_low_priority_waits_its_time_and_no_longer(max_streams: int) -> None:
    """Urgent requests keep coming, one a second on the rig's clock; each has its slot for several steps."""
    rig = Rig(max_streams=max_streams, context=64, token_budget=16)
    rig.add(spec(0, prompt(20), 2, priority=2))
    arrived = rig.now_s

    def arrive(number: int) -> list:
        return [spec(number, prompt(10, number), 4, priority=-1)]

    run_under_fire(rig, [0], arrive, most_live=6, max_steps=500)
    waited = rig.now_s - arrived
    assert 3 * PRIORITY_S - 10 < waited < 3 * PRIORITY_S + 10, "three levels, give or take who was there already"
