"""`twinjet bench` as a user runs it, on a tiny random model."""

import json
import sys
from pathlib import Path

import pytest

from tests.bench.markdown import parse_markdown
from tests.cli.command import assert_one_clear_line, twinjet
from tests.tiny_models import write_tiny_llama

SMALL = ("-p", "8,16", "-g", "4", "-c", "1,2", "-r", "2", "--threads", "1", "--token-budget", "4")
TESTS = [(test, streams) for test in ("pp 8", "pp 16", "tg 4") for streams in (1, 2)]
FIELDS = {
    "test",
    "tokens_per_s",
    "tokens_per_s_std",
    "ms_per_token",
    "concurrency",
    "throughput_tokens_per_s",
    "wall_tokens_per_s",
    "peak_mib",
}


def test_it_prints_a_table_and_writes_files(home: Path, tiny: str, tmp_path: Path):
    target, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    done = twinjet(home, "bench", tiny, *SMALL, "--json", str(target), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    table, _, sentences = done.stdout.partition("\n\n")
    header, _, rows = parse_markdown(table)
    assert header[:7] == ["model", "backend", "test", "t/s", "ms/t", "concurrency", "throughput/s"]
    assert [(row[2], int(row[5])) for row in rows] == TESTS
    assert {row[0] for row in rows} == {"tiny"}
    assert "Prefilling several prompts at once" in sentences
    assert "Crossover: " in sentences
    assert "Peak memory: pp 16 " in sentences or sys.platform != "linux"
    assert "measuring: 12 of 12: tg 4 x 2, done" in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")

    records = json.loads(target.read_text())
    assert [(record["test"], record["concurrency"]) for record in records] == TESTS
    for record, row in zip(records, rows, strict=True):
        assert record.keys() >= FIELDS
        assert len(record["samples_tokens_per_s"]) == 2
        assert row[3] == f"{record['tokens_per_s']:.2f} ± {record['tokens_per_s_std']:.2f}"
        assert record["ms_per_token"] == pytest.approx(1000 / record["tokens_per_s"])
        assert record["throughput_tokens_per_s"] == pytest.approx(record["tokens_per_s"] * record["concurrency"])
        assert 0 < record["wall_tokens_per_s"] <= record["throughput_tokens_per_s"] * 1.05
        assert record["peak_mib"] is None or record["peak_mib"] > 50
        assert record["kernel_share"] is None or 0 < record["kernel_share"] < 1


def test_a_dash_writes_the_file_to_standard_output_and_nothing_else(home: Path, tiny: str):
    done = twinjet(home, "bench", tiny, *SMALL[:-6], "-r", "1", *SMALL[-4:], "-p", "0", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert [(record["test"], record["concurrency"]) for record in json.loads(done.stdout)] == TESTS[4:]
    assert "| tg 4 " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "needles"),
    [
        (("-p", "16,many"), ("-p", "16,many")),
        (("-g", "-1"), ("-g", "-1")),
        (("-c", "0"), ("-c", "from 1")),
        (("-c", "1,,2"), ("-c", "1,,2")),
        (("-p", "0", "-g", "0"), ("nothing to measure",)),
        (("-r", "0"), ("-r", "at least 1")),
        (("--max-time", "-1"), ("--max-time",)),
        (("--kv-memory", "much"), ("size",)),
        (("-p", "512"), ("pp 512", "513", "512", "lower -p")),
        (("-p", "0", "-g", "511"), ("tg 511", "513", "lower -g")),
        (("-c", "16", "--token-budget", "8"), ("-c 16", "--token-budget")),
        (("-g", "128", "-p", "0", "-c", "16", "--kv-memory", "256KiB"), ("tg 128", "16 streams", "--kv-memory")),
        (("--json", "missing/bench.json"), ("--json", "missing")),
        (("--json", "/"), ("--json", "Is a directory")),
        (("--json", "/proc/bench.json"), ("--json", "cannot be written")),
        (("--plot", "bench.gif"), ("--plot", ".png")),
    ],
)
def test_what_cannot_work_is_one_line(home: Path, tiny: str, arguments: tuple[str, ...], needles: tuple[str, ...]):
    # With lengths that fit the tiny model, but for what is given here.
    defaults = {"-p": "16", "-g": "16", "--threads": "1"} | dict(zip(arguments[::2], arguments[1::2], strict=True))
    words = [word for option in defaults.items() for word in option]
    assert_one_clear_line(twinjet(home, "bench", tiny, *words), *needles)


def test_default_prompts_end_with_the_models_context(home: Path, tmp_path: Path):
    path = write_tiny_llama(tmp_path / "short.gguf", context=64)
    options = ("-g", "0", "-c", "1", "-r", "1", "--threads", "1", "--token-budget", "4", "--json", "-")
    done = twinjet(home, "bench", str(path), *options)
    assert done.returncode == 0, done.stderr
    assert [record["test"] for record in json.loads(done.stdout)] == ["pp 16"]
    assert "pp 64, 128, 512, 2048: left out" in done.stderr
