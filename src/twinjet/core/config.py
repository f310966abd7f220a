"""Settings of an engine process, already resolved: nothing here is "auto"."""

from dataclasses import dataclass
from typing import Literal, get_args

from twinjet.core.errors import ConfigError

KVDtype = Literal["float32", "float16", "int8"]

PolicyName = Literal["balanced", "prefill-first", "decode-first"]

KV_ITEM_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "int8": 1}
"""Bytes of one number in the KV pool, by `KVDtype`."""


def kv_row_elements(head_dim: int, dtype: str) -> int:
    """Elements of one token's key, or value, of one head: int8 ones end with a float32 scale, as its four bytes."""
    return head_dim + 4 if dtype == "int8" else head_dim


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV pool."""

    page_size: int
    """Tokens per page, a power of two."""
    num_pages: int
    """Pages in the pool, shared by all slots."""
    dtype: KVDtype
    prefix_cache: bool = True
    """Whether pages that nobody holds are kept, for sequences that begin with the same tokens."""

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page size must be a power of two, got {self.page_size}")
        if self.num_pages < 1:
            raise ConfigError(f"the KV pool needs at least one page, got {self.num_pages}; raise --kv-memory")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits that the scheduler plans within."""

    max_streams: int
    """Slots: sequences that run at once."""
    context: int
    """Most tokens of one sequence, prompt and generated together."""
    token_budget: int
    """Most rows in one step."""
    policy: PolicyName = "balanced"
    """What a step is for while some sequences decode and others have prompts to compute."""
    itl_target_ms: float | None = None
    """Longest step while anybody decodes, as predicted; None: chosen by the cost model that is measured at warm-up."""

    def __post_init__(self) -> None:
        for name in ("max_streams", "context", "token_budget"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.token_budget < self.max_streams:
            raise ConfigError(
                f"the token budget ({self.token_budget} rows) must hold a row for each of the "
                f"{self.max_streams} streams; raise --token-budget or lower --max-streams"
            )
        if self.policy not in get_args(PolicyName):
            raise ConfigError(f"--policy must be one of {', '.join(get_args(PolicyName))}, got {self.policy}")
        if self.itl_target_ms is not None and not self.itl_target_ms > 0:
            raise ConfigError(f"--itl-target must be over 0 ms, got {self.itl_target_ms}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that an engine process is started with."""

    model_path: str
    """GGUF file."""
    cache: CacheConfig
    scheduler: SchedulerConfig
    exact: bool
    """True: reference ops in float32 on the dequantised weights, float32 KV."""
    threads: int
    """Compute threads."""
    pipeline_depth: int = 2
    """Plans made ahead: the one running and those queued behind it."""
    cache_dir: str | None = None
    """Where compiled programs are kept between starts; None: nowhere."""
    calibration_s: float = 0.0
    """Seconds for measuring steps at warm-up; 0: none are measured, and only the token budget limits a step."""
    packed_dir: str | None = None
    """Where packed weights are kept between starts, for all engines to map; None: each packs into its own memory."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"--threads must be at least 1, got {self.threads}")
        if self.pipeline_depth < 1:
            raise ConfigError(f"--pipeline-depth must be at least 1, got {self.pipeline_depth}")
        if self.cache.page_size * self.cache.num_pages < self.scheduler.context:
            raise ConfigError(
                f"the KV pool holds {self.cache.page_size * self.cache.num_pages} tokens, less than one context of "
                f"{self.scheduler.context}; raise --kv-memory or lower --context"
            )
