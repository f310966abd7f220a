"""What `/metrics` shows, and how requests are counted. Knows neither routes nor engines' insides.

Names are vLLM's where it has them, with the prefix `twinjet_`, so that dashboards carry over. The hot path only
adds to plain numbers; Prometheus objects are made when somebody asks.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from twinjet import __version__
from twinjet.server.service import ServedModel
from twinjet.wire.messages import DURATION_BOUNDS_S, Durations

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_DELIVERY_S = (
    0.0002,
    0.0005,
    0.001,
    0.0015,
    0.002,
    0.003,
    0.004,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.05,
    0.1,
    0.5,
    2.5,
)
_E2E_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)

_ENGINE_GAUGES = (
    ("prefix_cache_pages", "pages_cached", "Pages in the prefix cache, in use or not."),
    ("cost_drift", "cost_drift", "Time of the latest steps over what was measured at start."),
    (
        "prefilled_not_decoding",
        "num_skipped",
        "Sequences whose prompt is computed, and which the latest step left out.",
    ),
)

_ENGINE_COUNTERS = (
    ("steps", "steps_total", "Forward passes."),
    ("rows", "rows_total", "Rows computed, padding not counted."),
    ("padding_tokens", "padding_rows_total", "Rows added to fill a bucket."),
    ("wasted_rows", "wasted_rows_total", "Rows computed for nothing, because their sequence had ended."),
    ("preemptions", "preemptions_total", "Sequences that lost their pages to others and were computed again."),
    ("prefix_cache_queries", "prefix_queries_total", "Tokens that were looked for in the prefix cache."),
    ("prefix_cache_hits", "prefix_hits_total", "Tokens that were found in the prefix cache."),
    ("prefix_cache_evictions", "prefix_evictions_total", "Pages that the prefix cache had to give away."),
    ("compiles", "compiles_total", "Programs compiled after warm-up; anything but 0 is a bug."),
    ("busy_seconds", "busy_s_total", "Seconds that the device spent in steps."),
    ("predicted_seconds", "predicted_s_total", "Seconds that its steps should have taken, by the cost model."),
    ("stall_bound_violations", "stall_bound_violations_total", "Steps that a stream waited for beyond the bound."),
)

_ENGINE_DURATIONS = (
    ("step_seconds", "step_durations", "Time of each step, by the device thread's clock."),
    ("step_gap_seconds", "gap_durations", "Idle time of the device between two steps while there was work."),
)


class Histogram:
    """Counts of seconds by bucket; adding one costs a bisection."""

    __slots__ = ("_bounds", "_counts", "_help", "_name", "_sum")

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._help, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def family(self) -> HistogramMetricFamily:
        buckets = cumulative_buckets(self._bounds, self._counts)
        return HistogramMetricFamily(f"twinjet_{self._name}", self._help, buckets=buckets, sum_value=self._sum)


def cumulative_buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Of a histogram with one count for each bound and one for what is beyond, as Prometheus wants it."""
    names = (*(str(float(bound)) for bound in bounds), "+Inf")
    return list(zip(names, accumulate(counts), strict=True))


