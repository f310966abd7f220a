"""llama.cpp's programs, out of a folder that holds them, and the file of log-probabilities that one of them writes."""

import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MAGIC = b"_logits_"


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """Programs of one build."""

    folder: Path

    def run(self, program: str, *arguments: str | Path) -> str:
        """Standard output. Raises RuntimeError with the end of what a failed program said."""
        path = self.folder / program
        if not path.exists():
            raise RuntimeError(f"{self.folder} has no {program}; name the folder of llama.cpp's programs (build/bin)")
        done = subprocess.run([path, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-2000:]}")
        return done.stdout

    def version(self) -> str:
        path = self.folder / "llama-bench"
        done = subprocess.run([path, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        said = (done.stdout + done.stderr).splitlines()
        return next((line.removeprefix("version: ") for line in said if line.startswith("version")), "unknown")

    def requantize(self, model: Path, quant: str, folder: Path) -> Path:
        """The model in another type, made from its own quantised weights, in `folder`."""
        target = folder / f"{model.stem.removesuffix('.Q4_1')}.{quant}.gguf"
        if not target.exists():
            unfinished = target.with_suffix(".part")
            self.run("llama-quantize", "--allow-requantize", model, unfinished, quant)
            unfinished.rename(target)
        return target

    def write_distributions(
        self, model: Path, text: Path, chunks: int, context: int, threads: int, target: Path
    ) -> None:
        """Log-probabilities over the vocabulary for the second half of each chunk of a text, into `target`."""
        sizes = ["-c", str(context), "-b", str(context), "-ub", str(context), "--chunks", str(chunks)]
        options = ["-t", str(threads), "--kl-divergence-base", target]
        self.run("llama-perplexity", "-m", model, "-f", text, *sizes, *options)


@dataclass(frozen=True, slots=True)
class Distributions:
    """A file of log-probabilities as llama-perplexity writes it (tools/perplexity/perplexity.cpp, log_softmax).

    After the magic: context, vocabulary and chunks as int32, then the tokens of all chunks, then for each scored row a
    scale and a smallest value in float32 and a uint16 for each token of the vocabulary, padded to an even number.
    Values more than 16 under the largest are cut there.
    """

    path: Path
    context: int
    vocab_size: int
    tokens: np.ndarray
    """[chunks, context] int32, as tokenized: without the BOS that replaces each chunk's first where a model has one."""

    @property
    def scored(self) -> slice:
        """Rows of a chunk that are scored: those that predict a token of its second half."""
        return slice(self.context // 2, self.context - 1)

    def chunks(self) -> Iterator[np.ndarray]:
        """[scored rows, V] float32 of one chunk after the other."""
        rows = self.scored.stop - self.scored.start
        row = np.dtype(
            [("scale", "<f4"), ("smallest", "<f4"), ("steps", "<u2", (self.vocab_size + self.vocab_size % 2,))]
        )
        with self.path.open("rb") as file:
            file.seek(_header_bytes(self.tokens.size))
            for _ in range(len(self.tokens)):
                read = np.frombuffer(file.read(rows * row.itemsize), row)
                steps = read["steps"][:, : self.vocab_size].astype(np.float32)
                yield steps * read["scale"][:, None] + read["smallest"][:, None]


def read_distributions(path: Path) -> Distributions:
    with path.open("rb") as file:
        magic, context, vocab_size, chunks = struct.unpack("<8siii", file.read(20))
        if magic != _MAGIC:
            raise ValueError(f"{path} does not begin with {_MAGIC!r}: no file of llama-perplexity")
        tokens = np.frombuffer(file.read(4 * chunks * context), "<i4").reshape(chunks, context)
    return Distributions(path, context, vocab_size, tokens)


def as_written(logits: np.ndarray) -> np.ndarray:
    """What such a file would have of logits [rows, V]: the same cut and the same 16 bits. float32."""
    largest = logits.max(axis=1, keepdims=True)
    smallest = np.maximum(logits.min(axis=1, keepdims=True), largest - 16)
    scale = (largest - smallest) / np.float32(65535)
    steps = np.rint((np.maximum(logits, smallest) - smallest) / scale)
    log_sum = np.log(np.exp(logits - largest).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return steps * scale + (smallest - largest - log_sum)


def _header_bytes(num_tokens: int) -> int:
    return 20 + 4 * num_tokens
