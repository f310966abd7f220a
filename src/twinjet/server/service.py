"""What the HTTP server serves: one model, its text side and the orchestrator behind it; and the server's own limits."""

import re
from dataclasses import dataclass

from twinjet import __version__
from twinjet.core.errors import ConfigError, ModelNotFound, Overloaded
from twinjet.core.types import EngineInfo
from twinjet.orchestrator.interface import Orchestrating
from twinjet.text.template import ChatTemplate
from twinjet.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model under the name that clients use. Usable before its engines are ready."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None where the checkpoint has no chat template: chat is refused then."""
    orchestrator: Orchestrating
    created: int
    """Unix time in seconds, shown by `/v1/models`."""

    def check_name(self, asked: str | None) -> None:
        """Raises ModelNotFound unless `asked` is the served model or absent."""
        if asked is not None and asked != self.name:
            # A name is the client's own text, but no reason to send a megabyte of it back.
            shown = asked[:100]
            raise ModelNotFound(f"the model {shown!r} is not served here; the one that is: {self.name!r}", "model")

    def ready_info(self) -> EngineInfo | None:
        """The engines' limits, or None while they are starting."""
        try:
            return self.orchestrator.info
        except Overloaded:
            return None

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`: changes with whatever may change a token."""
        info = self.ready_info()
        parts = [__version__, *re.findall(r"\w+", f"{info.backend} {info.kv_dtype}")] if info else [__version__]
        return "-".join(["twinjet", *parts])


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one HTTP request may ask for."""

    max_body_bytes: int = 8 << 20
    """Longest accepted request body: a million token ids. One of many small parts is decoded in one go, and all streams
    wait for that."""
    max_choices: int = 512
    """Most sequences of one request: prompts times `n`. No more than may wait on an idle server, or a request that
    is told to come back later would never be let in."""
    max_messages: int = 4096
    """Most messages of one chat."""
    max_stops: int = 16
    """Most stop strings."""
    max_stop_chars: int = 1000
    """Longest stop string, in characters."""
    max_stop_token_ids: int = 128
    """Most `stop_token_ids`."""

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "max_choices",
            "max_messages",
            "max_stops",
            "max_stop_chars",
            "max_stop_token_ids",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
