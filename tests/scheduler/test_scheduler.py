"""Plans, outputs and ends of sequences; `test_preemption.py` has what happens when pages run out."""

import dataclasses

import numpy as np
import pytest

from tests.scheduler.device import VOCAB_SIZE, Rig, alone, canonical, next_token, prompt, spec
from twinjet.core.config import CacheConfig, SchedulerConfig
from twinjet.core.errors import ConfigError, ContextTooLong, InvalidRequest
from twinjet.core.plan import PageGrant, StepOutput
from twinjet.core.types import TokenLogprobs
from twinjet.scheduler.scheduler import Scheduler
from twinjet.scheduler.sequence import ImportedPages


def test_one_sequence_by_hand() -> None:
    rig = Rig(page_size=2)
    rig.add(spec(7, (1, 2, 3), 3))
    plan = rig.plan()
    (work,) = plan.work
    assert (work.sequence_id, work.start, work.num_tokens, work.token_ids, work.samples) == (7, 0, 3, (1, 2, 3), True)
    assert plan.grants == (PageGrant(work.slot, 0, (0, 1)),)
    (emission,) = rig.complete().emissions
    assert emission.token_id == (1 * 2 + 2 * 3 + 3 * 4 + 1) % VOCAB_SIZE == 8
    assert (emission.finish, emission.logprobs) == ("", None)

    plan = rig.plan()
    (work,) = plan.work
    assert (work.start, work.num_tokens, work.token_ids, work.samples) == (3, 1, None, True)
    assert plan.grants == ()
    (emission,) = rig.complete().emissions
    assert emission.token_id == (20 + 4 * 9 + 4) % VOCAB_SIZE == 8

    plan = rig.plan()
    assert plan.grants == (PageGrant(work.slot, 2, (2,)),)
    (emission,) = rig.complete().emissions
    assert emission.finish == "length"
    assert rig.schedule() is None
    assert not rig.scheduler.has_work
    rig.check_idle()
    rig.check_tokens()


def test_prompt_in_chunks_under_the_budget() -> None:
    rig = Rig(token_budget=5)
    rig.add(spec(1, prompt(12), 2))
    rig.run()
    chunks = [(w.start, w.num_tokens, w.samples) for plan in rig.plans for w in plan.work]
    assert chunks == [(0, 5, False), (5, 5, False), (10, 2, True), (12, 1, True)]
    rig.check_tokens()


