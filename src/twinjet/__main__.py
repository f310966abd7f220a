"""`python -m twinjet` is `twinjet`."""

from twinjet.cli.main import app

app()
