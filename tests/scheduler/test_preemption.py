"""What happens when pages run out: preemption, readmission, and who waits for whom."""

from tests.scheduler.device import VOCAB_SIZE, Rig, alone, prompt, spec
from twinjet.scheduler.admission import MAX_OVERTAKEN


def _crowd(num_pages: int = 8) -> Rig:
    """Two sequences of 8 tokens that both grow to 24, in pages of 4: 6 pages each, 8 in all."""
    rig = Rig(max_streams=4, context=24, page_size=4, num_pages=num_pages, token_budget=32)
    rig.add(spec(1, prompt(8, 1), 16), spec(2, prompt(8, 2), 16))
    return rig


def test_the_newest_is_preempted_and_resumes_with_the_same_tokens() -> None:
    for depth in (1, 2, 3, 4):
        rig = _crowd()
        rig.run(depth)
        rig.check_tokens()
        assert rig.scheduler.stats().preemptions_total == 1
        recomputed = [w for plan in rig.plans for w in plan.work if w.sequence_id == 2 and w.start == 0]
        assert len(recomputed) == 2
        assert recomputed[1].token_ids is not None
        assert recomputed[1].token_ids[:8] == prompt(8, 2)
        assert len(recomputed[1].token_ids) > 8  # prompt and what was emitted


def test_the_oldest_is_never_delayed() -> None:
    rig = _crowd()
    rig.run()
    assert all(plan.work[0].sequence_id == 1 for plan in rig.plans[:16])


def test_preempted_with_unread_token_waits_for_it_and_emits_it() -> None:
    rig = _crowd()
    while rig.scheduler.stats().preemptions_total == 0:
        while len(rig.in_flight) < 3:
            rig.plan()
        if rig.scheduler.stats().preemptions_total == 0:
            rig.complete()
    unread = sum(w.samples and w.sequence_id == 2 for plan in rig.in_flight for w in plan.work)
    assert unread > 0
    before = len(rig.tokens[2])
    rig.abort(1)  # pages are there at once, but the token is not
    plan = rig.schedule()
    assert plan is None
    while rig.in_flight:
        rig.complete()
    assert len(rig.tokens[2]) == before + unread
    (work,) = rig.plan().work
    assert work.token_ids == (*prompt(8, 2), *rig.tokens[2])
    rig.run()
    rig.check_tokens()


def test_abort_of_a_preempted_sequence() -> None:
    rig = _crowd()
    while rig.scheduler.stats().preemptions_total == 0:
        rig.plan()
        if len(rig.in_flight) == 2:
            rig.complete()
    assert rig.abort(2)
    rig.run()
    rig.check_tokens()
    assert rig.finish == {1: "length", 2: "aborted"}


def test_preempted_sequence_may_stop_by_its_unread_token() -> None:
    # Sequence 2 is preempted with its tokens 7 and 8 unread; a stop at one of these must end it while it waits.
    stopped_at: set[int] = set()
    for seed in range(VOCAB_SIZE):
        new, _ = alone(spec(2, prompt(8, seed), 16))
        for index in (7, 8):
            if new[index] in new[:index]:
                continue
            rig = Rig(max_streams=4, context=24, page_size=4, num_pages=8, token_budget=32)
            rig.add(spec(1, prompt(8, 1), 16), spec(2, prompt(8, seed), 16, stop=(new[index],)))
            rig.run(4)
            rig.check_tokens()
            if rig.scheduler.stats().preemptions_total:
                assert rig.finish[2] == "stop"
                assert sum(w.sequence_id == 2 and w.start == 0 for plan in rig.plans for w in plan.work) == 1
                stopped_at.add(index)
    assert stopped_at == {7, 8}


def test_nothing_new_is_admitted_while_a_preempted_one_waits() -> None:
    rig = _crowd()
    while rig.scheduler.stats().preemptions_total == 0:
        rig.plan()
        rig.complete()
    rig.add(spec(3, (1,), 1, priority=-5))
    rig.run()
    order = [w.sequence_id for plan in rig.plans for w in plan.work if w.start == 0]
    assert order == [1, 2, 2, 3]
    rig.check_tokens()


