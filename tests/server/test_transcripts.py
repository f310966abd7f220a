"""Streams, byte for byte as they were when last looked at."""

import pytest

from tests.server.live import LiveServer
from tests.server.transcripts import GOLDEN, TRANSCRIPTS, record


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_stream_is_as_recorded(server: LiveServer, name: str):
    expected = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert record(server, TRANSCRIPTS[name]) == expected


def test_every_recording_is_checked():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(TRANSCRIPTS)
