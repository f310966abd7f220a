"""A tokenizer of bytes, a chat template of one line, and an orchestrator that says what its script says."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from tests.fakes import blank_stats
from twinjet.core.errors import Overloaded
from twinjet.core.types import EngineInfo, Request, TokenEvent, TokenLogprobs
from twinjet.orchestrator.interface import EngineStatus, Health, OrchestratorStats
from twinjet.server.service import ServedModel
from twinjet.text.template import ChatTemplate
from twinjet.text.tokenizer import Tokenizer
from twinjet.wire.messages import DURATION_BOUNDS_S, Durations

BOS, EOS, TURN = 256, 257, 258
SPECIALS = {BOS: "<s>", EOS: "</s>", TURN: "<turn>"}
WORDS = {259: b"lo wo", 260: "é€".encode(), 261: "😀".encode()[:2], 262: "😀".encode()[2:]}
"""Tokens of several bytes; the last two are halves of one character."""
VOCAB_SIZE = 263
CONTEXT = 200
MAX_STREAMS = 8


class ByteTokenizer:
    """An id under 256 is that byte. Encodes to bytes and special tokens only."""

    vocab_size = VOCAB_SIZE
    bos_id = BOS
    end_ids = (EOS,)
    add_bos = True

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        ids = [BOS] if add_special else []
        while text:
            for token, name in SPECIALS.items():
                if parse_special and text.startswith(name):
                    ids.append(token)
                    text = text[len(name) :]
                    break
            else:
                ids += text[0].encode()
                text = text[1:]
        return ids

    def token_bytes(self, token: int) -> bytes:
        return SPECIALS[token].encode() if token in SPECIALS else WORDS.get(token) or bytes([token])

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def is_special(self, token: int) -> bool:
        return token in SPECIALS

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return b"".join(self.token_bytes(t) for t in ids if not (skip_special and t in SPECIALS)).decode(
            errors="replace"
        )


class LineTemplate:
    """`<turn>role:content` for each message, then `<turn>assistant:`."""

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        text = "".join(f"<turn>{m['role']}:{m['content']}" for m in messages)
        return text + ("<turn>assistant:" if add_generation_prompt else "")


Script = Callable[[Request], list[int]]


def say(text: str, *, end: bool = True) -> list[int]:
    """Ids of a reply, with EOS at its end."""
    return [*ByteTokenizer().encode(text), *([EOS] if end else [])]


def default_script(request: Request) -> list[int]:
    """Whole and split characters, another letter for each choice."""
    return [*b"Hel", 259, *b"rld ", 260, 261, 262, ord("A") + request.sampling.choice, EOS]


class FakeOrchestrator:
    """Runs scripts, one token at a time, as an orchestrator would: stop ids, `max_tokens`, abort.

    Attributes are for tests to set before a request and to read after it.
    """

    def __init__(self, script: Script = default_script) -> None:
        self.script = script
        self.started = True
        self.draining = False
        self.step_s = 0.0
        self.max_requests = 1000
        self.fail_at: int | None = None
        """End with an error before the token of this number."""
        self.hang_at: int | None = None
        """Never send the token of this number."""
        self.broken: Exception | None = None
        """What the iterator raises at once: a bug."""
        self.merge = False
        """Send everything in one event, as for a reader that is behind."""
        self.num_cached: Callable[[Request], int] = lambda request: 0
        """Tokens of a prompt that the prefix cache had."""
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.running: dict[str, asyncio.Event] = {}

    @property
    def info(self) -> EngineInfo:
        if not self.started:
            raise Overloaded("starting")
        return EngineInfo(
            engine_id=0,
            incarnation=0,
            pid=1,
            vocab_size=VOCAB_SIZE,
            context=CONTEXT,
            max_streams=MAX_STREAMS,
            num_pages=20,
            page_size=16,
            token_budget=64,
            backend="fake",
            kv_dtype="float32",
            warmup_s=0.0,
        )

    def submit(self, request: Request) -> AsyncIterator[TokenEvent]:
        if not self.started or self.draining or len(self.running) >= self.max_requests:
            raise Overloaded("too many requests wait; send it again later", retry_after_s=3.0)
        if request.request_id in self.running:
            raise AssertionError("a request id was used twice")
        self.submitted.append(request)
        self.running[request.request_id] = asyncio.Event()
        return self._events(request, self.running[request.request_id])

    async def _events(self, request: Request, aborted: asyncio.Event) -> AsyncIterator[TokenEvent]:
        events: list[TokenEvent] = []
        try:
            if self.broken is not None:
                raise self.broken
            async for event in self._steps(request, aborted):
                if self.merge:
                    events.append(event)
                else:
                    yield event
            if events:
                yield TokenEvent(
                    sum((e.token_ids for e in events), ()),
                    None if request.num_logprobs is None else sum((e.logprobs or () for e in events), ()),
                    events[-1].finish_reason,
                    events[0].num_cached,
                    events[-1].error,
                )
        finally:
            self.running.pop(request.request_id, None)

    async def _steps(self, request: Request, aborted: asyncio.Event) -> AsyncIterator[TokenEvent]:
        reply = self.script(request)
        for at in range(request.max_tokens):
            await self._wait(aborted, None if at == self.hang_at else self.step_s)
            if aborted.is_set():
                yield TokenEvent(finish_reason="cancelled")
                return
            if at == self.fail_at:
                yield TokenEvent(finish_reason="error", error="Traceback in /secret/path.py")
                return
            token = reply[at] if at < len(reply) else ord(".")
            finish = "stop" if token in request.stop_token_ids else "length" if at + 1 == request.max_tokens else None
            num_cached = self.num_cached(request) if at == 0 else 0
            yield TokenEvent(
                (token,), self._logprobs(token, request.num_logprobs), finish, num_cached, computed_s=time.monotonic()
            )
            if finish:
                return

    async def _wait(self, aborted: asyncio.Event, seconds: float | None) -> None:
        if seconds == 0.0:
            await asyncio.sleep(0)
            return
        try:
            await asyncio.wait_for(aborted.wait(), seconds)
        except TimeoutError:
            return

    def _logprobs(self, token: int, number: int | None) -> tuple[TokenLogprobs, ...] | None:
        if number is None:
            return None
        others = tuple((token + step) % VOCAB_SIZE for step in range(1, number + 1))
        worst = tuple(float("-inf") if step == 20 else -0.5 - step for step in range(1, number + 1))
        return (TokenLogprobs(-0.25, others, worst),)

    def abort(self, request_id: str) -> None:
        if request_id in self.running:
            self.aborted.append(request_id)
            self.running.pop(request_id).set()

    async def drain(self, timeout_s: float) -> bool:
        self.draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.running:
            if asyncio.get_running_loop().time() >= deadline:
                for request_id in list(self.running):
                    self.abort(request_id)
                return False
            await asyncio.sleep(0.01)
        return True

    async def stop(self) -> None:
        await self.drain(0.0)

    def stats(self) -> OrchestratorStats:
        stats = blank_stats(
            num_running=len(self.running),
            num_waiting=2,
            pages_used=5,
            waiting_tokens=7,
            steps_total=11,
            rows_total=13,
            padding_rows_total=17,
            wasted_rows_total=19,
            preemptions_total=23,
            pages_cached=6,
            prefix_queries_total=43,
            prefix_hits_total=47,
            prefix_evictions_total=53,
            num_skipped=1,
            cost_drift=1.5,
            busy_s_total=1.5,
            predicted_s_total=1.25,
            stall_bound_violations_total=59,
            step_durations=Durations([1, 0, 2, *[0] * (len(DURATION_BOUNDS_S) - 2)], 1.5),
            gap_durations=Durations([0, 1, *[0] * (len(DURATION_BOUNDS_S) - 2), 1], 0.5),
        )
        engine = EngineStatus(0, "both", "ready", 1, 0, 3, stats if self.started else None)
        return OrchestratorStats((engine,), len(self.running), 29, 31, 37, {"stale_messages_total": 41.0})

    def health(self) -> Health:
        return Health(True, "ok") if self.started else Health(False, "starting")


def fake_service(orchestrator: FakeOrchestrator, *, chat: bool = True) -> ServedModel:
    """A model named "fake"."""
    return ServedModel(
        name="fake",
        tokenizer=cast(Tokenizer, ByteTokenizer()),
        template=cast(ChatTemplate, LineTemplate()) if chat else None,
        orchestrator=orchestrator,
        created=1_700_000_000,
    )
