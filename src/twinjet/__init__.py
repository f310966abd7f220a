"""Twinjet: serve large language models on JAX, interleaved or disaggregated."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinjet.api import LLM, AsyncLLM, Completion, Delta, Usage
    from twinjet.core.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        ContextTooLong,
        EngineError,
        InvalidRequest,
        RequestError,
        TwinjetError,
    )
    from twinjet.core.types import SamplingParams, TokenLogprobs
    from twinjet.options import EngineOptions

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "ContextTooLong",
    "Delta",
    "EngineError",
    "EngineOptions",
    "InvalidRequest",
    "RequestError",
    "SamplingParams",
    "TokenLogprobs",
    "TwinjetError",
    "Usage",
    "__version__",
]

_ERRORS = (
    *("TwinjetError", "ConfigError", "CheckpointError", "RequestError", "InvalidRequest", "ContextTooLong"),
    *("CapacityError", "EngineError"),
)

_HOMES: dict[str, str] = {
    **dict.fromkeys(_ERRORS, "twinjet.core.errors"),
    **dict.fromkeys(("LLM", "AsyncLLM", "Completion", "Delta", "Usage"), "twinjet.api"),
    **dict.fromkeys(("SamplingParams", "TokenLogprobs"), "twinjet.core.types"),
    "EngineOptions": "twinjet.options",
}


def __getattr__(name: str) -> object:
    """Public names load what they need on first use, so that `import twinjet` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
