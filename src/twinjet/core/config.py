"""Settings of an engine process, already resolved: nothing here is "auto"."""

from dataclasses import dataclass
from typing import Literal

from twinjet.core.errors import ConfigError

KVDtype = Literal["float32", "float16"]

KV_ITEM_BYTES: dict[str, int] = {"float32": 4, "float16": 2}
"""Bytes of one number in the KV pool, by `KVDtype`."""


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

    def __post_init__(self) -> None:
        for name in ("max_streams", "context", "token_budget"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.token_budget < self.max_streams:
            raise ConfigError(
                f"the token budget ({self.token_budget} rows) must hold a row for each of the "
                f"{self.max_streams} streams; raise --token-budget or lower --max-streams"
            )


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
