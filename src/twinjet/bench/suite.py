"""Which tests a benchmark has, and what they need of an engine. Pure arithmetic; knows no engine.

`pp N`, prompt processing: `concurrency` prompts of N tokens come at once, until all have their first token.
`tg N`, text generation: `concurrency` sequences decode N tokens each, behind a prompt of one token that is not counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from twinjet.core.config import EngineConfig
from twinjet.core.errors import ConfigError

PROMPT_TOKENS = (16, 64, 128, 512, 2048)
GENERATED_TOKENS = (128,)
CONCURRENCY = (1, 2, 4, 8, 16)
WARM_UP_ROWS = 64
"""Prompt tokens, of all prompts together, that are computed uncounted before each repetition of a `pp` test."""
WARM_UP_STEPS = 4
"""Decode steps that are not counted before each repetition of a `tg` test."""
PAGES_TO_BE_ADMITTED = 2
"""A stream that begins needs a page, and the scheduler admits it only with another one to spare."""

Kind = Literal["pp", "tg"]


@dataclass(frozen=True, slots=True)
class BenchTest:
    """One row of the table."""

    kind: Kind
    num_tokens: int
    """Of each stream, at least 1."""
    concurrency: int
    """Streams at once, at least 1."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.num_tokens}"

    @property
    def total_tokens(self) -> int:
        """Of all streams together: the rows that are timed."""
        return self.num_tokens * self.concurrency

    @property
    def prompt_tokens(self) -> int:
        return self.num_tokens if self.kind == "pp" else 1

    @property
    def new_tokens(self) -> int:
        """To generate; the first one comes from the prompt, so N decode steps give N + 1."""
        return 1 if self.kind == "pp" else self.num_tokens + 1

    @property
    def context(self) -> int:
        """Tokens of one sequence, prompt and generated."""
        return self.prompt_tokens + self.new_tokens

    def warm_up(self) -> "BenchTest":
        """The same in small."""
        most = max(1, WARM_UP_ROWS // self.concurrency) if self.kind == "pp" else WARM_UP_STEPS
        return BenchTest(self.kind, min(self.num_tokens, most), self.concurrency)


def choose_tests(prompts: Iterable[int], generated: Iterable[int], concurrency: Iterable[int]) -> tuple[BenchTest, ...]:
    """Every length at every concurrency, each once; prompts first.

    Raises: ConfigError, if that is nothing.
    """
    streams = tuple(dict.fromkeys(concurrency))
    kinds: tuple[tuple[Kind, Iterable[int]], ...] = (("pp", prompts), ("tg", generated))
    tests = tuple(BenchTest(kind, n, c) for kind, lengths in kinds for n in dict.fromkeys(lengths) for c in streams)
    if not tests:
        raise ConfigError("there is nothing to measure; give lengths with -p or -g, and streams with -c")
    return tests


def check_room(tests: Iterable[BenchTest], config: EngineConfig) -> None:
    """All streams that decode must be able to run at once, or it would not be decoding that is measured.

    Prompts need not: each leaves its pages when it is done, and those of one length run one after the other.

    Raises: ConfigError.
    """
    page_size = config.cache.page_size
    pool = config.cache.num_pages * page_size
    for test in tests:
        pages = max(PAGES_TO_BE_ADMITTED, -(-test.context // page_size))
        needed = test.concurrency * pages * page_size
        if test.kind == "tg" and needed > pool:
            raise ConfigError(
                f"{test.name} of {test.concurrency} streams needs a KV pool of {needed} tokens, and it holds {pool}; "
                "raise --kv-memory, or lower -g or -c"
            )
