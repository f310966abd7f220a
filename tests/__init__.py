"""Tests; a package, so that spawned engine processes can import `tests.fakes`."""
