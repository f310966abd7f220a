"""Runs the tests on one engine in this process: warm-up, repetitions, peak memory.

The whole of what an engine process does is measured, sampling included; there is no wire and no text. Sequences are
random tokens, drawn anew for each repetition; none ends before its length. Tests take turns, one repetition each, so
that what disturbs the machine for a while meets all alike, and they can be compared.
"""

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from twinjet.bench.memory import peak_bytes, reset_peak
from twinjet.bench.results import Result, Sample
from twinjet.bench.rig import Rig
from twinjet.bench.suite import BenchTest
from twinjet.core.config import EngineConfig
from twinjet.core.types import SamplingParams
from twinjet.scheduler.sequence import SequenceSpec
from twinjet.wire.launch import DEFAULT_FACTORY
from twinjet.worker import garbage
from twinjet.worker.device_thread import LoadEngine
from twinjet.worker.process import SWITCH_INTERVAL_S, limit_threads
from twinjet.worker.start import load_engine

StartProgress = Callable[[str, int, int], None]
"""(stage, done, total), as weights are loaded and programs compiled."""
TestProgress = Callable[[int, int, BenchTest], None]
"""(repetitions done, of how many, test), before each repetition with what comes, and at the end."""


def bench_model(
    name: str,
    config: EngineConfig,
    tests: Sequence[BenchTest],
    *,
    repetitions: int,
    max_time_s: float,
    on_start: StartProgress,
    on_test: TestProgress,
) -> list[Result]:
    """Load the model into this process, and run all tests. JAX must not have been loaded yet.

    Raises: CheckpointError, ConfigError, EngineDead, StepFailed.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    limit_threads(config)
    bench = Bench(name, config, partial(load_engine, DEFAULT_FACTORY, config))
    return bench.run(tests, repetitions, max_time_s, on_start, on_test)


class Bench:
    """Tests on an engine that is loaded for them."""

    def __init__(self, name: str, config: EngineConfig, load: LoadEngine) -> None:
        """`name`: the model's, for the results. The prefix cache stays off, whatever `config` says."""
        self._name = name
        self._rig = Rig(replace(config, cache=replace(config.cache, prefix_cache=False)), load)
        self._rng = random.Random(0)
        self._num_sequences = 0
        self._vocab_size = 0

    def run(
        self,
        tests: Sequence[BenchTest],
        repetitions: int,
        max_time_s: float,
        on_start: StartProgress,
        on_test: TestProgress,
    ) -> list[Result]:
        """Each test up to `repetitions` times; no further one of a test begins once it has taken `max_time_s`.

        To be called once. Raises: as `bench_model`.
        """
        try:
            engine = self._rig.start(on_start)
            self._vocab_size = engine.vocab_size
            runs = [_Repetitions(test) for test in tests]
            with _quiet_interpreter():
                for number in range(repetitions):
                    for index, run in enumerate(runs):
                        if run.taken_s < max_time_s or not run.samples:
                            on_test(number * len(runs) + index, repetitions * len(runs), run.test)
                            self._measure(run)
            on_test(repetitions * len(runs), repetitions * len(runs), tests[-1])
            return [
                Result(run.test, self._name, engine.backend, tuple(run.samples), run.peak_bytes or None) for run in runs
            ]
        finally:
            self._rig.close()

    def _measure(self, run: "_Repetitions") -> None:
        """One repetition more, behind a short one that does not count."""
        self._repeat(run.test.warm_up())
        garbage.collect_all()
        tells = reset_peak()
        sample = self._repeat(run.test)
        run.samples.append(sample)
        run.taken_s += sample.wall_s
        if tells:
            run.peak_bytes = max(run.peak_bytes, peak_bytes() or 0)

    def _repeat(self, test: BenchTest) -> Sample:
        timing = self._rig.run([self._sequence(test) for _ in range(test.concurrency)])
        phase = timing.prefill if test.kind == "pp" else timing.decode
        if phase.num_rows != test.total_tokens:
            raise RuntimeError(f"{test} computed {phase.num_rows} tokens in its time, not {test.total_tokens}")
        return Sample(phase.num_rows, phase.device_s, phase.wall_s, phase.kernel_s)

    def _sequence(self, test: BenchTest) -> SequenceSpec:
        """Without stop tokens, so that it runs to its length; sampled as a request that says nothing of sampling."""
        self._num_sequences += 1
        return SequenceSpec(
            sequence_id=self._num_sequences,
            token_ids=tuple(self._rng.choices(range(self._vocab_size), k=test.prompt_tokens)),
            max_new_tokens=test.new_tokens,
            sampling=SamplingParams(seed=self._num_sequences),
        )


@dataclass(slots=True)
class _Repetitions:
    """Of one test, so far."""

    test: BenchTest
    samples: list[Sample] = field(default_factory=list)
    taken_s: float = 0.0
    peak_bytes: int = 0
    """0 where the system does not tell."""


@contextmanager
def _quiet_interpreter() -> Iterator[None]:
    """Threads switch, and garbage is collected, as in an engine process: soon, and between runs."""
    interval_s, collecting = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    garbage.settle()
    try:
        yield
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
        sys.setswitchinterval(interval_s)
