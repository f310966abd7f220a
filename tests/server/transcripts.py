"""Requests whose streams are kept word for word in golden/. `python -m tests.server.transcripts` writes them anew."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server.fakes import FakeOrchestrator, default_script, say
from tests.server.live import LiveServer, live_server

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True, slots=True)
class Transcript:
    """One request and how its orchestrator is set up."""

    path: str
    body: dict[str, Any]
    prepare: Callable[[FakeOrchestrator], None] = lambda _: None


def _fails(orchestrator: FakeOrchestrator) -> None:
    orchestrator.fail_at = 2


def _stops(orchestrator: FakeOrchestrator) -> None:
    orchestrator.script = lambda _: say("one STtwo STOP three")


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": True}
ABC = {"model": "fake", "prompt": "abc", "max_tokens": 20, "stream": True}

TRANSCRIPTS = {
    "completion": Transcript(COMPLETIONS, ABC),
    "completion_ids_usage": Transcript(
        COMPLETIONS, {**ABC, "return_token_ids": True, "stream_options": {"include_usage": True}}
    ),
    "completion_two_prompts": Transcript(
        COMPLETIONS, {**ABC, "prompt": ["a", "bc"], "max_tokens": 2, "return_token_ids": True}
    ),
    "completion_logprobs": Transcript(COMPLETIONS, {**ABC, "logprobs": 1}),
    "completion_stop": Transcript(COMPLETIONS, {**ABC, "stop": ["STOP"], "return_token_ids": True}, _stops),
    "completion_error": Transcript(COMPLETIONS, {**ABC, "stream_options": {"include_usage": True}}, _fails),
    "chat": Transcript(CHAT, HI),
    "chat_ids_usage_two": Transcript(
        CHAT, {**HI, "n": 2, "max_tokens": 3, "return_token_ids": True, "stream_options": {"include_usage": True}}
    ),
    "chat_logprobs": Transcript(CHAT, {**HI, "logprobs": True, "top_logprobs": 1, "max_tokens": 12}),
    "chat_length": Transcript(CHAT, {**HI, "max_completion_tokens": 11}),
    "chat_stop": Transcript(CHAT, {**HI, "stop": " STOP"}, _stops),
    "chat_error": Transcript(CHAT, {**HI, "n": 2}, _fails),
}


def record(server: LiveServer, transcript: Transcript) -> str:
    """The stream as text, with what differs from run to run replaced."""
    server.orchestrator.script, server.orchestrator.fail_at = default_script, None
    transcript.prepare(server.orchestrator)
    answer = server.http.post(transcript.path, json=transcript.body)
    assert answer.status_code == 200, answer.text
    text = re.sub(r'"id":"(cmpl|chatcmpl)-[0-9a-f]{24}"', r'"id":"\1-ID"', answer.text)
    text = re.sub(r'"created":\d{10}', '"created":TIME', text)
    return re.sub(r'"system_fingerprint":"twinjet-[^"-]+-', '"system_fingerprint":"twinjet-VERSION-', text)


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    with live_server() as server:
        for name, transcript in TRANSCRIPTS.items():
            text = record(server, transcript)
            (GOLDEN / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
