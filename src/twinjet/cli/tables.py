"""Tables for people: drawn on a terminal, columns of plain text elsewhere."""

import sys
from collections.abc import Sequence

import typer

from twinjet.core.types import Forecast


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*header, box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_facts(facts: Sequence[tuple[str, str]], *, indent: str = "", err: bool = False) -> None:
    """Label and text, a line each."""
    width = max(len(label) for label, _ in facts)
    for label, text in facts:
        typer.echo(f"{indent}{label.ljust(width)}  {text}", err=err)


def forecast_facts(forecast: Forecast) -> tuple[tuple[str, str], ...]:
    """What an engine is expected to do, as (label, text), for people."""

    def times(pairs: Sequence[tuple[int, float]], unit: str) -> str:
        return ", ".join(f"{n} {unit} {_ms(ms)}" for n, ms in pairs)

    bound = "none: prompts go first"
    if forecast.stall_bound_ms is not None and forecast.full_stall_bound_ms is not None:
        bound = _ms(forecast.stall_bound_ms)
        if forecast.full_stall_bound_ms > forecast.stall_bound_ms:
            bound += f", {_ms(forecast.full_stall_bound_ms)} with all streams on a full pool"
    return (
        ("ITL target", f"{_ms(forecast.itl_target_ms)}; stall bound of running streams: {bound}"),
        (
            "chunks",
            f"{forecast.chunk_rows} tokens, {forecast.busy_chunk_rows} beside {forecast.busy_streams} streams",
        ),
        ("TTFT", times(forecast.ttft_ms, "tokens")),
        (f"TTFT, {forecast.busy_streams} streams", times(forecast.busy_ttft_ms, "tokens")),
        ("ITL", times(forecast.itl_ms, "streams")),
        (
            f"ITL, {forecast.busy_streams} streams",
            f"{_ms(forecast.busy_itl_ms)} while a prompt is computed beside them",
        ),
        (
            "throughput",
            f"prefill {forecast.prefill_tokens_s:.0f} tokens/s, decode {forecast.decode_tokens_s:.0f} tokens/s "
            f"with {forecast.itl_ms[-1][0]} streams",
        ),
    )


def _ms(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"
