"""How far the CPU kernels' distributions are from float32's, beside how far llama.cpp's are, on the same tokens.

For each scored token the Kullback-Leibler divergence from the exact distribution (float32 on the file's own weights, as
`--exact` computes) to each engine's. Texts are cut into chunks of 512 tokens, each with a context of its own, and the
second half is scored. llama.cpp's come in a file that cuts what is under e**-16 of the likeliest token, so all three
are cut alike and made to sum to one again; `twinjet_uncut` is without that, to show how little it changes.
Tokens of a chunk depend on one another, so the confidence interval of the paired difference comes from drawing whole
chunks (bootstrap, within each text).

    python -m benchmarks.divergence LLAMA_CPP_BIN [--model smollm2] [--chunks 20] [--json FILE]
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.llama_cpp import LlamaCpp, as_written, read_distributions
from benchmarks.peers.logits import CONTEXT, ChunkLogits
from benchmarks.peers.texts import Text, fetch_texts, read_text
from benchmarks.provenance import report, write_json
from twinjet.checkpoints.gguf import read_checkpoint
from twinjet.checkpoints.pull import resolve_model
from twinjet.text.tokenizer import Tokenizer

ENGINES = ("twinjet", "llama_cpp")
DRAWS = 10_000
"""Of the bootstrap."""
CHECKED_CHUNKS = 2
"""Of each text: on them llama.cpp computes with the weights in float32, too, which must be what `--exact` gives."""


class Scores:
    """Per token, for one text: [chunks, rows] of each engine."""

    def __init__(self) -> None:
        self.divergence: dict[str, list[np.ndarray]] = {}
        self.same_top: dict[str, list[np.ndarray]] = {}

    def add(self, engine: str, exact: np.ndarray, logits: np.ndarray) -> None:
        """`exact` [rows, V] log-probabilities, `logits` [rows, V] up to a constant of each row."""
        self.divergence.setdefault(engine, []).append((np.exp(exact) * (exact - log_softmax(logits))).sum(axis=1))
        self.same_top.setdefault(engine, []).append(exact.argmax(axis=1) == logits.argmax(axis=1))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """[rows, V] float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def score_text(
    text: Text, chunks: int, llama: LlamaCpp, model: Path, threads: int, folder: Path,
    exact: ChunkLogits, fast: ChunkLogits, tokenize: Callable[[str], list[int]], float32_model: Path,
) -> tuple[Scores, bool]:  # fmt: skip
    """All engines on one text, and whether both tokenize it alike."""
    source, target = folder / "text", folder / "distributions"
    source.write_text(text.content)
    llama.write_distributions(model, source, chunks, CONTEXT, threads, target)
    theirs = read_distributions(target)
    alike = tokenize(text.content)[: theirs.tokens.size] == theirs.tokens.ravel().tolist()
    llama.write_distributions(float32_model, source, CHECKED_CHUNKS, CONTEXT, threads, folder / "float32")
    checked = read_distributions(folder / "float32").chunks()
    scores = Scores()
    for tokens, their_rows, float32_rows in zip_longest(theirs.tokens, theirs.chunks(), checked):
        true = exact(tokens, theirs.scored)
        ours = fast(tokens, theirs.scored)
        expected = log_softmax(as_written(true))
        scores.add("twinjet", expected, as_written(ours))
        scores.add("llama_cpp", expected, their_rows)
        scores.add("twinjet_uncut", log_softmax(true), ours)
        if float32_rows is not None:
            scores.add("llama_cpp_float32", expected, float32_rows)
    return scores, alike


def interval(per_text: list[np.ndarray]) -> list[float]:
    """95% confidence interval of a mean over tokens; one array [chunks] of chunk means for each text."""
    rng = np.random.default_rng(0)
    sizes = np.array([len(means) for means in per_text])
    drawn = np.stack([rng.choice(means, (DRAWS, len(means))).mean(axis=1) for means in per_text], axis=1)
    return np.quantile(drawn @ sizes / sizes.sum(), [0.025, 0.975]).tolist()


