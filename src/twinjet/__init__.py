"""Twinjet: serve large language models on JAX, interleaved or disaggregated."""

__version__ = "0.1.0"
