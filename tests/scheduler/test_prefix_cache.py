"""Prefixes computed once: who finds whose pages, who waits for whom, what is evicted, what a failure takes along."""

import pytest

from tests.scheduler.device import Rig, alone, prompt, spec
from twinjet.scheduler.pages import PageAllocator
from twinjet.scheduler.prefix_cache import PageKeys, PrefixCache


def rig(**options: int) -> Rig:
    return Rig(prefix_cache=True, **options)  # type: ignore[arg-type]


def rows(rig: Rig, sequence_id: int) -> int:
    """Rows that were planned for a sequence."""
    return sum(w.num_tokens for plan in rig.plans for w in plan.work if w.sequence_id == sequence_id)


class TestPageKeys:
    def test_stand_for_the_whole_prefix_and_the_salt(self) -> None:
        def keys(tokens: tuple[int, ...], salt: str = "", size: int = 2) -> list[bytes]:
            made = PageKeys(size, salt)
            return [made.key(i, lambda a, b: tokens[a:b]) for i in reversed(range(len(tokens) // size))][::-1]

        base = keys((1, 2, 3, 4))
        assert base == keys((1, 2, 3, 4, 5))
        assert base[0] == keys((1, 2, 4, 3))[0]
        assert base[1] != keys((1, 2, 4, 3))[1]
        assert base[1] != keys((2, 1, 3, 4))[1], "page 1 is not the same after another page 0"
        assert not set(base) & set(keys((1, 2, 3, 4), "tenant"))
        assert keys((1, 1, 1, 1))[0] != keys((1, 1, 1, 1))[1]

    def test_each_is_made_once(self) -> None:
        asked: list[tuple[int, int]] = []

        def known_ids(start: int, stop: int) -> tuple[int, ...]:
            asked.append((start, stop))
            return tuple(range(start, stop))

        keys = PageKeys(4, "")
        keys.key(1, known_ids)
        keys.key(0, known_ids)
        keys.key(2, known_ids)
        assert asked == [(0, 4), (4, 8), (8, 12)]


class TestPages:
    def test_idle_pages_are_evicted_oldest_first_and_from_the_end(self) -> None:
        pages = PageAllocator(5)
        cache = PrefixCache(pages)
        first, second = cache.allocate(2), cache.allocate(2)
        assert first is not None
        assert second is not None
        for page_id in (*first, *second):
            assert cache.register(bytes([page_id]), page_id)
        assert not cache.register(bytes([first[0]]), second[0]), "one page for each key"
        cache.release(first)
        cache.release(second)
        assert (cache.num_available, cache.num_held, cache.num_cached) == (5, 0, 4)
        cache.allocate(2)  # the free one, and the last of those let go first
        assert [cache.page(bytes([page_id])) for page_id in (*first, *second)] == [first[0], None, *second]
        cache.share(first[:1])
        assert cache.allocate(3) is None, "a page in use is not evicted"
        assert cache.evictions_total == 1
        assert cache.allocate(2) is not None
        assert [cache.page(bytes([page_id])) for page_id in (*first, *second)] == [first[0], None, None, None]
        pages.check_integrity()

    def test_a_dropped_page_stays_with_its_holder(self) -> None:
        pages = PageAllocator(1)
        cache = PrefixCache(pages)
        (page_id,) = cache.allocate(1) or [-1]
        cache.register(b"key", page_id)
        cache.drop(page_id)
        cache.drop(page_id)
        assert (cache.page(b"key"), cache.num_available) == (None, 0)
        cache.release([page_id])
        assert cache.num_available == pages.num_free == 1


def test_a_second_turn_finds_the_first_and_its_answer() -> None:
    r = rig(page_size=4)
    r.add(spec(1, prompt(10), 9))
    r.run(2)
    turn = (*prompt(10), *r.tokens[1], 5, 6, 7)
    r.add(spec(2, turn, 4))
    plan = r.plan()
    # 18 of the first turn's 19 tokens were computed; its last rows were in flight when its pages went, see `prefixes`.
    assert plan.work[0].start == 16
    assert plan.grants[0].first_index == 0
    r.run(2)
    assert r.cached == {1: 0, 2: 16}
    stats = r.scheduler.stats()
    assert (stats.prefix_queries_total, stats.prefix_hits_total) == (10 + 22, 16)
    assert stats.pages_used == 0
    assert stats.pages_cached > 0
    r.check_tokens()


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_a_hit_is_of_whole_pages_and_leaves_a_token_to_compute(length: int, hit: int) -> None:
    r = rig(page_size=4)
    r.add(spec(1, prompt(length), 1))
    r.run()
    r.add(spec(2, prompt(length), 3))
    r.run()
    assert r.cached == {1: 0, 2: hit}
    assert rows(r, 2) == length - hit + 2
    r.check_tokens()


def test_equal_prompts_at_once_are_computed_once() -> None:
    r = rig(page_size=4, max_streams=8, token_budget=64)
    for i in range(8):
        r.add(spec(i, (*prompt(20), i), 3))
    plan = r.plan()
    assert [(w.sequence_id, w.start, w.num_tokens) for w in plan.work] == [(0, 0, 21)] + [
        (i, 20, 1) for i in range(1, 8)
    ]
    assert len({grant.page_ids[:5] for grant in plan.grants}) == 1
    r.run(2)
    r.check_tokens()
    assert r.cached == {0: 0} | dict.fromkeys(range(1, 8), 20)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_long_prompt_under_way_is_waited_for(depth: int) -> None:
    r = rig(page_size=4, context=256, num_pages=200, token_budget=10)
    r.add(spec(1, (*prompt(101), 1), 3))
    r.plan()
    r.plan()
    r.add(spec(2, (*prompt(101), 2, 3), 3), spec(3, prompt(7, 5), 2))
    # Number 3 does not wait, and number 2 has no slot meanwhile.
    assert [w.sequence_id for w in r.plan().work] == [1, 3]
    assert r.scheduler.stats().num_waiting == 1
    r.run(depth)
    assert rows(r, 1) + rows(r, 2) == (102 + 2) + (3 + 2)
    assert r.cached == {1: 0, 2: 100, 3: 0}
    r.check_tokens()


def test_waiting_for_a_prefix_does_not_close_the_door() -> None:
    r = rig(page_size=4, context=1024, num_pages=600, token_budget=8, max_streams=3)
    r.add(spec(1, (*prompt(801), 1), 2))
    r.plan()
    r.add(spec(2, (*prompt(801), 2), 2))
    for i in range(3, 43):
        r.add(spec(i, prompt(3, i), 1))
    r.run()
    began = [w.sequence_id for plan in r.plans for w in plan.work if w.samples]
    assert began.index(2) > 40, "all the short ones passed"
    assert rows(r, 2) == 3
    r.check_tokens()


def test_when_the_one_waited_for_goes_away_the_next_takes_over() -> None:
    for fate in ("abort", "fail"):
        r = rig(page_size=4, context=256, num_pages=200, token_budget=8)
        r.add(spec(1, (*prompt(40), 1), 3))
        r.plan()
        r.complete()
        r.plan()
        r.add(spec(2, (*prompt(40), 2), 3), spec(3, (*prompt(40), 3), 3))
        if fate == "abort":
            r.abort(1)
            kept = 16
        else:
            r.fail()
            kept = 8  # the failed step's two pages are gone, those before it are sound
        plan = r.plan()
        assert [(w.sequence_id, w.start) for w in plan.work] == [(2, kept)]
        r.run(2)
        assert rows(r, 2) + rows(r, 3) == (41 - kept + 2) + (1 + 2)
        r.check_tokens()


def test_who_goes_first_does_not_wait_for_who_goes_after() -> None:
    r = rig(page_size=4, context=256, num_pages=200, token_budget=8)
    r.add(spec(1, (*prompt(41), 1), 3, priority=1))
    r.plan()
    r.add(spec(2, (*prompt(41), 2), 3, priority=0))
    assert [(w.sequence_id, w.start) for w in r.plan().work] == [(2, 8)]
    r.run(2)
    assert rows(r, 1) + rows(r, 2) == 42 + 2 + 2 + 2, "the shared part once, whoever computes it"
    r.check_tokens()


def test_salt_and_opting_out() -> None:
    r = rig(page_size=4)
    r.add(spec(1, prompt(17), 2, salt="a"))
    r.run()
    r.add(spec(2, prompt(17), 2), spec(3, prompt(17), 2, salt="b"), spec(4, prompt(17), 2, salt="a", use_cache=False))
    r.run()
    r.add(spec(5, prompt(17), 2, salt="a"), spec(6, prompt(17), 2))
    r.run()
    assert r.cached == {1: 0, 2: 0, 3: 0, 4: 0, 5: 16, 6: 16}
    r.check_tokens()
    r = rig(page_size=4)
    r.add(spec(1, prompt(17), 2, use_cache=False))
    r.run()
    r.add(spec(2, prompt(17), 2))
    r.run()
    assert r.cached == {1: 0, 2: 0}, "one that opts out leaves nothing either"


def test_switched_off() -> None:
    r = Rig(page_size=4)
    for i in range(2):
        r.add(spec(i, prompt(17), 2))
        r.run()
    stats = r.scheduler.stats()
    assert (r.cached, stats.prefix_queries_total, stats.pages_cached) == ({0: 0, 1: 0}, 0, 0)


def test_preempted_sequences_find_their_own_pages() -> None:
    r = rig(max_streams=4, context=24, page_size=4, num_pages=8, token_budget=32)
    r.add(spec(1, prompt(8, 1), 16), spec(2, prompt(8, 2), 16))
    r.run(2)
    assert r.scheduler.stats().preemptions_total >= 1
    assert r.scheduler.stats().prefix_hits_total == 0, "one's own pages are no hits"
    chunks = [w.start for plan in r.plans for w in plan.work if w.sequence_id == 2 and w.token_ids is not None]
    assert chunks[0] == 0
    assert max(chunks) > 0, "it goes on from what was left of its pages"
    r.check_tokens()


def test_more_sequences_fit_than_the_pool_could_hold_apart() -> None:
    r = rig(page_size=4, num_pages=26, context=64, max_streams=8, token_budget=64)
    for i in range(8):
        r.add(spec(i, (*prompt(40), i), 3))  # 11 pages each, ten of them shared
    r.run()
    assert r.scheduler.stats().preemptions_total == 0
    assert max(len(plan.work) for plan in r.plans) == 8, "all run at once"
    r.check_tokens()


def test_pages_in_use_outlive_their_first_holder() -> None:
    r = rig(page_size=4, num_pages=12, context=48, max_streams=4, token_budget=64)
    r.add(spec(1, prompt(17), 1), spec(2, (*prompt(17), 1), 20))
    r.plan()
    r.add(spec(3, prompt(20, 3), 2))  # takes whatever can be had
    r.run()
    assert r.cached[2] == 16
    r.check_tokens()


class TestFail:
    def test_takes_along_who_reads_what_was_not_written(self) -> None:
        r = rig(page_size=4, token_budget=64)
        r.add(spec(1, (*prompt(20), 1), 3))
        r.plan()
        r.add(spec(2, (*prompt(20), 2), 3), spec(3, prompt(9, 3), 3))
        r.plan()
        assert sorted(r.fail()) == [1, 2]
        assert r.scheduler.stats().pages_cached == 2, "those of number 3"
        r.run(2)
        r.add(spec(4, (*prompt(20), 4), 3))
        r.run()
        assert r.cached[4] == 0
        r.check_tokens()

    def test_even_through_one_that_was_aborted(self) -> None:
        r = rig(page_size=4, token_budget=64)
        r.add(spec(1, (*prompt(20), 1), 3))
        r.plan()
        r.add(spec(2, (*prompt(20), *prompt(8, 4)), 3))
        r.plan()
        r.abort(1)
        r.abort(2)
        r.add(spec(3, (*prompt(20), *prompt(8, 4), 3), 3))
        assert r.plan().work[0].start == 28
        assert r.fail() == [3]
        r.run()
        assert r.scheduler.stats().pages_cached == 0
        r.add(spec(5, (*prompt(20), 5), 3))
        r.run()
        r.check_tokens()

    def test_what_was_read_before_stays(self) -> None:
        r = rig(page_size=4, token_budget=64)
        r.add(spec(1, prompt(8), 9))
        for _ in range(7):
            r.plan()
            r.complete()
        r.plan()
        assert r.fail() == [1]
        new, _ = alone(spec(1, prompt(8), 9))
        r.add(spec(2, (*prompt(8), *new[:7]), 2))
        r.run()
        assert r.cached[2] == 12
        r.check_tokens()


def test_exports_and_imports_share_too() -> None:
    r = rig(page_size=4)
    r.add(spec(1, prompt(18), 4, export=True))
    r.run()
    r.add(spec(2, (*prompt(18), 3), 4, export=True), spec(3, prompt(14, 7), 3, num_imported=13))
    r.run()
    r.add(spec(4, (*prompt(14, 7), 1), 3), spec(5, (*prompt(18), 3, 4), 3, num_imported=17))
    r.run()
    assert r.cached == {1: 0, 2: 16, 3: 0, 4: 12, 5: 0}
    r.check_tokens()
