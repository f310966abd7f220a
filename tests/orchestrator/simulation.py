"""Engines without processes: they answer the dispatcher's messages when a test says so, in any order."""

import struct
from dataclasses import dataclass, field

from tests.fakes import FAKE_VOCAB, expected_tokens
from twinjet.core.types import Request, SamplingParams
from twinjet.orchestrator.dispatch import Dispatcher
from twinjet.orchestrator.journal import ReplayLimits
from twinjet.orchestrator.pools import Engine, EnginePool
from twinjet.wire.messages import (
    Abort,
    PagesExported,
    PagesHandle,
    PagesImported,
    Ready,
    ReleasePages,
    SequenceEnded,
    StepTokens,
    Submit,
    ToEngine,
)

READY = Ready(
    pid=1,
    vocab_size=FAKE_VOCAB,
    context=1000,
    max_streams=4,
    num_pages=64,
    page_size=16,
    token_budget=64,
    backend="simulated",
    kv_dtype="float32",
    warmup_s=0.0,
)


def request(request_id: str, prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 4, **fields) -> Request:
    return Request(request_id, prompt, max_tokens, SamplingParams(temperature=0.0), **fields)


def known_tokens(submit: Submit) -> list[int]:
    return [token for (token,) in struct.iter_unpack("<i", submit.token_ids)]


@dataclass
class Simulated:
    """What one engine process holds: its sequences and the segments it has exported."""

    sequences: dict[int, Submit] = field(default_factory=dict)
    generated: dict[int, int] = field(default_factory=dict)
    segments: set[str] = field(default_factory=set)
    sent: list[ToEngine] = field(default_factory=list)


class Simulation:
    """A dispatcher over simulated engines."""

    def __init__(self, roles: tuple[str, ...], limits: ReplayLimits | None = None) -> None:
        self.pool = EnginePool(roles)
        self.engines = [Simulated() for _ in roles]
        self.dispatcher = Dispatcher(self.pool, self._send, limits)
        self._num_segments = 0
        for engine_id in range(len(roles)):
            self.revive(engine_id)

    def _send(self, engine: Engine, message: ToEngine) -> None:
        assert engine.listening, f"{message} was sent to an engine that is not there"
        simulated = self.engines[engine.engine_id]
        simulated.sent.append(message)
        match message:
            case Submit():
                assert message.sequence_id not in simulated.sequences
                assert message.max_new_tokens >= 1
                simulated.sequences[message.sequence_id] = message
                simulated.generated[message.sequence_id] = 0
            case Abort(sequence_id):
                simulated.sequences.pop(sequence_id, None)
            case ReleasePages(name):
                simulated.segments.remove(name)

    def revive(self, engine_id: int) -> None:
        engine = self.pool[engine_id]
        engine.incarnation += 1
        engine.begin(pid=1)
        engine.become_ready(READY)
        self.dispatcher.engine_ready()

    def kill(self, engine_id: int) -> None:
        self.engines[engine_id] = Simulated()
        engine = self.pool[engine_id]
        engine.lose("killed")
        self.dispatcher.engine_lost(engine, "killed")

    def importing(self, engine_id: int, sequence_id: int) -> bool:
        """Whether the sequence has not yet told what became of its pages."""
        simulated = self.engines[engine_id]
        return bool(simulated.sequences[sequence_id].pages) and simulated.generated[sequence_id] == 0

    def step(self, engine_id: int, sequence_ids: list[int] | None = None) -> None:
        """One token for each of these sequences, or for all; then what follows from it."""
        simulated = self.engines[engine_id]
        if sequence_ids is None:
            sequence_ids = list(simulated.sequences)
        for sequence_id in sequence_ids:
            if self.importing(engine_id, sequence_id):
                self._import(engine_id, sequence_id)
        tokens, finishes = [], []
        for sequence_id in sequence_ids:
            submit = simulated.sequences[sequence_id]
            done = simulated.generated[sequence_id] = simulated.generated[sequence_id] + 1
            tokens.append(expected_tokens(known_tokens(submit), done)[-1])
            finishes.append(_finish(submit, tokens[-1], done))
        over = {s: simulated.sequences[s] for s, f in zip(sequence_ids, finishes, strict=True) if f}
        for sequence_id in over:
            del simulated.sequences[sequence_id]
        engine = self.pool[engine_id]
        self.dispatcher.step_tokens(engine, StepTokens(1, sequence_ids, tokens, finishes))
        for sequence_id, finish in zip(sequence_ids, finishes, strict=True):
            if finish == "exported":
                self._export(engine_id, sequence_id, len(known_tokens(over[sequence_id])))

    def _export(self, engine_id: int, sequence_id: int, num_tokens: int) -> None:
        self._num_segments += 1
        name = f"segment-{self._num_segments}"
        self.engines[engine_id].segments.add(name)
        handle = PagesHandle(name, 0, (1, 2, num_tokens, 1, 1), "float32", 0)
        self.dispatcher.pages_exported(self.pool[engine_id], PagesExported(sequence_id, [handle]))

    def _import(self, engine_id: int, sequence_id: int) -> None:
        names = {handle.name for handle in self.engines[engine_id].sequences[sequence_id].pages}
        found = set().union(*(engine.segments for engine in self.engines))
        self.dispatcher.pages_imported(self.pool[engine_id], PagesImported(sequence_id, ok=names <= found))

    def fail(self, engine_id: int, sequence_id: int, reason, text: str = "") -> None:
        self.engines[engine_id].sequences.pop(sequence_id, None)
        self.dispatcher.sequence_ended(self.pool[engine_id], SequenceEnded(sequence_id, reason, text))


def _finish(submit: Submit, token: int, num_generated: int):
    if token in submit.stop_token_ids:
        return "stop"
    if num_generated == submit.max_new_tokens:
        return "length"
    return "exported" if submit.export_pages else ""
