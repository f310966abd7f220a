"""Whatever happens, with hardly any pages, shared or not: every sequence gets the tokens it gets alone."""

from typing import get_args

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scheduler.device import VOCAB_SIZE, Rig, alone, prompt, spec
from twinjet.core.config import CacheConfig, PolicyName, SchedulerConfig
from twinjet.scheduler.cost_model import CostModel
from twinjet.scheduler.pace import make_pace
from twinjet.scheduler.policies import POLICIES

COSTS = CostModel((1, 16), (1.0, 9.0), sample_ms=0.2, single_ms=0.02, chunk_ms=0.01)


def alike(length: int) -> tuple[int, ...]:
    """The beginning that sequences share: four tokens, and what follows them alone."""
    return (prompt(4) + tuple(alone(spec(-1, prompt(4), 20))[0]))[:length]


class RandomMoves(RuleBasedStateMachine):
    """Adds, aborts, plans, completions and failures in random order; the fake device checks each plan as it runs."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_spare_pages=st.integers(0, 8),
        max_streams=st.integers(1, 5),
        num_spare_rows=st.integers(0, 6),
        depth=st.integers(1, 4),
        prefix_cache=st.booleans(),
        policy=st.sampled_from(get_args(PolicyName)),
        itl_target_ms=st.sampled_from([None, 0.1, 6.0]),
    )
    def start(
        self,
        page_size: int,
        num_spare_pages: int,
        max_streams: int,
        num_spare_rows: int,
        depth: int,
        prefix_cache: bool,
        policy: PolicyName,
        itl_target_ms: float | None,
    ) -> None:
        self.context = 24
        self.depth = depth
        self.budget = max_streams + num_spare_rows
        self.num_added = 0
        self.rig = Rig(
            max_streams=max_streams,
            context=self.context,
            token_budget=self.budget,
            page_size=page_size,
            num_pages=self.context // page_size + num_spare_pages,
            prefix_cache=prefix_cache,
            policy=POLICIES[policy](),
        )
        if itl_target_ms is not None:
            limits = SchedulerConfig(max_streams, self.context, self.budget, policy, itl_target_ms)
            self.rig.scheduler.keep_pace(make_pace(COSTS, limits, CacheConfig(page_size, 64, "float32")))

    @rule(
        num_known=st.integers(1, 23),
        max_new_tokens=st.integers(1, 23),
        seed=st.integers(0, VOCAB_SIZE),
        stop=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        export=st.sampled_from([False, False, False, True]),
        num_imported=st.sampled_from([0, 0, 0, 1, 5, 22]),
        same=st.sampled_from([0, 8, 24]),
        use_cache=st.sampled_from([True, True, True, False]),
        salt=st.sampled_from(["", "", "other"]),
    )
    def add(
        self,
        num_known: int,
        max_new_tokens: int,
        seed: int,
        stop: list[int],
        priority: int,
        export: bool,
        num_imported: int,
        same: int,
        use_cache: bool,
        salt: str,
    ) -> None:
        self.rig.add(
            spec(
                self.num_added,
                # Many begin alike, some with what an earlier one has generated.
                (alike(same) + prompt(num_known, seed))[:num_known],
                min(max_new_tokens, self.context - num_known),
                stop=stop,
                priority=priority,
                export=export,
                num_imported=min(num_imported, num_known - 1),
                use_cache=use_cache,
                salt=salt,
            )
        )
        self.num_added += 1

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.integers(0, self.num_added))
        ended = sequence_id in self.rig.finish or sequence_id not in self.rig.specs
        assert self.rig.abort(sequence_id) is not ended

    @precondition(lambda self: len(self.rig.in_flight) < self.depth)
    @rule()
    def schedule(self) -> None:
        plan = self.rig.schedule()
        if plan is None and self.rig.scheduler.has_work:
            assert self.rig.in_flight, "with nothing in flight there is always a plan"

    @precondition(lambda self: self.rig.in_flight)
    @rule()
    def complete(self) -> None:
        self.rig.complete()

    @rule(num_steps=st.integers(1, 12))
    def work(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while len(self.rig.in_flight) < self.depth and self.rig.schedule() is not None:
                pass
            if self.rig.in_flight:
                self.rig.complete()

    @precondition(lambda self: self.rig.in_flight)
    @rule(luck=st.integers(0, 3))
    def fail(self, luck: int) -> None:
        if luck == 0:
            self.rig.fail()

    @invariant()
    def tokens_are_right_so_far(self) -> None:
        for sequence_id, got in self.rig.tokens.items():
            tokens, _ = alone(self.rig.specs[sequence_id])
            assert got == tokens[: len(got)]

    @invariant()
    def wasted_rows_are_bounded(self) -> None:
        stats = self.rig.scheduler.stats()
        num_cut_short = sum(finish in ("aborted", "failed") for finish in self.rig.finish.values())
        num_stopped = sum(finish == "stop" for finish in self.rig.finish.values())
        assert stats.wasted_rows_total <= num_stopped * (self.depth - 1) + num_cut_short * self.depth * self.budget

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        live = [spec for i, spec in self.rig.specs.items() if i not in self.rig.finish]
        # Nobody starves: even one row at a time, and each preempted once by each of the others, this many suffice.
        work = sum(len(spec.token_ids) + spec.max_new_tokens for spec in live)
        self.rig.run(self.depth, max_steps=work * (len(live) + 1) + self.depth)
        self.rig.check_tokens()


TestRandomMoves = RandomMoves.TestCase
TestRandomMoves.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
