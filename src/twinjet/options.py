"""What a person may choose. "auto" is still in it; `assemble` resolves that. Imports next to nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from twinjet.core.config import KVDtype, PolicyName
from twinjet.core.errors import ConfigError

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a person may choose about engines; None means that it is worked out here."""

    context: int | None = None
    """Most tokens of one sequence. None: the model's own, capped by memory."""
    max_streams: int = 32
    """Sequences that run at once, on each engine."""
    threads: int | None = None
    """Compute threads of each engine. None: the physical cores, shared out."""
    kv_memory: int | None = None
    """Bytes of each engine's KV pool. None: a share of the memory."""
    kv_dtype: KVDtype | None = None
    """What keys and values are kept in. None: float16, or float32 with `exact`."""
    exact: bool = False
    """Reference ops in float32 on the dequantised weights."""
    token_budget: int | None = None
    """Most rows in one step. None: 512, or `max_streams` where that is more."""
    pipeline_depth: int = 2
    """Plans made ahead."""
    prefix_cache: bool = True
    """Keep the KV of prefixes for later requests that begin alike."""
    paced: bool = False
    """Measure steps at warm-up, and keep them as short as running streams need. For servers."""
    itl_target_ms: float | None = None
    """Longest step, as predicted, while anybody decodes. None: from what is measured. For `paced` engines."""
    policy: PolicyName = "balanced"
    """Whether streams or prompts go first."""
    max_waiting: int = 512
    """Requests accepted beyond what the slots of all engines hold."""
    prefill_engines: int = 0
    """With `decode_engines`: disaggregated, this many engines only prefill."""
    decode_engines: int = 0
    """0 and 0: interleaved, one engine."""

    def __post_init__(self) -> None:
        if self.kv_dtype is not None and self.kv_dtype not in get_args(KVDtype):
            raise ConfigError(f"--kv-dtype must be one of {', '.join(get_args(KVDtype))}, got {self.kv_dtype!r}")
        if self.exact and self.kv_dtype not in (None, "float32"):
            raise ConfigError(f"--exact keeps keys and values in float32; leave out --kv-dtype {self.kv_dtype}")
        if (self.prefill_engines > 0) != (self.decode_engines > 0):
            raise ConfigError(
                f"disaggregated serving needs engines of both kinds, got --prefill {self.prefill_engines} "
                f"--decode {self.decode_engines}; give both, or none for one engine that does both"
            )
        if self.prefill_engines < 0 or self.decode_engines < 0:
            raise ConfigError(
                f"--prefill and --decode must not be negative, got {self.prefill_engines} and {self.decode_engines}"
            )
        if self.max_waiting < 0:
            raise ConfigError(f"--max-waiting must not be negative, got {self.max_waiting}")
        for name in ("context", "max_streams", "threads", "kv_memory", "token_budget"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")

    @property
    def roles(self) -> tuple[str, ...]:
        """One role for each engine process."""
        if self.prefill_engines == 0:
            return ("both",)
        return ("prefill",) * self.prefill_engines + ("decode",) * self.decode_engines


def packed_folder(home: Path) -> Path:
    """Where packed weights are kept, for the CPU kernels to map."""
    return home / "packed"


def default_home(environ: Mapping[str, str]) -> Path:
    """Where models and compiled programs are kept: `TWINJET_HOME`, else ~/.cache/twinjet."""
    chosen = environ.get("TWINJET_HOME")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "twinjet"
