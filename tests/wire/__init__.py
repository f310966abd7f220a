"""Tests of messages, sockets and pages."""
