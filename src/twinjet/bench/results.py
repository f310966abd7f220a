"""What a test gave: rates over its repetitions, for people and for files."""

import statistics
from dataclasses import dataclass

from twinjet.bench.suite import BenchTest


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition."""

    num_tokens: int
    """Of all streams."""
    device_s: float
    """Sum of its steps' times on the device."""
    wall_s: float
    """From its start to its last token on the host: steps, and what lies between them."""
    kernel_s: float | None = None
    """Of that, time in the device's kernels; None: not told."""


@dataclass(frozen=True, slots=True)
class Result:
    """A test's repetitions. Rates are means over them, `_std` the sample standard deviation, 0 for one repetition."""

    test: BenchTest
    model: str
    backend: str
    samples: tuple[Sample, ...]
    """At least one."""
    peak_bytes: int | None
    """Most resident memory of the process in this test; None where the system does not tell."""

    @property
    def stream_rates(self) -> list[float]:
        """Tokens per second of one stream, by device time, one for each repetition."""
        return [sample.num_tokens / sample.device_s / self.test.concurrency for sample in self.samples]

    @property
    def tokens_per_s(self) -> float:
        return statistics.fmean(self.stream_rates)

    @property
    def tokens_per_s_std(self) -> float:
        return _deviation(self.stream_rates)

    @property
    def ms_per_token(self) -> float:
        return 1000.0 / self.tokens_per_s

    @property
    def ms_per_token_std(self) -> float:
        return _deviation([1000.0 / rate for rate in self.stream_rates])

    @property
    def throughput(self) -> float:
        """Tokens per second of all streams, by device time."""
        return self.tokens_per_s * self.test.concurrency

    @property
    def throughput_std(self) -> float:
        return self.tokens_per_s_std * self.test.concurrency

    @property
    def wall_throughput(self) -> float:
        """Tokens per second of all streams, by the wall clock."""
        return statistics.fmean(sample.num_tokens / sample.wall_s for sample in self.samples)

    @property
    def kernel_share(self) -> float | None:
        """Part of the wall clock in which kernels ran; None: not told."""
        shares = [sample.kernel_s / sample.wall_s for sample in self.samples if sample.kernel_s is not None]
        return statistics.fmean(shares) if len(shares) == len(self.samples) else None

    @property
    def peak_mib(self) -> float | None:
        return None if self.peak_bytes is None else self.peak_bytes / (1 << 20)

    def record(self) -> dict[str, object]:
        """What goes into a file."""
        return {
            "model": self.model,
            "backend": self.backend,
            "test": self.test.name,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_std": self.tokens_per_s_std,
            "ms_per_token": self.ms_per_token,
            "concurrency": self.test.concurrency,
            "throughput_tokens_per_s": self.throughput,
            "wall_tokens_per_s": self.wall_throughput,
            "peak_mib": self.peak_mib,
            "kernel_share": self.kernel_share,
            "samples_tokens_per_s": self.stream_rates,
        }


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