def summarise(scores: list[Scores]) -> dict[str, Any]:
    """Of one text or several together."""
    stacked = [{engine: np.stack(rows) for engine, rows in one.divergence.items()} for one in scores]
    summary: dict[str, Any] = {"tokens": sum(one["twinjet"].size for one in stacked)}
    for engine in stacked[0]:
        values = np.concatenate([one[engine].ravel() for one in stacked])
        tops = np.concatenate([np.stack(one.same_top[engine]).ravel() for one in scores])
        summary[engine] = {
            "mean": values.mean(),
            "mean_95": interval([one[engine].mean(axis=1) for one in stacked]),
            "median": float(np.median(values)),
            "p99": float(np.quantile(values, 0.99)),
            "max": values.max(),
            "same_top_token": tops.mean(),
        }
    differences = [(one["twinjet"] - one["llama_cpp"]).mean(axis=1) for one in stacked]
    mean = summary["twinjet"]["mean"] - summary["llama_cpp"]["mean"]
    summary["twinjet_less_llama_cpp"] = {"mean": mean, "mean_95": interval(differences)}
    return summary


def show(name: str, summary: dict[str, Any]) -> None:
    def engine(name: str) -> str:
        one = summary[name]
        low, high = one["mean_95"]
        return f"{one['mean']:.5f} [{low:.5f}, {high:.5f}] {100 * one['same_top_token']:5.1f}%"

    difference = summary["twinjet_less_llama_cpp"]
    low, high = difference["mean_95"]
    shown = "  ".join(engine(name) for name in ENGINES)
    print(f"{name:12} {summary['tokens']:7}  {shown}  {difference['mean']:+.5f} [{low:+.5f}, {high:+.5f}]", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("--model", default="smollm2", help="a name, or path of a GGUF file")
    parser.add_argument("--chunks", type=int, default=20, help="of 512 tokens, from each text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--text", type=Path, nargs="+", help="read these files in place of Debian's texts")
    parser.add_argument("--texts-folder", type=Path, help="keep Debian's texts here for the next run")
    parser.add_argument("--json", metavar="FILE", help="write the results here, - for standard output")
    args = parser.parse_args()
    load_average = os.getloadavg()[0]
    llama = LlamaCpp(args.llama_cpp)
    model = resolve_model(args.model, Path(os.environ.get("TWINJET_HOME") or "~/.cache/twinjet").expanduser()).path
    tokenizer = Tokenizer(read_checkpoint(model).vocab)
    exact = ChunkLogits(model, exact=True, threads=args.threads)
    fast = ChunkLogits(model, exact=False, threads=args.threads)
    results: dict[str, Any] = {}
    all_scores: list[Scores] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [read_text(path) for path in args.text] if args.text else fetch_texts(args.texts_folder or folder)
        float32_model = llama.requantize(model, "F32", folder)
        print(f"{'':12} {'tokens':>7}  {'  '.join(f'{engine:31}' for engine in ENGINES)}  difference")
        for text in texts:
            scores, alike = score_text(
                text, args.chunks, llama, model, args.threads, folder, exact, fast,
                lambda content: tokenizer.encode(content, add_special=True, parse_special=False), float32_model,
            )  # fmt: skip
            all_scores.append(scores)
            source = {"source": text.source, "sha256": text.sha256, "tokenized_alike": alike}
            results[text.name] = source | summarise([scores])
            show(text.name, results[text.name])
    total = summarise(all_scores)
    show("all", total)
    print(f"llama.cpp on float32 weights is {total['llama_cpp_float32']['mean']:.1e} from --exact")
    if args.json:
        figures = {
            "model": model.name,
            "llama_cpp": llama.version(),
            "context": CONTEXT,
            "texts": results,
            "all": total,
        }
        write_json(args.json, report("divergence", load_average, figures))


if __name__ == "__main__":
    main()
