"""What a person sees when it is the engine process that cannot start."""

import subprocess
import sys
from pathlib import Path

from tests.cli.command import ONE_ROW, assert_one_clear_line, environment
from tests.tiny_models import write_tiny_llama

SPOIL_THEN_RUN = """
import sys
from pathlib import Path
import twinjet.cli.session as session

opened = session.open_with_progress(sys.argv[2])
Path(sys.argv[2]).write_bytes(b"GGUF, but not any more")
session.open_with_progress = lambda _: opened

from twinjet.cli.main import app
app(sys.argv[1:])
"""
"""The model file goes bad after the command has read it, so the engine process is the first to notice."""


def test_a_model_that_only_the_engine_finds_bad_is_one_line(tmp_path: Path, home: Path):
    model = str(write_tiny_llama(tmp_path / "spoilt.gguf"))
    done = subprocess.run(
        (sys.executable, "-c", SPOIL_THEN_RUN, "run", model, "Hello", *ONE_ROW),
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert_one_clear_line(done, "spoilt.gguf")
