"""The commands that need no engine, or one for a single answer."""

import re
import sys
from pathlib import Path

import httpx
import pytest

import twinjet as package
from tests.cli.command import ONE_ROW, assert_one_clear_line, twinjet
from tests.cli.conftest import Served
from tests.tiny_models import bpe_vocab, write_tiny_llama

COMMANDS = ("serve", "run", "chat", "bench", "pull", "models", "doctor")


def test_help_lists_the_commands(home: Path):
    shown = twinjet(home, "--help")
    assert shown.returncode == 0
    assert re.findall(r"^  (\w+) ", shown.stdout.partition("Commands:")[2], re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(home: Path, command: str):
    shown = twinjet(home, command, "-h")
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"Usage: python -m twinjet {command}") or f" {command} " in shown.stdout


def test_version(home: Path):
    assert twinjet(home, "--version").stdout == f"twinjet {package.__version__}\n"


def test_an_unknown_command_is_a_usage_error(home: Path):
    done = twinjet(home, "frobnicate")
    assert done.returncode == 2
    assert "frobnicate" in done.stderr


def test_models_is_plain_off_a_terminal(home: Path):
    shown = twinjet(home, "models")
    assert shown.returncode == 0
    header, *rows = shown.stdout.splitlines()
    assert header.split() == ["model", "here", "size", "family", "weights", "licence"]
    assert [row.split()[:2] for row in rows] == [["smollm2", "no"], ["gemma3-270m", "no"]]
    assert shown.stdout.isascii()


def test_pull_of_a_file_says_where_it_is(home: Path, tiny: str):
    assert twinjet(home, "pull", tiny).stdout == f"tiny: {tiny}\n"


def test_doctor_says_what_there_is(home: Path):
    shown = twinjet(home, "doctor")
    assert shown.returncode == 0, shown.stderr
    facts = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in shown.stdout.splitlines() if line[:2] == "  ")
    assert re.fullmatch(r"\d+ physical, \d+ logical usable", facts["cores"])
    assert facts["python"].startswith(".".join(map(str, sys.version_info[:2])))
    assert facts["home"].startswith(str(home))
    assert re.fullmatch(rf"(none|.+;) in {home}/packed.*", facts["packed weights"])
    assert "twinjet pull smollm2" in facts["model"]
    assert "kernels" in shown.stdout
    assert "reference ops" in facts["backend"]


def test_run_answers_as_the_server_does(home: Path, tiny: str, served: Served):
    done = twinjet(home, "run", tiny, "Hello world", "--max-tokens", "12", *ONE_ROW)
    assert done.returncode == 0, done.stderr
    body = {"messages": [{"role": "user", "content": "Hello world"}], "max_tokens": 12, "temperature": 0}
    answer = httpx.post(served.url + "/v1/chat/completions", json=body, timeout=60).json()
    assert done.stdout == answer["choices"][0]["message"]["content"] + "\n"


def test_run_wants_one_prompt(home: Path, tiny: str):
    assert_one_clear_line(twinjet(home, "run", tiny, "Hello", "world"), "quotes")


def test_run_checks_sampling_before_anything_starts(home: Path):
    # Whatever started first would fail on this model first.
    assert_one_clear_line(twinjet(home, "run", "missing.gguf", "Hello", "--temperature", "-1"), "temperature")


def test_a_base_model_cannot_chat(home: Path, tmp_path: Path):
    base = write_tiny_llama(tmp_path / "base.gguf", vocab=bpe_vocab(chat_template=None))
    assert_one_clear_line(twinjet(home, "chat", str(base)), "base", "chat template", "twinjet run")


def test_a_home_that_cannot_be_written_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert_one_clear_line(twinjet(tmp_path / "file", "pull", "smollm2"), "file")
