"""The `twinjet` command: gathers the commands and turns errors into one clear line.

Commands import what they need when they run, so that `twinjet --help` answers at once.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from twinjet import __version__
from twinjet.cli.bench import bench
from twinjet.cli.chat import chat
from twinjet.cli.doctor import doctor
from twinjet.cli.models import models
from twinjet.cli.pull import pull
from twinjet.cli.run import run
from twinjet.cli.serve import serve
from twinjet.core.errors import TwinjetError

INTERRUPTED = 130


class _Commands(TyperGroup):
    """Reports what was raised on purpose; anything else is a bug, and its traceback is wanted."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TwinjetError as error:
            typer.echo(f"twinjet: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None
        except (KeyboardInterrupt, typer.Abort):
            typer.echo("twinjet: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"twinjet {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve large language models on JAX, interleaved or disaggregated."""


for _command in (serve, run, chat, bench, pull, models, doctor):
    app.command()(_command)