@pytest.mark.parametrize("token_budget", [4, 5, 7, 64])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_same_tokens_whatever_the_step(token_budget: int, depth: int, page_size: int) -> None:
    rig = Rig(token_budget=token_budget, page_size=page_size, num_pages=256 // page_size)
    for i in range(9):
        rig.add(spec(i, prompt(1 + 5 * i, i), 1 + i, stop=(i, 4) if i % 3 == 0 else ()))
    rig.run(depth)
    rig.check_tokens()


def test_decodes_come_first_and_chunks_fill_the_rest() -> None:
    rig = Rig(token_budget=8)
    rig.add(spec(1, prompt(3), 9), spec(2, prompt(4), 9))
    rig.plan()
    rig.add(spec(3, prompt(30), 9))
    plan = rig.plan()
    assert [(w.sequence_id, w.num_tokens) for w in plan.work] == [(1, 1), (2, 1), (3, 6)]
    assert plan.num_rows == 8


def test_finished_prompt_decodes_in_the_very_next_plan_unread() -> None:
    rig = Rig()
    rig.add(spec(1, prompt(5), 4))
    plans = [rig.plan() for _ in range(4)]
    assert [(w.start, w.token_ids is None) for plan in plans for w in plan.work] == [
        (0, False),
        (5, True),
        (6, True),
        (7, True),
    ]
    assert rig.schedule() is None  # the length is planned exactly
    rig.run()
    assert rig.scheduler.stats().wasted_rows_total == 0
    rig.check_tokens()


def test_short_prompts_finish_beside_a_long_one() -> None:
    rig = Rig(context=800, num_pages=240, token_budget=16)
    rig.add(spec(1, prompt(600), 1))
    for _ in range(3):
        rig.plan()
    rig.add(spec(2, prompt(8), 1), spec(3, prompt(20), 1))
    plan = rig.plan()
    assert {w.sequence_id: w.num_tokens for w in plan.work} == {1: 8, 2: 8}
    for _ in range(3):
        plan = rig.plan()
    assert {w.sequence_id for w in plan.work if w.samples} == {3}
    rig.run()
    rig.check_tokens()


def test_priority_goes_first() -> None:
    rig = Rig(max_streams=1)
    rig.add(spec(1, priority=1), spec(2, priority=0), spec(3, priority=0))
    rig.run()
    order = [w.sequence_id for plan in rig.plans for w in plan.work if w.token_ids is not None]
    assert order == [2, 3, 1]


def test_urgent_prompt_takes_the_rows_of_one_under_way() -> None:
    rig = Rig(token_budget=8)
    rig.add(spec(1, prompt(40), 2))
    rig.plan()
    rig.add(spec(2, prompt(24), 2, priority=-1))
    assert [(w.sequence_id, w.num_tokens) for w in rig.plan().work] == [(2, 8)]
    rig.run()
    rig.check_tokens()


def test_slot_is_reused_in_the_plan_after_the_last_row() -> None:
    rig = Rig(max_streams=1)
    rig.add(spec(1, (1, 2), 2), spec(2, (3,), 1))
    plans = [rig.plan() for _ in range(3)]
    assert [w.sequence_id for plan in plans for w in plan.work] == [1, 1, 2]
    assert len({w.slot for plan in plans for w in plan.work}) == 1
    assert rig.scheduler.stats().pages_used == 0
    rig.run()
    rig.check_tokens()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_stop_token_is_emitted_and_rows_behind_it_are_wasted(depth: int) -> None:
    rig = Rig(context=40)
    tokens = (1, 2, 3)
    new, _ = alone(spec(1, tokens, 20))
    stop = next(token for i, token in enumerate(new) if i >= 3 and token not in new[:i])
    rig.add(spec(1, tokens, 20, stop=(stop,)))
    rig.run(depth)
    assert rig.tokens[1][-1] == stop
    assert rig.finish[1] == "stop"
    assert rig.scheduler.stats().wasted_rows_total == depth - 1
    rig.check_tokens()


def test_stop_token_as_the_last_or_first_token() -> None:
    first = next_token((1, 2, 3))
    rig = Rig()
    rig.add(spec(1, (1, 2, 3), 1, stop=(first,)), spec(2, (1, 2, 3), 5, stop=(first,)))
    rig.run(3)
    assert rig.finish == {1: "stop", 2: "stop"}
    assert rig.tokens == {1: [first], 2: [first]}


def test_wasted_row_does_not_harm_who_reuses_slot_and_pages() -> None:
    rig = Rig(max_streams=1, page_size=2, num_pages=8, context=16)
    first = next_token((1, 2))
    rig.add(spec(1, (1, 2), 9, stop=(first,)), spec(2, (5, 6, 7), 3))
    rig.plan()
    wasted = rig.plan()  # a row of sequence 1 beyond its stop
    assert wasted.work[0].sequence_id == 1
    rig.complete()
    reuse = rig.plan()
    assert reuse.work[0].sequence_id == 2
    assert set(reuse.grants[0].page_ids) & {0, 1}
    rig.run()
    assert rig.scheduler.stats().wasted_rows_total == 1
    rig.check_tokens()


class TestAbort:
    def test_unknown_and_ended_ids(self) -> None:
        rig = Rig()
        assert not rig.abort(5)
        rig.add(spec(5, max_new_tokens=1))
        rig.run()
        assert not rig.abort(5)

    def test_waiting(self) -> None:
        rig = Rig(max_streams=1)
        rig.add(spec(1), spec(2), spec(3))
        rig.plan()
        assert rig.abort(2)
        rig.run()
        assert [w.sequence_id for plan in rig.plans for w in plan.work if w.start == 0] == [1, 3]
        rig.check_tokens()

    def test_amid_its_prompt(self) -> None:
        rig = Rig(token_budget=4)
        rig.add(spec(1, prompt(20)))
        rig.plan()
        assert rig.abort(1)
        assert rig.scheduler.stats().pages_used == 0
        assert rig.schedule() is None
        assert rig.scheduler.has_work  # the plan in flight
        rig.run()
        assert rig.tokens[1] == []
        assert rig.scheduler.stats().wasted_rows_total == 4, "the rows of a chunk count too"

    def test_with_tokens_in_flight(self) -> None:
        rig = Rig()
        rig.add(spec(1, max_new_tokens=9), spec(2, max_new_tokens=9))
        rig.plan()
        rig.plan()
        rig.complete()
        assert rig.abort(1)
        assert not rig.abort(1)
        (emission,) = rig.complete().emissions
        assert emission.sequence_id == 2
        assert rig.scheduler.stats().wasted_rows_total == 1
        rig.run()
        rig.check_tokens()

    def test_with_its_last_row_in_flight(self) -> None:
        rig = Rig()
        rig.add(spec(1, max_new_tokens=1))
        rig.plan()
        assert rig.abort(1)
        assert rig.complete().emissions == []
        rig.check_idle()

    def test_id_may_be_used_again_at_once(self) -> None:
        rig = Rig()
        rig.add(spec(1, (1, 2, 3), 9))
        rig.plan()
        rig.plan()
        rig.scheduler.abort(1)
        rig.device.store.clear()
        rig.scheduler.add(spec(1, (4, 5), 2), 9.0)
        assert [rig.scheduler.complete(_output(plan.step_id, 1)).emissions for plan in rig.in_flight] == [[], []]


def _output(step_id: int, num_sampled: int) -> StepOutput:
    return StepOutput(step_id, np.zeros(num_sampled, np.int32))


class TestFail:
    def test_fails_its_own_and_nobody_else(self) -> None:
        rig = Rig(max_streams=2, token_budget=8)
        rig.add(spec(1, prompt(3), 3), spec(2, prompt(30), 3), spec(3, prompt(5), 3))
        rig.plan()
        rig.plan()
        assert rig.fail() == [1, 2]
        rig.run(2)
        assert rig.finish == {1: "failed", 2: "failed", 3: "length"}
        rig.check_tokens()

    def test_aborted_are_not_reported(self) -> None:
        rig = Rig()
        rig.add(spec(1), spec(2))
        rig.plan()
        rig.abort(1)
        assert rig.fail() == [2]
        rig.check_idle()

    def test_draining_sequence_fails_too(self) -> None:
        rig = Rig()
        rig.add(spec(1, max_new_tokens=1))
        rig.plan()
        assert rig.fail() == [1]
        rig.check_idle()

    def test_out_of_order(self) -> None:
        rig = Rig()
        with pytest.raises(ValueError, match="expected step none"):
            rig.scheduler.fail(0)
        rig.add(spec(1))
        rig.plan()
        rig.plan()
        with pytest.raises(ValueError, match="expected step 0, got 1"):
            rig.scheduler.fail(1)


class TestImport:
    def test_computes_only_what_is_left(self) -> None:
        rig = Rig(page_size=4)
        tokens = prompt(11)
        rig.add(spec(1, tokens, 3, num_imported=9))
        plan = rig.plan()
        (work,) = plan.work
        assert (work.start, work.token_ids, work.samples) == (9, tokens[9:], True)
        assert [(p.start, p.kv.shape[2]) for p in plan.imports] == [(0, 4), (4, 5)]
        assert plan.grants[0].first_index == 0
        assert len(plan.grants[0].page_ids) == 3
        assert all(p.page_ids == plan.grants[0].page_ids for p in plan.imports)
        rig.run()
        assert sum(len(plan.imports) for plan in rig.plans) == 2
        rig.check_tokens()

    @pytest.mark.parametrize("num_imported", [1, 3, 4, 5, 8, 19])
    def test_any_split(self, num_imported: int) -> None:
        rig = Rig(page_size=4, token_budget=4)
        rig.add(spec(1, prompt(20), 3, num_imported=num_imported), spec(2, prompt(9), 5, num_imported=8))
        rig.run(2)
        rig.check_tokens()
        assert rig.scheduler.stats().rows_total == (20 - num_imported + 2) + (1 + 4)

    def test_waits_until_all_pages_are_there(self) -> None:
        rig = Rig(page_size=4, num_pages=8, context=32, token_budget=16)
        rig.add(spec(1, prompt(16), 3))
        rig.plan()
        rig.add(spec(2, prompt(20), 3, num_imported=17))
        assert not rig.plan().imports
        rig.run()
        rig.check_tokens()

    @pytest.mark.parametrize(
        "imports",
        [
            (ImportedPages(1, canonical((1,))),),
            (ImportedPages(0, canonical((1,))), ImportedPages(2, canonical((1,)))),
            (ImportedPages(0, canonical(())),),
            (ImportedPages(0, canonical((1, 2, 3))),),
            (ImportedPages(0, np.zeros((1, 2, 1))),),
        ],
    )
    def test_refused(self, imports: tuple[ImportedPages, ...]) -> None:
        rig = Rig()
        with pytest.raises(InvalidRequest, match="imported pages must"):
            rig.scheduler.add(dataclasses.replace(spec(1), imports=imports), 0.0)
        assert not rig.scheduler.has_work


class TestExport:
    def test_in_the_plan_that_samples_and_frees_at_once(self) -> None:
        rig = Rig(token_budget=5)
        rig.add(spec(1, prompt(8), 7, export=True))
        assert rig.plan().exports == ()
        (export,) = rig.plan().exports
        assert (export.sequence_id, export.start, export.stop, len(export.page_ids)) == (1, 0, 8, 2)
        assert rig.scheduler.stats().pages_used == 0
        assert rig.schedule() is None
        assert rig.complete().exports == []
        done = rig.complete()
        assert [e.finish for e in done.emissions] == ["exported"]
        assert [e.sequence_id for e in done.exports] == [1]
        rig.check_idle()
        rig.check_tokens()

    def test_stop_token_or_single_token_ends_without_export(self) -> None:
        rig = Rig()
        rig.add(spec(1, (1, 2, 3), 7, export=True, stop=(next_token((1, 2, 3)),)), spec(2, (1, 2), 1, export=True))
        assert [export.sequence_id for export in rig.plan().exports] == [1]  # 1 may go on; 2 cannot
        rig.run()
        assert rig.finish == {1: "stop", 2: "length"}
        assert rig.exports == {}

    def test_aborted_export_is_dropped(self) -> None:
        rig = Rig()
        rig.add(spec(1, export=True), spec(2, export=True))
        rig.plan()
        rig.abort(1)
        done = rig.complete()
        assert [e.sequence_id for e in done.exports] == [2]
        np.testing.assert_array_equal(done.exports[0].kv, canonical((1, 2, 3)))

    def test_goes_on_elsewhere_with_the_same_tokens(self) -> None:
        whole = spec(1, prompt(10), 6)
        prefill = Rig()
        prefill.add(dataclasses.replace(whole, export_pages=True))
        prefill.run(2)
        decode = Rig(page_size=2)
        known = (*whole.token_ids, *prefill.tokens[1])
        decode.add(
            dataclasses.replace(
                whole, token_ids=known, max_new_tokens=5, imports=(ImportedPages(0, prefill.exports[1]),)
            )
        )
        decode.run(2)
        assert prefill.tokens[1] + decode.tokens[1] == alone(whole)[0]
        assert decode.scheduler.stats().rows_total == 5


def test_logprobs_cut_to_what_was_asked() -> None:
    rig = Rig()
    rig.add(spec(1, num_logprobs=2, max_new_tokens=1), spec(2, max_new_tokens=1), spec(3, num_logprobs=0))
    rig.plan()
    two, none, zero = (emission.logprobs for emission in rig.complete().emissions)
    token = next_token((1, 2, 3))
    assert two == TokenLogprobs(-0.5 * token, (token, token + 1), (0.0, -1.0))
    assert none is None
    assert zero == TokenLogprobs(-0.5 * token)
    assert two is not None
    assert all(type(value) is int for value in two.top_ids)


@pytest.mark.parametrize(
    "output",
    [
        StepOutput(1, np.zeros(1, np.int32)),
        StepOutput(0, np.zeros(2, np.int32)),
        StepOutput(0, np.zeros(1, np.int32), exports=(canonical((1,)),)),
        StepOutput(0, np.zeros(1, np.int32)),
        StepOutput(0, np.zeros(1, np.int32), logprobs=np.zeros(1, np.float32)),
    ],
    ids=["other step", "tokens", "exports", "no log-probabilities", "no alternatives"],
)
def test_output_of_another_shape_changes_nothing(output: StepOutput) -> None:
    rig = Rig()
    rig.add(spec(1, num_logprobs=1))
    rig.plan()
    with pytest.raises(ValueError, match="step"):
        rig.scheduler.complete(output)
    rig.scheduler.check_integrity()
    assert rig.fail() == [1]


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (spec(1, ()), InvalidRequest, "at least one token"),
        (spec(1, max_new_tokens=0), InvalidRequest, "at least 1, got 0"),
        (spec(1, prompt(60), 5), ContextTooLong, "60 tokens and 5 new ones exceed the context of 64"),
        (spec(9), InvalidRequest, "live already"),
    ],
)
def test_sequences_that_can_never_run_are_refused(bad: object, error: type[Exception], match: str) -> None:
    rig = Rig()
    rig.add(spec(9))
    with pytest.raises(error, match=match):
        rig.scheduler.add(bad, 0.0)  # type: ignore[arg-type]
    rig.run()
    rig.check_tokens()


