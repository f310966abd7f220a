"""A fake engine whose plans are kept, and tests run on it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fakes import FakeEngine, load_fake_engine
from twinjet.bench.results import Result
from twinjet.bench.session import Bench
from twinjet.bench.suite import BenchTest
from twinjet.core.config import EngineConfig
from twinjet.core.plan import Plan


@dataclass
class Watched:
    """A fake engine whose plans are kept."""

    config: EngineConfig
    plans: list[Plan] = field(default_factory=list)
    before_step: Callable[[Plan], None] = lambda plan: None

    def load(self, on_progress: Callable[[str, int, int], None]) -> FakeEngine:
        engine = load_fake_engine(self.config, on_progress)
        fails = engine.before_step

        def before_step(number: int, plan: Plan) -> None:
            self.plans.append(plan)
            self.before_step(plan)
            fails(number, plan)

        engine.before_step = before_step
        return engine


def run_tests(
    watched: Watched, *tests: BenchTest, repetitions: int = 3, max_time_s: float = 600.0
) -> tuple[list[Result], list[tuple[int, int, BenchTest]]]:
    """Results, and what was told of the progress."""
    told: list[tuple[int, int, BenchTest]] = []
    bench = Bench("fake", watched.config, watched.load)
    results = bench.run(tests, repetitions, max_time_s, lambda *stage: None, lambda *progress: told.append(progress))
    return results, told
