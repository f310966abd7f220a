"""What benchmarks against other engines read, compute and run, on tiny models and on programs that stand in."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cpu_peers
from benchmarks.cpu_peers import LlamaRates, measure_quietly
from benchmarks.divergence import Scores, interval, log_softmax, summarise
from benchmarks.peers.llama_cpp import LlamaCpp, as_written, read_distributions
from benchmarks.peers.logits import CONTEXT, ChunkLogits
from benchmarks.peers.texts import joined_paragraphs
from tests.models.forward import whole_prompt_logits
from tests.tiny_models import write_tiny_llama


def write_as_llama_perplexity(path: Path, logits: np.ndarray, tokens: np.ndarray) -> None:
    """[chunks, rows, V] in the layout of its file, one value at a time."""
    chunks, context = tokens.shape
    with path.open("wb") as file:
        file.write(b"_logits_" + struct.pack("<iii", context, logits.shape[2], chunks))
        file.write(tokens.astype("<i4").tobytes())
        for row in logits.reshape(-1, logits.shape[2]):
            largest, smallest = max(row), max(min(row), max(row) - 16)
            log_sum = np.log(sum(np.exp(float(x) - float(largest)) for x in row))
            scale = (largest - smallest) / 65535
            file.write(struct.pack("<ff", scale, smallest - largest - log_sum))
            steps = [round(float((x - smallest) / scale)) if x > smallest else 0 for x in row]
            file.write(struct.pack(f"<{len(steps)}H", *steps) + b"\0\0" * (len(steps) % 2))


@pytest.mark.parametrize("vocab_size", [20, 33])
def test_a_file_of_log_probabilities_is_read_as_it_was_written(vocab_size: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(vocab_size)
    tokens = rng.integers(0, vocab_size, (3, 8))
    logits = rng.normal(0, 8, (3, 3, vocab_size)).astype(np.float32)  # some lie 16 under the largest
    write_as_llama_perplexity(tmp_path / "file", logits, tokens)
    read = read_distributions(tmp_path / "file")
    np.testing.assert_array_equal(read.tokens, tokens)
    assert read.scored == slice(4, 7)
    for rows, of_file in zip(logits, read.chunks(), strict=True):
        np.testing.assert_allclose(as_written(rows), of_file, atol=4e-4)  # one of 65,535 steps of 16
        kept = rows > rows.max(axis=1, keepdims=True) - 16
        assert not kept.all()
        np.testing.assert_allclose(of_file[kept], log_softmax(rows)[kept], atol=4e-4)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match="no file of llama-perplexity"):
        read_distributions(tmp_path / "file")


def test_divergence_is_zero_of_itself_and_the_formula_s_otherwise() -> None:
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.25, 0.5]])
    scores = Scores()
    scores.add("twinjet", np.log(p), np.log(p) + 3.0)
    scores.add("llama_cpp", np.log(p), np.log(q))
    np.testing.assert_allclose(scores.divergence["twinjet"], 0.0, atol=1e-15)
    np.testing.assert_allclose(scores.divergence["llama_cpp"], 0.25 * np.log(2))
    summary = summarise([scores])
    assert summary["twinjet"]["same_top_token"] == 1.0
    assert summary["llama_cpp"]["same_top_token"] == 0.0
    assert summary["twinjet_less_llama_cpp"]["mean"] == pytest.approx(-0.25 * np.log(2))


def test_the_interval_is_that_of_a_mean_of_chunks() -> None:
    means = np.random.default_rng(0).normal(5.0, 2.0, 400)
    low, high = interval([means[:100], means[100:]])
    assert (low + high) / 2 == pytest.approx(means.mean(), abs=0.02)
    assert high - low == pytest.approx(2 * 1.96 * 2.0 / 20, rel=0.1)


@pytest.mark.parametrize("exact", [True, False])
def test_logits_of_a_chunk_are_the_model_s(exact: bool, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    tokens = np.random.default_rng(1).integers(3, 250, CONTEXT)
    logits = ChunkLogits(path, exact, threads=2)(tokens, slice(300, 400))
    vocab = ChunkLogits(path, exact=True, threads=2).starting_with_bos(tokens)
    expected = whole_prompt_logits(path, vocab.tolist())[300:400]
    np.testing.assert_allclose(logits, expected, atol=(1e-5 if exact else 5e-3) * np.abs(expected).max())


def test_lines_are_joined_to_paragraphs() -> None:
    assert list(joined_paragraphs("One\n  line\nand two.\n\n \nThe next.\n")) == ["One line and two.", "The next."]


def test_a_disturbed_turn_is_measured_again_and_the_quietest_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    others_s = iter([0.0, 1e9, 2e9, 2e9, 3e9, 4e9])
    monkeypatch.setattr(cpu_peers, "others_cpu_s", lambda: next(others_s))
    rates = iter([1.0, 2.0, 3.0])
    assert measure_quietly(lambda: {"tg": next(rates)}) == ({"tg": 2.0}, 0.0)
    assert next(rates) == 3.0


class TestLlamaPrograms:
    """Programs of a few lines of shell in place of llama.cpp's."""

    @pytest.fixture
    def llama(self, tmp_path: Path) -> LlamaCpp:
        self.write(
            tmp_path / "llama-bench",
            """case "$*" in *"-p 512"*"-fa on"*) r=200;; *"-p 512"*) r=100;; *"-fa off"*) r=60;; *) r=50;; esac
            echo "[{\\"avg_ts\\": $r}]" """,
        )
        self.write(
            tmp_path / "llama-batched-bench",
            """case "$*" in *"-fa on -no-kvu"*) r=90;; *) r=80;; esac
            echo loading
            echo "{\\"pl\\": 8, \\"speed_tg\\": $r}"; echo "{\\"pl\\": 16, \\"speed_tg\\": 1$r}" """,
        )
        return LlamaCpp(tmp_path)

    @staticmethod
    def write(path: Path, script: str) -> None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def test_it_gets_the_settings_that_suit_it_best(self, llama: LlamaCpp) -> None:
        rates = LlamaRates(llama, Path("model.gguf"), threads=2)
        rates.choose_settings()
        assert rates.settings == {"pp512": "on", "tg": "off", "tg x 8": "-fa on -no-kvu", "tg x 16": "-fa on -no-kvu"}
        assert rates.measure() == {"pp512": 200, "tg": 60, "tg x 8": 90, "tg x 16": 190}

    def test_what_a_failed_program_said_is_passed_on(self, llama: LlamaCpp) -> None:
        self.write(llama.folder / "llama-bench", "echo no such model >&2; exit 3")
        with pytest.raises(RuntimeError, match=r"llama-bench failed \(3\):\nno such model"):
            llama.run("llama-bench", json.dumps({}))

    def test_a_folder_without_the_programs_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="build/bin"):
            LlamaCpp(tmp_path).run("llama-bench")
