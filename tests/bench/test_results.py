"""Rates, the table, the sentences below it, and the picture."""

import statistics
from pathlib import Path

import pytest

from tests.bench.made_up import result
from tests.bench.markdown import parse_markdown
from twinjet.bench import plot
from twinjet.bench.findings import compare_prefill, findings
from twinjet.bench.plot import check_plot, write_plot
from twinjet.bench.results import Result, Sample
from twinjet.bench.suite import Kind
from twinjet.bench.table import HEADER, markdown_table
from twinjet.core.errors import ConfigError


def test_rates_are_of_one_stream_and_of_all():
    found = result("tg", 128, 4, 400.0, 440.0)
    assert found.tokens_per_s == pytest.approx(105.0)
    assert found.tokens_per_s_std == pytest.approx(statistics.stdev([100.0, 110.0]))
    assert found.ms_per_token == pytest.approx(1000 / 105)
    assert found.throughput == pytest.approx(420.0)
    assert found.throughput_std == pytest.approx(statistics.stdev([400.0, 440.0]))
    assert found.wall_throughput == pytest.approx(210.0)
    assert found.peak_mib == pytest.approx(100.0)


def test_the_kernels_share_is_told_where_every_repetition_has_it():
    test = result("tg", 128, 1, 100.0).test
    told, not_told = Sample(128, 1.0, 1.25, kernel_s=1.0), Sample(128, 1.0, 1.25)
    assert Result(test, "m", "b", (told, told), None).kernel_share == pytest.approx(0.8)
    assert Result(test, "m", "b", (told, not_told), None).kernel_share is None


def test_one_repetition_has_no_spread():
    assert result("pp", 16, 1, 100.0).tokens_per_s_std == 0.0


def test_a_record_has_all_figures():
    record = result("pp", 512, 2, 800.0, 1000.0, peak_mib=None).record()
    assert record == {
        "model": "made|up",
        "backend": "fake",
        "test": "pp 512",
        "tokens_per_s": pytest.approx(450.0),
        "tokens_per_s_std": pytest.approx(statistics.stdev([400.0, 500.0])),
        "ms_per_token": pytest.approx(1000 / 450),
        "concurrency": 2,
        "throughput_tokens_per_s": pytest.approx(900.0),
        "wall_tokens_per_s": pytest.approx(450.0),
        "peak_mib": None,
        "kernel_share": None,
        "samples_tokens_per_s": pytest.approx([400.0, 500.0]),
    }


def test_the_table_is_valid_markdown_and_aligned():
    table = markdown_table(
        [result("pp", 512, 1, 800.0, 810.0), result("tg", 128, 16, 400.0, 440.0, 420.0, peak_mib=None)]
    )
    assert len({len(line) for line in table.splitlines()}) == 1
    assert all(line.startswith("| ") and line.endswith(" |") for line in table.splitlines())
    header, rule, rows = parse_markdown(table)
    assert tuple(header[:7]) == ("model", "backend", "test", "t/s", "ms/t", "concurrency", "throughput/s")
    assert tuple(header) == HEADER
    assert all(set(cell) <= set("-:") and len(cell) >= 3 for cell in rule)
    assert rows == [
        ["made|up", "fake", "pp 512", "805.00 ± 7.07", "1.242 ± 0.011", "1", "805.00", "402.50", "100.0"],
        ["made|up", "fake", "tg 128", "26.25 ± 1.25", "38.095 ± 1.819", "16", "420.00", "210.00", "-"],
    ]


def test_prefill_at_once_is_compared_with_one_at_a_time():
    results = [
        result("pp", 16, 1, 100.0, 101.0),
        result("pp", 16, 4, 250.0, 252.5),
        result("pp", 512, 1, 800.0, 810.0),
        result("pp", 512, 4, 800.0, 794.0),
        result("pp", 64, 4, 300.0, 300.0),
        result("tg", 128, 4, 90.0, 90.0),
    ]
    compared = compare_prefill(results)
    assert {length: [c.ratio for c in found] for length, found in compared.items()} == {
        16: [pytest.approx(2.5)],
        512: [pytest.approx((1 + 794 / 810) / 2)],
    }
    text = "\n".join(findings(results))
    assert "pp 16: 4 at once 2.50x ± 0.03" in text
    assert "Never slower, within noise." in text
    assert "prompts of up to 16 tokens gain, those from 512 on do not." in text


@pytest.mark.parametrize(
    ("alone", "together", "slower"),
    [
        ([800.0, 800.0], [780.0, 780.0], False),  # under the least that counts
        ([800.0, 800.0], [760.0, 760.0], True),
        ([800.0, 400.0], [760.0, 380.0], True),  # a disturbance met both
        ([800.0, 900.0], [700.0, 900.0], False),  # within the spread
        ([800.0, 800.0, 800.0], [760.0], False),  # one pair tells nothing of noise
    ],
)
def test_slower_is_what_is_slower_beyond_noise(alone: list[float], together: list[float], slower: bool):
    even = result("pp", 512, 2, *alone)
    results = [result("pp", 512, 1, *alone), even, result("pp", 512, 8, *together)]
    text = "\n".join(findings(results))
    assert ("Slower than one at a time: pp 512 x 8" in text) is slower
    assert ("Never slower" in text) is not slower
    assert ("measured once is not judged" in text) is (len(together) == 1)


def test_the_crossover_is_said_where_there_is_none():
    slow = [result("pp", 16, 1, 100.0, 100.0), result("pp", 16, 2, 101.0, 101.0)]
    assert "at none of these lengths" in "\n".join(findings(slow))
    quick = [result("pp", 16, 1, 100.0, 100.0), result("pp", 16, 2, 150.0, 150.0)]
    assert "not reached, prompts of 16 tokens still gain" in "\n".join(findings(quick))


def test_one_repetition_gives_ratios_and_no_verdict():
    lines = findings([result("pp", 16, 1, 100.0), result("pp", 16, 2, 150.0)])
    assert "pp 16: 2 at once 1.50x (once)" in lines[1]
    assert "-r" in lines[2]
    assert not any("slower" in line or "Crossover" in line for line in lines)


def test_the_memory_of_a_long_prompt_is_set_beside_as_many_tokens_in_several():
    results = [
        result("pp", 512, 1, 800.0, peak_mib=400.0),
        result("pp", 512, 4, 800.0, peak_mib=401.5),
        result("pp", 2048, 1, 600.0, peak_mib=402.0),
        result("pp", 128, 16, 600.0, peak_mib=399.0),
    ]
    assert "Peak memory: pp 2048 402.0 MiB, pp 512 x 4 401.5 MiB." in findings(results)
    unknown = [result("pp", 512, 4, 800.0, peak_mib=None), result("pp", 2048, 1, 600.0, peak_mib=None)]
    assert findings(unknown) == []


@pytest.mark.parametrize("kinds", [("pp", "tg"), ("tg",)])
def test_the_plot_is_a_picture(tmp_path: Path, kinds: tuple[Kind, ...]):
    results = [
        result(kind, length, streams, 100.0 * streams, 110.0 * streams)
        for kind in kinds
        for length in (16, 512)
        for streams in (1, 2, 4)
    ]
    write_plot(results, tmp_path / "bench.png")
    head = (tmp_path / "bench.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(head[16:20]) == 900 * len(kinds)


def test_a_plot_that_cannot_be_written_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"\.png"):
        check_plot(Path("bench.gif"))
    check_plot(Path("bench.PNG"))
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'twinjet\[plots\]'"):
        check_plot(Path("bench.png"))
