"""`twinjet pull`: fetch a model now, so that nothing has to wait for it later."""

from twinjet.cli.options import Model
from twinjet.options import DEFAULT_MODEL


def pull(model: Model = DEFAULT_MODEL) -> None:
    """Fetch a model, or say where it already is."""
    import os

    import typer

    from twinjet.assemble import default_home
    from twinjet.checkpoints.pull import resolve_model
    from twinjet.cli.progress import ProgressReport

    with ProgressReport() as report:
        resolved = resolve_model(model, default_home(os.environ), report.pull)
    typer.echo(f"{resolved.name}: {resolved.path}")
