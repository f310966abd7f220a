"""`twinjet models`: which models there are, and which are here already."""


def models() -> None:
    """List the models that can be named, and those that are here."""
    import os

    from twinjet.checkpoints.pull import list_models
    from twinjet.cli.tables import print_table
    from twinjet.machine import format_bytes
    from twinjet.options import default_home

    rows = [
        (
            model.name,
            "yes" if model.path else "no",
            format_bytes(model.size_bytes),
            model.architecture or "",
            model.quant or "",
            model.license or "",
            model.description or "",
        )
        for model in list_models(default_home(os.environ))
    ]
    print_table(("model", "here", "size", "family", "weights", "licence", ""), rows)
