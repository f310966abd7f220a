"""`twinjet models`: which models there are, and which are here already."""


def models() -> None:
    """List the models that can be named, and those that are here."""
    import os

    from twinjet.assemble import default_home
    from twinjet.checkpoints.pull import list_models
    from twinjet.cli.tables import print_table
    from twinjet.machine import format_bytes

    rows = []
    for entry in list_models(default_home(os.environ)):
        rows.append((entry.name, format_bytes(entry.size_bytes), str(entry.path)))
    print_table(("model", "size", "where"), rows)
