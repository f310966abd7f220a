"""How far something is: bars on a terminal, a line at the start and the end of each task elsewhere.

Goes to standard error, so that standard output holds answers only.
"""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import typer

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_STAGES = {
    "download": "downloading",
    "unpack": "unpacking",
    "verify": "checking the hash",
    "wait": "waiting for another process that fetches it",
    "load": "loading weights",
    "hash": "hashing the model file",
    "pack": "packing weights",
    "wait_packed": "waiting for another engine that packs them",
    "map": "mapping packed weights",
    "compile": "compiling programs",
}


_IN_BYTES = {"hash", "pack", "map"}
"""Stages of an engine's start that count bytes."""


class ProgressReport:
    """Bars, one for each task, for as long as the `with` block lasts."""

    def __init__(self, *, still: bool = False) -> None:
        """`still`: drawn at news only, so that nothing of it runs beside a measurement."""
        self._still = still
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._plain: dict[str, bool] = {}
        """Tasks that were begun off a terminal, and whether they are done."""

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[amount]}"),
                TimeElapsedColumn(),
            )
            self._bars = Progress(*columns, console=Console(stderr=True), auto_refresh=not self._still)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def pulling(self, model: str) -> Callable[[str, int, int | None], None]:
        """What `checkpoints` is to call with (stage, done bytes, total bytes) while it fetches a model."""

        def show(stage: str, done_bytes: int, total_bytes: int | None) -> None:
            amount = f"{done_bytes / 1e6:.1f} MB"
            if total_bytes:
                amount = f"{done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB"
            self._show(f"{model}: {_STAGES.get(stage, stage)}", done_bytes, total_bytes, amount)

        return show

    def engine(self, engine_id: int, stage: str, done: int, total: int) -> None:
        """A stage of an engine's start; as the orchestrator reports it."""
        amount = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if stage in _IN_BYTES else f"{done} of {total}"
        self._show(f"engine {engine_id}: {_STAGES.get(stage, stage)}", done, total, amount)

    def measuring(self, done: int, total: int, what: str) -> None:
        """`done` of `total` repetitions of a benchmark are over, `what` comes next or has just ended."""
        self._show("measuring", done, total, f"{done} of {total}: {what}")

    def _show(self, title: str, done: int, total: int | None, amount: str) -> None:
        if self._bars is not None:
            if title not in self._tasks:
                self._tasks[title] = self._bars.add_task(title, total=total, amount=amount)
            self._bars.update(self._tasks[title], completed=done, total=total, amount=amount, refresh=self._still)
            return
        if title not in self._plain:
            self._plain[title] = False
            typer.echo(f"{title} ...", err=True)
        if total and done >= total and not self._plain[title]:
            self._plain[title] = True
            typer.echo(f"{title}: {amount}, done", err=True)
