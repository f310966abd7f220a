"""`twinjet serve` from outside: start, the printed line, stop signals, and starts that fail."""

import json
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.command import COMMAND, TINY_SERVER, assert_one_clear_line, environment, twinjet
from tests.cli.conftest import Served, free_port, serving


def test_health_is_503_until_warm(served: Served):
    assert set(served.statuses[:-1]) == {503}
    assert served.statuses[-1] == 200


def test_the_printed_line_works_as_it_is(served: Served):
    program, url, flag, header, data_flag, body = served.curl
    assert (program, flag, data_flag) == ("curl", "-H", "-d")
    assert url == f"{served.url}/v1/chat/completions"
    name, value = header.split(": ")
    answer = httpx.post(url, headers={name: value}, content=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")


def test_the_model_goes_by_its_files_name(served: Served):
    assert [model["id"] for model in httpx.get(served.url + "/v1/models").json()["data"]] == ["tiny"]


def test_the_start_says_what_was_decided(served: Served):
    said = "".join(served.errors)
    parts = ("llama", "512 tokens", "4.0 MiB", "float16", "interleaved", "compiling programs")
    forecast = ("ITL target", "stall bound of running streams", "TTFT, 4 streams", "128 tokens", "decode")
    for part in (*parts, *forecast):
        assert part in said, said


def test_a_chats_next_turn_finds_the_last_one_in_the_cache(served: Served):
    def ask(*contents: str) -> dict[str, Any]:
        messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": c} for i, c in enumerate(contents)]
        body = {"messages": messages, "max_tokens": 24, "temperature": 0}
        return httpx.post(served.url + "/v1/chat/completions", json=body, timeout=60).json()

    question = "Tell me about rivers, and lakes, and seas. " * 2
    first = ask(question)
    again = ask(question)
    assert again["choices"] == first["choices"]
    cached, whole = again["usage"]["prompt_tokens_details"]["cached_tokens"], again["usage"]["prompt_tokens"]
    assert whole - 16 <= cached < whole
    turn = ask(question, first["choices"][0]["message"]["content"], "And mountains?")
    assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] >= cached


def test_the_server_process_has_not_loaded_jax(served: Served):
    maps = Path(f"/proc/{served.process.pid}/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    assert "jaxlib" not in maps.read_text()


def test_ctrl_c_while_engines_start_exits_with_zero(home: Path, tiny: str):
    port = free_port()
    command = (*COMMAND, "serve", tiny, *TINY_SERVER, "--port", str(port))
    with subprocess.Popen(command, env=environment(home), stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            try:
                assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503
                break
            except httpx.ConnectError:
                time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def test_two_engines_serve_the_second_mode(home: Path, tiny: str, served: Served):
    body = {"prompt": "Hello world " * 20, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    expected = httpx.post(served.url + "/v1/completions", json=body, timeout=60).json()["choices"][0]["token_ids"]
    with serving(home, tiny, *TINY_SERVER, "--prefill", "1", "--decode", "1") as server:
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
        moved = [
            line.rpartition(" ")[2]
            for line in httpx.get(server.url + "/metrics").text.splitlines()
            if line.startswith("twinjet_transfers_total ")
        ]
    assert answer["choices"][0]["token_ids"] == expected
    assert moved == ["1.0"]


def test_a_taken_port_is_one_line(home: Path, tiny: str):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_one_clear_line(twinjet(home, "serve", tiny, "--port", port), port, "in use", "--port")


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        (("--kv-memory", "lots"), "512MiB"),
        (("--prefill", "1"), "--decode"),
        (("--context", "100000"), "512 tokens"),
        (("--token-budget", "2"), "--token-budget"),
        (("--kv-memory", "100"), "--kv-memory"),
    ],
)
def test_settings_that_cannot_work_are_one_line(home: Path, tiny: str, options: tuple[str, ...], needle: str):
    assert_one_clear_line(twinjet(home, "serve", tiny, "--port", "0", *options), needle)


def test_a_truncated_model_is_one_line(home: Path, tiny: str, tmp_path: Path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(tiny).read_bytes()[:-4096])
    assert_one_clear_line(twinjet(home, "serve", str(cut), "--port", "0"), "cut.gguf")


def test_a_missing_model_is_one_line(home: Path):
    assert_one_clear_line(twinjet(home, "serve", "no-such-model", "--port", "0"), "no-such-model", "smollm2")


def test_a_stop_signal_lets_a_stream_finish_and_exits_with_zero(served: Served):
    """The last test of all that use this server."""
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {"prompt": "Hello world", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    served.process.send_signal(signal.SIGTERM)
    reader.join(60)
    assert served.process.wait(30) == 0
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert "Traceback" not in "".join(served.errors)
