"""Results as a table of Markdown, aligned so that it reads well as it is."""

from collections.abc import Sequence

from twinjet.bench.results import Result

HEADER = (
    "model",
    "backend",
    "test",
    "t/s",
    "ms/t",
    "concurrency",
    "throughput/s",
    "wall throughput/s",
    "peak MiB",
)
_TEXT_COLUMNS = 3
"""The first ones, aligned to the left; numbers to the right."""


def markdown_table(results: Sequence[Result]) -> str:
    """One row for each result; lines end without a newline behind the last."""
    rows = [_cells(result) for result in results]
    widths = [max(len(cells[i]) for cells in (HEADER, *rows)) for i in range(len(HEADER))]
    rule = ["-" * width if i < _TEXT_COLUMNS else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join(_line(cells, widths) for cells in (HEADER, rule, *rows))


def _cells(result: Result) -> tuple[str, ...]:
    peak = result.peak_mib
    return (
        # A bar would part the cell.
        result.model.replace("|", "\\|"),
        result.backend,
        result.test.name,
        f"{result.tokens_per_s:.2f} ± {result.tokens_per_s_std:.2f}",
        f"{result.ms_per_token:.3f} ± {result.ms_per_token_std:.3f}",
        str(result.test.concurrency),
        f"{result.throughput:.2f}",
        f"{result.wall_throughput:.2f}",
        "-" if peak is None else f"{peak:.1f}",
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if i < _TEXT_COLUMNS else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"
