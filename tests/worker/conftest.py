"""Fixtures of the worker's tests."""

import pytest


@pytest.fixture
def frequent_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinjet.worker.loop.STATS_INTERVAL_S", 0.05)
