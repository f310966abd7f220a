"""One engine under the conditions that its forecast assumes, as its clients see it."""

import asyncio
import itertools
import random
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from benchmarks.foretold.figures import DECODE, PREFILL, itl_name, ttft_name
from twinjet import AsyncLLM
from twinjet.core.types import EngineInfo, Forecast
from twinjet.options import EngineOptions
from twinjet.scheduler.pace import BUSY_TOKENS

WINDOW_TOKENS = 24
"""Gaps of each stream, at least, in a repetition without prompts."""

LEAD_TOKENS = 8
"""More tokens of each, as not all streams begin in one step."""

PAUSE_S = (0.05, 0.15)
"""Limits of a random pause before a prompt, so that it comes at any moment of a step."""

SETTLE_S = 0.8
"""After streams: the engine ends what it has planned for them, and half a second later tidies up, which takes tens of
milliseconds beside whatever comes just then."""


@dataclass
class Stream:
    """When each token of a sequence came, in seconds of the monotonic clock."""

    began_s: float = field(default_factory=time.monotonic)
    tokens_s: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.tokens_s[0] - self.began_s)

    def gaps_ms(self, first_s: float, last_s: float) -> list[float]:
        """Between the tokens that came within [first_s, last_s]."""
        within = [at_s for at_s in self.tokens_s if first_s <= at_s <= last_s]
        return [1e3 * (b - a) for a, b in itertools.pairwise(within)]


class ForetoldEngine:
    """An engine whose forecast is being measured."""

    def __init__(self, llm: AsyncLLM, info: EngineInfo, told: Forecast) -> None:
        self._llm, self._info, self._told = llm, info, told
        self._rng = random.Random(0)
        self._stream_tokens = min(BUSY_TOKENS, info.context // 2)
        self._company = [self._random(self._stream_tokens) for _ in range(info.max_streams)]
        self.values: dict[str, list[float]] = defaultdict(list)
        """Measurements by the names of their predictions, in milliseconds or tokens per second."""
        self.stalls_ms: list[float] = []
        """All gaps of streams between a prompt's arrival and its first token."""

    async def warm(self) -> None:
        """Put what streams begin with into the prefix cache: they are company, and not measured themselves."""
        await asyncio.gather(*(self._run(prompt, 1, Stream()) for prompt in self._company))
        await asyncio.sleep(SETTLE_S)

    async def repeat(self) -> None:
        """Measure everything once."""
        best_tokens, _ = min(self._told.ttft_ms, key=lambda pair: pair[1] / pair[0])
        for num_tokens, _ in self._told.ttft_ms:
            prompt = await self._first_token(num_tokens)
            self.values[ttft_name(num_tokens, 0)].append(prompt.ttft_ms)
            if num_tokens == best_tokens:
                self.values[PREFILL].append(1e3 * num_tokens / prompt.ttft_ms)
        for num_streams, _ in self._told.itl_ms:
            await self._decode(num_streams)
        await self._beside_streams()

    async def _decode(self, num_streams: int) -> None:
        """Streams without prompts, from when the last has begun to when the first ends."""
        prompts, max_tokens = self._begun(num_streams, WINDOW_TOKENS), WINDOW_TOKENS + LEAD_TOKENS
        streams = [Stream() for _ in prompts]
        await asyncio.gather(*(self._run(p, max_tokens, s) for p, s in zip(prompts, streams, strict=True)))
        window_s = max(s.tokens_s[0] for s in streams), min(s.tokens_s[-1] for s in streams)
        gaps_ms = [stream.gaps_ms(*window_s) for stream in streams]
        self.values[itl_name(num_streams)] += itertools.chain(*gaps_ms)
        if num_streams == self._told.itl_ms[-1][0]:
            # From each stream's own first token to its last: a count between two times would cut steps in two.
            self.values[DECODE].append(sum(1e3 * len(each_ms) / sum(each_ms) for each_ms in gaps_ms))

    async def _beside_streams(self) -> None:
        """One prompt after the other beside streams."""
        told, depth = self._told, EngineOptions().pipeline_depth
        longest, _ = told.busy_ttft_ms[-1]
        num_steps = sum(ms for _, ms in told.busy_ttft_ms) / told.busy_itl_ms
        async with self._decoding(self._begun(told.busy_streams, round(num_steps))) as streams:
            for num_tokens, _ in told.busy_ttft_ms:
                await asyncio.sleep(self._rng.uniform(*PAUSE_S))
                prompt = await self._first_token(num_tokens)
                self.values[ttft_name(num_tokens, told.busy_streams)].append(prompt.ttft_ms)
                for stream in streams:
                    gaps_ms = stream.gaps_ms(prompt.began_s, prompt.tokens_s[0])
                    self.stalls_ms += gaps_ms
                    if num_tokens == longest:
                        # The first steps were planned before the prompt came; the last computes what is left of it.
                        self.values[itl_name(told.busy_streams, beside_prompt=True)] += gaps_ms[depth:-1]

    @asynccontextmanager
    async def _decoding(self, prompts: Sequence[list[int]]) -> AsyncGenerator[list[Stream], None]:
        """Streams that have all begun, and are left at the end."""
        streams = [Stream() for _ in prompts]
        room = self._info.context - len(prompts[0])
        tasks = [asyncio.create_task(self._run(p, room, s)) for p, s in zip(prompts, streams, strict=True)]

        def check() -> None:
            if any(task.done() for task in tasks):
                raise RuntimeError("expected streams to go on until they are left, but one has ended")

        try:
            while not all(stream.tokens_s for stream in streams):
                check()
                await asyncio.sleep(0.01)
            yield streams
            check()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(SETTLE_S)

    def _begun(self, num_streams: int, num_steps: int) -> list[list[int]]:
        """Prompts of streams that have as many tokens as forecasts assume half way through so many steps.

        Whole pages and a token: pages are cached, so a stream begins with one row.
        """
        page_size = self._info.page_size
        num_pages = max(0, round((self._stream_tokens - num_steps / 2 - 1) / page_size))
        length = min(num_pages * page_size, self._stream_tokens - 1) + 1
        return [prompt[:length] for prompt in self._company[:num_streams]]

    async def _first_token(self, num_tokens: int) -> Stream:
        """A prompt that nobody sent before, up to its first token."""
        prompt = self._random(num_tokens)
        stream = Stream()
        await self._run(prompt, 1, stream)
        return stream

    async def _run(self, prompt: list[int], max_tokens: int, stream: Stream) -> None:
        async with aclosing(self._llm.stream(prompt, max_tokens=max_tokens, ignore_eos=True)) as deltas:
            async for delta in deltas:
                stream.tokens_s += [time.monotonic()] * len(delta.token_ids)

    def _random(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(100, self._info.vocab_size) for _ in range(num_tokens)]
