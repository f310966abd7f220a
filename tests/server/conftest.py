"""A live server for all tests of a module that do not bend its orchestrator."""

from collections.abc import Iterator

import pytest

from tests.server.live import LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running