def test_whole_context_fits() -> None:
    rig = Rig(context=64, page_size=4, num_pages=16)
    rig.add(spec(1, prompt(1), 63), spec(2, prompt(63), 1))
    rig.run(2)
    rig.check_tokens()


def test_pool_smaller_than_a_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="must hold one context of 33 tokens, but holds 32"):
        Scheduler(SchedulerConfig(1, 33, 1), CacheConfig(4, 8, "float32"))


def test_stats() -> None:
    rig = Rig(max_streams=1, token_budget=4, page_size=4)
    rig.add(spec(1, prompt(10), 2), spec(2, prompt(3), 2))
    rig.plan()
    stats = rig.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_used, stats.waiting_tokens) == (1, 1, 1, 6 + 3)
    assert (stats.steps_total, stats.rows_total) == (0, 0)
    rig.run()
    stats = rig.scheduler.stats()
    assert (stats.steps_total, stats.rows_total) == (4 + 2, 11 + 4)
    assert (stats.wasted_rows_total, stats.preemptions_total) == (0, 0)


def test_long_prompt_is_not_copied() -> None:
    class CountingTuple(tuple[int, ...]):
        copied = 0

        def __getitem__(self, key: object) -> object:  # type: ignore[override]
            part = tuple.__getitem__(self, key)  # type: ignore[call-overload]
            CountingTuple.copied += len(part) if isinstance(part, tuple) else 1
            return part

    scheduler = Scheduler(SchedulerConfig(4, 100_100, 256), CacheConfig(16, 7_000, "float32"))
    scheduler.add(dataclasses.replace(spec(1, max_new_tokens=50), token_ids=CountingTuple(prompt(100_000))), 0.0)
    while (plan := scheduler.schedule(0.0)) is not None:
        scheduler.complete(_output(plan.step_id, sum(w.samples for w in plan.work)))
    assert CountingTuple.copied == 200_000  # once to be computed, once for the keys of its pages


def test_same_calls_same_plans() -> None:
    runs: list[list[object]] = []
    for _ in range(2):
        rig = Rig(max_streams=3, num_pages=16, token_budget=8)
        for i in range(8):
            rig.add(spec(i, prompt(3 + 4 * i, i), 9, priority=i % 2))
            rig.schedule()
        rig.abort(3)
        rig.run(3)
        runs.append([(p.step_id, p.work, p.grants) for p in rig.plans])
    assert runs[0] == runs[1]
