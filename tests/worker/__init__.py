"""Tests of the engine process."""
