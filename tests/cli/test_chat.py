"""A conversation: its commands with a made-up model, and the whole through a pipe and a terminal."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import COMMAND, ONE_ROW, TIMEOUT_S, environment, twinjet
from twinjet.api import Delta
from twinjet.cli.chat import Conversation
from twinjet.core.errors import ContextTooLong
from twinjet.core.types import SamplingParams

ON_TERMINAL = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)
for descriptor in range(3):
    os.dup2(terminal, descriptor)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs a command with its standard streams on the terminal that is named first."""


class Parrot:
    """Answers with what it was last told; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[dict[str, str]], SamplingParams]] = []
        self.raises: BaseException | None = None

    def stream_chat(self, messages: list[dict[str, str]], sampling: SamplingParams, **_: object) -> Iterator[Delta]:
        self.asked.append((list(messages), sampling))
        yield Delta("you said ", (1,))
        if self.raises is not None:
            raise self.raises
        yield Delta(messages[-1]["content"], (2,), finish_reason="stop")


def converse(parrot: Any, monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> Conversation:
    """Hold a conversation in which a person types `lines`, or hits the keys that raise these."""
    typed = iter(lines)

    def read(_: str) -> str:
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    conversation = Conversation(parrot, SamplingParams(), None, None)
    conversation.hold()
    return conversation


def test_the_history_is_kept_and_cleared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    parrot = Parrot()
    converse(parrot, monkeypatch, "one", "", "two", "/clear", "three")
    assert [[message["content"] for message in messages] for messages, _ in parrot.asked] == [
        ["one"],
        ["one", "you said one", "two"],
        ["three"],
    ]
    assert [message["role"] for message in parrot.asked[1][0]] == ["user", "assistant", "user"]
    assert capsys.readouterr().out == "you said one\nyou said two\ncleared\nyou said three\n"


def test_the_system_message_comes_first_and_outlives_a_clear(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    parrot = Parrot()
    converse(parrot, monkeypatch, "/system", "/system Be brief.", "one", "/clear", "two")
    for messages, _ in parrot.asked:
        assert messages[0] == {"role": "system", "content": "Be brief."}
        assert len(messages) == 2
    assert capsys.readouterr().out.startswith("system: (none)\nsystem: Be brief.\n")


def test_the_temperature_is_set_and_checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    parrot = Parrot()
    converse(parrot, monkeypatch, "/temperature 0.5", "one", "/temperature hot", "/temperature -1", "two")
    assert [sampling.temperature for _, sampling in parrot.asked] == [0.5, 0.5]
    said = capsys.readouterr().out
    assert "temperature: 0.5" in said
    assert "expected a number, got 'hot'" in said
    assert "temperature must be" in said


def test_help_exit_and_what_is_no_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    parrot = Parrot()
    converse(parrot, monkeypatch, "/help", "/frobnicate", "/exit", "never sent")
    said = capsys.readouterr().out
    for command in ("/help", "/system", "/clear", "/temperature", "/exit"):
        assert command in said
    assert "unknown command /frobnicate" in said
    assert parrot.asked == []


def test_ctrl_c_stops_the_answer_and_not_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    parrot = Parrot()
    parrot.raises = KeyboardInterrupt()
    conversation = converse(parrot, monkeypatch, "one", KeyboardInterrupt, "/temperature")
    assert [message["content"] for message in conversation.messages] == ["one", "you said "]
    said = capsys.readouterr().out
    assert "[stopped]" in said
    assert said.endswith("temperature: 1\n")


def test_a_full_context_is_said_and_the_message_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    parrot = Parrot()
    parrot.raises = ContextTooLong("too long")
    conversation = converse(parrot, monkeypatch, "one")
    assert conversation.messages == []
    assert "too long\n/clear begins anew" in capsys.readouterr().err


def test_a_scripted_conversation_through_a_pipe(home: Path, tiny: str):
    script = "/system Be brief.\nHello\n/temperature 0\nworld\n"
    done = twinjet(home, "chat", tiny, "--max-tokens", "8", "--seed", "1", *ONE_ROW, stdin=script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("system: Be brief.\n")
    assert "\ntemperature: 0\n" in done.stdout
    assert "> " not in done.stdout.splitlines()[0]
    assert "Traceback" not in done.stderr


def test_a_conversation_on_a_terminal(home: Path, tiny: str):
    ours, theirs = pty.openpty()
    command = (
        sys.executable,
        "-c",
        ON_TERMINAL,
        os.ttyname(theirs),
        *COMMAND,
        "chat",
        tiny,
        "--max-tokens",
        "8",
        *ONE_ROW,
    )
    # A session of its own gets the terminal it opens first, so that Ctrl-C typed into it becomes a signal.
    process = subprocess.Popen(command, env={**environment(home), "TERM": "xterm"}, start_new_session=True)
    seen = b""

    def until(needle: bytes, press: bytes = b"") -> None:
        """Reads up to `needle`; types `press` first, and again as long as nothing comes of it."""
        nonlocal seen
        deadline_s = time.monotonic() + TIMEOUT_S
        os.write(ours, press)
        while needle not in seen:
            assert time.monotonic() < deadline_s, seen
            if select.select([ours], [], [], 1.0)[0]:
                seen += os.read(ours, 4096)
            else:
                os.write(ours, press)
        seen = seen.partition(needle)[2]

    try:
        until(b"> ")
        # Ctrl-C at the prompt: a new prompt. Python's readline misses one that comes just after it has written it.
        until(b"> ", press=b"\x03")
        os.write(ours, b"/temperature 0\n")
        until(b"temperature: 0")
        until(b"> ")
        os.write(ours, b"Hello\n")
        until(b"Hello")
        until(b"> ")
        os.write(ours, b"\x04")  # Ctrl-D
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)
