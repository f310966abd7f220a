"""`twinjet pull`: fetch a model now, so that nothing has to wait for it later."""

from twinjet.cli.options import Model
from twinjet.options import DEFAULT_MODEL, default_home


def pull(model: Model = DEFAULT_MODEL) -> None:
    """Fetch a model, or check the one that is here against its hash, and say where it is."""
    import os

    import typer

    from twinjet.checkpoints.pull import resolve_model
    from twinjet.cli.progress import ProgressReport

    with ProgressReport() as report:
        resolved = resolve_model(model, default_home(os.environ), report.pulling(model), verify=True)
    typer.echo(f"{resolved.name}: {resolved.path}")