class ServerMetrics(Collector):
    """Counts of this server, and its orchestrator's at the time of asking."""

    def __init__(self, service: ServedModel) -> None:
        self._service = service
        self.ttft = Histogram(
            "time_to_first_token_seconds", "Arrival of the request to its first token, queueing included.", _TTFT_S
        )
        self.itl = Histogram("inter_token_latency_seconds", "Each gap between two tokens of a sequence.", _ITL_S)
        self.delivery = Histogram(
            "token_delivery_seconds", "End of a step on the device to each of its streamed tokens written.", _DELIVERY_S
        )
        self.e2e = Histogram("e2e_request_latency_seconds", "Arrival of the request to a sequence's end.", _E2E_S)
        self.finished: Counter[str] = Counter()
        """Sequences by finish reason."""
        self.errors: Counter[int] = Counter()
        """Error answers by status, those inside a stream included."""
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not call `collect` to learn the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield self.ttft.family()
        yield self.itl.family()
        yield self.delivery.family()
        yield self.e2e.family()
        yield _counter("prompt_tokens", "Prompt tokens of accepted requests.", self.prompt_tokens)
        yield _counter("generation_tokens", "Tokens delivered to clients.", self.generation_tokens)
        success = CounterMetricFamily("twinjet_request_success", "Sequences ended.", labels=["finished_reason"])
        for reason in ("stop", "length", "cancelled", "error"):
            success.add_metric([reason], self.finished[reason])
        yield success
        errors = CounterMetricFamily("twinjet_http_errors", "Error answers.", labels=["code"])
        for status, count in sorted(self.errors.items()):
            errors.add_metric([str(status)], count)
        yield errors
        yield from self._engines()

    def _engines(self) -> Iterator[Metric]:
        orchestrator = self._service.orchestrator
        stats = orchestrator.stats()
        info = self._service.ready_info()
        reports = [(str(engine.engine_id), engine.stats) for engine in stats.engines if engine.stats is not None]
        pages = info.num_pages if info is not None else 0

        labels = {"version": __version__, "model": self._service.name, "backend": info.backend if info else ""}
        build = GaugeMetricFamily("twinjet_build_info", "What is running; always 1.", labels=list(labels))
        build.add_metric(list(labels.values()), 1)
        yield build
        yield _gauge("healthy", "1 while requests make progress.", int(orchestrator.health().ok))
        yield _gauge("num_requests", "Sequences accepted and not ended.", stats.num_requests)
        yield _gauge("num_requests_running", "Sequences that hold a slot.", sum(r.num_running for _, r in reports))
        yield _gauge("num_requests_waiting", "Sequences that wait for one.", sum(r.num_waiting for _, r in reports))
        yield _gauge("waiting_tokens", "Known tokens not yet computed.", sum(r.waiting_tokens for _, r in reports))
        usage = GaugeMetricFamily(
            "twinjet_kv_cache_usage_perc", "Used share of the KV pages, 0 to 1.", labels=["engine"]
        )
        for engine, report in reports:
            usage.add_metric([engine], report.pages_used / pages if pages else 0.0)
        yield usage
        for name, field, text in _ENGINE_GAUGES:
            gauge = GaugeMetricFamily(f"twinjet_{name}", text, labels=["engine"])
            for engine, report in reports:
                gauge.add_metric([engine], getattr(report, field))
            yield gauge
        duty = GaugeMetricFamily(
            "twinjet_duty_cycle", "Share of the time with work that the device spent in steps.", labels=["engine"]
        )
        for engine, report in reports:
            with_work_s = report.busy_s_total + report.gap_durations.total_s
            duty.add_metric([engine], report.busy_s_total / with_work_s if with_work_s else 1.0)
        yield duty
        for name, field, text in _ENGINE_DURATIONS:
            histogram = HistogramMetricFamily(f"twinjet_{name}", text, labels=["engine"])
            for engine, report in reports:
                durations: Durations = getattr(report, field)
                buckets = cumulative_buckets(DURATION_BOUNDS_S, durations.counts)
                histogram.add_metric([engine], buckets, durations.total_s)
            yield histogram
        for name, field, text in _ENGINE_COUNTERS:
            family = CounterMetricFamily(f"twinjet_{name}", text, labels=["engine"])
            for engine, report in reports:
                family.add_metric([engine], getattr(report, field))
            yield family
        if info is not None and info.forecast is not None:
            yield _gauge(
                "itl_target_seconds", "Longest step planned beside streams.", info.forecast.itl_target_ms / 1e3
            )
            if info.forecast.stall_bound_ms is not None:
                bound_s = info.forecast.stall_bound_ms / 1e3
                yield _gauge("stall_bound_seconds", "Longest wait of a running stream, as foretold.", bound_s)
        restarts = CounterMetricFamily(
            "twinjet_engine_restarts", "Times that an engine was started anew.", labels=["engine"]
        )
        ready = GaugeMetricFamily("twinjet_engine_ready", "1 while the engine is ready.", labels=["engine", "role"])
        for engine in stats.engines:
            restarts.add_metric([str(engine.engine_id)], engine.restarts)
            ready.add_metric([str(engine.engine_id), engine.role], int(engine.state == "ready"))
        yield restarts
        yield ready
        yield _counter("replays", "Sequences started anew because their engine died.", stats.replays_total)
        yield _counter("transfers", "Sequences whose pages moved between engines.", stats.transfers_total)
        yield _counter("transfer_bytes", "Bytes of pages moved between engines.", stats.transfer_bytes_total)
        for name, value in sorted(stats.extra.items()):
            shape = _counter if name.endswith("_total") else _gauge
            yield shape(name.removesuffix("_total"), "As reported by the orchestrator.", value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"twinjet_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"twinjet_{name}", text, value=value)
