"""Results with chosen figures, and rigs on the fake engine."""

from twinjet.bench.results import Result, Sample
from twinjet.bench.suite import BenchTest, Kind
from twinjet.core.config import CacheConfig, EngineConfig, SchedulerConfig


def result(kind: Kind, num_tokens: int, concurrency: int, *rates: float, peak_mib: float | None = 100.0) -> Result:
    """Of the model `made|up`; `rates`: throughput of all streams by device time, one for each repetition.

    By the wall clock everything takes twice as long.
    """
    test = BenchTest(kind, num_tokens, concurrency)
    samples = [Sample(test.total_tokens, test.total_tokens / rate, 2 * test.total_tokens / rate) for rate in rates]
    peak_bytes = None if peak_mib is None else int(peak_mib * (1 << 20))
    return Result(test, "made|up", "fake", tuple(samples), peak_bytes)


def engine_config(
    fake: str = "fake", *, max_streams: int = 4, context: int = 64, token_budget: int = 8, num_pages: int = 16
) -> EngineConfig:
    """`fake`: as `tests.fakes.load_fake_engine` takes it; pages of 16 tokens."""
    return EngineConfig(
        model_path=fake,
        cache=CacheConfig(page_size=16, num_pages=num_pages, dtype="float32"),
        scheduler=SchedulerConfig(max_streams=max_streams, context=context, token_budget=token_budget),
        exact=False,
        threads=1,
    )