def test_preempted_sequences_come_back_in_order_though_the_later_would_fit() -> None:
    rig = Rig(max_streams=4, context=64, page_size=4, num_pages=16, token_budget=64)
    rig.add(spec(1, prompt(8, 1), 56), spec(2, prompt(30, 2), 34), spec(3, prompt(4, 3), 10))
    rig.run()
    order = [w.sequence_id for plan in rig.plans for w in plan.work if w.start == 0]
    assert order == [1, 2, 3, 2, 3]
    rig.check_tokens()


def test_preempted_amid_its_prompt() -> None:
    rig = Rig(max_streams=4, context=32, page_size=4, num_pages=9, token_budget=4)
    rig.add(spec(1, prompt(4, 1), 28), spec(2, prompt(24, 2), 2))
    rig.run(2)
    rig.check_tokens()
    assert rig.scheduler.stats().preemptions_total >= 1
    assert rig.plans[-1].work[0].sequence_id == 2


def test_imported_sequence_recomputes_everything() -> None:
    rig = Rig(max_streams=4, context=24, page_size=4, num_pages=8, token_budget=32)
    rig.add(spec(1, prompt(8, 1), 16), spec(2, prompt(8, 2), 16, num_imported=7))
    rig.run(2)
    rig.check_tokens()
    starts = [w.start for plan in rig.plans for w in plan.work if w.sequence_id == 2 and w.token_ids is not None]
    assert starts == [7, 0]
    assert sum(len(plan.imports) for plan in rig.plans) == 2  # once each


def test_admission_leaves_room_for_those_that_run() -> None:
    rig = Rig(max_streams=4, context=32, page_size=4, num_pages=8, token_budget=32)
    rig.add(spec(1, prompt(15, 1), 4))
    rig.plan()  # 4 pages
    rig.add(spec(2, prompt(16, 2), 4))  # the other 4 would do, but sequence 1 needs one soon
    assert len(rig.plan().work) == 1
    rig.run()
    assert rig.scheduler.stats().preemptions_total == 0
    rig.check_tokens()


def test_small_sequences_pass_one_that_waits_for_pages_but_not_for_ever() -> None:
    rig = Rig(max_streams=3, context=64, page_size=4, num_pages=16, token_budget=16)
    rig.add(spec(0, prompt(4), 40))
    rig.plan()
    rig.add(spec(1, prompt(60), 4))  # all pages but one: waits until nothing else runs
    num_passed = 0
    sequence_id = 2
    while rig.finish.get(1) is None:
        while len(rig.scheduler._live) < 6:
            rig.add(spec(sequence_id, prompt(3), 2))
            sequence_id += 1
        rig.schedule()
        rig.complete()
        assert len(rig.plans) < 200
    began = next(i for i, plan in enumerate(rig.plans) if any(w.sequence_id == 1 for w in plan.work))
    num_passed = len({w.sequence_id for plan in rig.plans[:began] for w in plan.work} - {0})
    assert num_passed == MAX_OVERTAKEN
    rig.run()
    rig.check_tokens()


def test_long_prompt_finishes_under_a_stream_of_short_ones() -> None:
    rig = Rig(max_streams=4, context=512, page_size=4, num_pages=256, token_budget=16)
    rig.add(spec(0, prompt(400), 2))
    sequence_id = 1
    while 0 not in rig.finish:
        while len(rig.scheduler._live) < 8:
            rig.add(spec(sequence_id, prompt(12, sequence_id), 2))
            sequence_id += 1
        rig.schedule()
        rig.complete()
    assert len(rig.plans) <= 400 // 6 + 2  # at least half of the budget, less three decoding rows
    assert sequence_id > 20
    rig.run()
    rig.check_tokens()
