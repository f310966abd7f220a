"""Results as JSON, for `--json FILE`: to a file, or to standard output for `-`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from twinjet.core.errors import ConfigError

JsonTarget = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the results here; - for standard output.")
]
STDOUT = "-"


def check_target(option: str, path: Path) -> None:
    """Find out before hours of work that its results could not be written.

    Raises: ConfigError.
    """
    there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{option}: {str(path)!r} cannot be written ({error.strerror}); name another file") from None
    if not there:
        path.unlink()


def write_json(target: str, content: object) -> None:
    """Raises: OSError."""
    text = json.dumps(content, indent=1) + "\n"
    if target == STDOUT:
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)
