"""Tables for people: drawn on a terminal, columns of plain text elsewhere."""

import sys
from collections.abc import Sequence

import typer


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
