"""From a model's name and a few options to everything that runs: the one place where "auto" is resolved.

Knows checkpoints, text and the orchestrator; no HTTP, no terminal. Reads no environment itself.
"""

from dataclasses import dataclass
from pathlib import Path

from twinjet.checkpoints.gguf import read_checkpoint
from twinjet.checkpoints.pull import ProgressCallback, resolve_model
from twinjet.core.config import KV_ITEM_BYTES, CacheConfig, EngineConfig, KVDtype, SchedulerConfig, kv_row_elements
from twinjet.core.errors import ConfigError
from twinjet.machine import available_memory, format_bytes, steady_memory, total_memory, usable_cores
from twinjet.models.config import ModelConfig
from twinjet.options import EngineOptions, packed_folder
from twinjet.orchestrator.orchestrator import Orchestrator
from twinjet.text.template import ChatTemplate
from twinjet.text.tokenizer import Tokenizer

DEFAULT_TOKEN_BUDGET = 512
PAGE_SIZE = 16

CALIBRATION_S = 1.5
"""Time for measuring steps at warm-up: several rounds of a small model, one of most kinds of step of a larger one."""

KV_SHARE = 8
"""Without --kv-memory, the pools of all engines take one part in this many of the memory to plan with."""
KV_MOST_SHARE = 2
"""One part in this many of it at most, where one context needs more than that; a longer context is capped."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model file that was found and read as far as the server process needs it: no weights."""

    name: str
    """What clients call it."""
    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None: a base model, which can complete but not chat."""
    quantisation: str
    """The type that most of the weights are stored in."""
    num_parameters: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Assembly:
    """Everything that serves one model, not yet started."""

    model: OpenedModel
    engine: EngineConfig
    roles: tuple[str, ...]
    orchestrator: Orchestrator

    def summary(self) -> tuple[tuple[str, str], ...]:
        """What was decided, as (label, text), for people."""
        model, config, cache, scheduler = self.model, self.model.config, self.engine.cache, self.engine.scheduler
        pool_bytes = cache.num_pages * cache.page_size * kv_bytes_per_token(config, cache.dtype)
        context = f"{scheduler.context} tokens"
        if scheduler.context < config.context_length:
            context += f" (the model allows {config.context_length})"
        engines = "1, interleaved"
        if len(self.roles) > 1:
            engines = f"{self.roles.count('prefill')} prefill + {self.roles.count('decode')} decode, disaggregated"
        return (
            ("model", f"{model.name}: {config.architecture}, {_count(model.num_parameters)} parameters"),
            ("weights", f"{model.quantisation}, {format_bytes(model.size_bytes)}"),
            ("context", context),
            (
                "KV pool",
                f"{format_bytes(pool_bytes)} in {cache.dtype}: {cache.num_pages * cache.page_size} tokens, "
                f"up to {scheduler.max_streams} streams",
            ),
            ("engines", f"{engines}; {self.engine.threads} compute threads each"),
            ("arithmetic", "exact: float32 on dequantised weights" if self.engine.exact else "fast"),
        )


def open_model(spec: str, home: Path, on_progress: ProgressCallback | None = None) -> OpenedModel:
    """Pull what is missing and read the file's metadata.

    Raises: CheckpointError, ConfigError.
    """
    resolved = resolve_model(spec, home, on_progress)
    checkpoint = read_checkpoint(resolved.path)
    tokenizer = Tokenizer(checkpoint.vocab)
    stored: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        size = 1
        for extent in tensor.shape:
            size *= extent
        stored[tensor.quant] = stored.get(tensor.quant, 0) + size
    return OpenedModel(
        name=resolved.name,
        path=resolved.path,
        config=checkpoint.config,
        tokenizer=tokenizer,
        template=ChatTemplate.from_vocab(checkpoint.vocab, tokenizer),
        quantisation=max(stored, key=stored.__getitem__),
        num_parameters=sum(stored.values()),
        size_bytes=checkpoint.size_bytes,
    )


def assemble(model: OpenedModel, options: EngineOptions, home: Path) -> Assembly:
    """Resolve every "auto" against the model and this machine.

    Raises: ConfigError.
    """
    config = local_engine_config(model, options, home)
    return Assembly(
        model, config, options.roles, Orchestrator(config, roles=options.roles, max_waiting=options.max_waiting)
    )


def local_engine_config(model: OpenedModel, options: EngineOptions, home: Path) -> EngineConfig:
    """Settings of an engine on this machine.

    Raises: ConfigError.
    """
    return engine_config(
        model,
        options,
        home,
        memory_bytes=steady_memory(available_memory(), total_memory()),
        physical_cores=usable_cores().physical,
    )


def engine_config(
    model: OpenedModel, options: EngineOptions, home: Path, *, memory_bytes: int, physical_cores: int
) -> EngineConfig:
    """The settings that every engine of this server is started with."""
    num_engines = len(options.roles)
    dtype = options.kv_dtype or ("float32" if options.exact else "float16")
    context, num_tokens = pool_tokens(model.config, options, dtype, memory_bytes // num_engines)
    return EngineConfig(
        model_path=str(model.path),
        cache=CacheConfig(
            page_size=PAGE_SIZE,
            num_pages=-(-num_tokens // PAGE_SIZE),
            dtype=dtype,
            prefix_cache=options.prefix_cache,
        ),
        scheduler=SchedulerConfig(
            max_streams=options.max_streams,
            context=context,
            token_budget=options.token_budget or max(DEFAULT_TOKEN_BUDGET, options.max_streams),
            policy=options.policy,
            itl_target_ms=options.itl_target_ms,
        ),
        exact=options.exact,
        threads=options.threads or max(1, physical_cores // num_engines),
        pipeline_depth=options.pipeline_depth,
        cache_dir=str(home / "cache"),
        calibration_s=CALIBRATION_S if options.paced else 0.0,
        packed_dir=str(packed_folder(home)),
    )


def pool_tokens(config: ModelConfig, options: EngineOptions, dtype: KVDtype, memory_bytes: int) -> tuple[int, int]:
    """(context, tokens in the KV pool) of one engine that has `memory_bytes` for weights and KV.

    A pool that --kv-memory sets is taken as it is. Otherwise: a share of the memory, at least one context
    and at most one for each stream.
    """
    if options.context is not None and options.context > config.context_length:
        raise ConfigError(
            f"--context {options.context} is more than the {config.context_length} tokens "
            "that the model was trained for"
        )
    per_token = kv_bytes_per_token(config, dtype)
    room_bytes = options.kv_memory or memory_bytes // KV_MOST_SHARE
    most = room_bytes // per_token // PAGE_SIZE * PAGE_SIZE
    if most < 1:
        raise ConfigError(
            f"one KV page of this model takes {format_bytes(per_token * PAGE_SIZE)}, "
            f"more than the {format_bytes(room_bytes)} there are for it; raise --kv-memory"
        )
    context = options.context or min(config.context_length, most)
    if context > most:
        raise ConfigError(
            f"a context of {context} tokens needs {format_bytes(per_token * context)} of KV memory, and there are "
            f"{format_bytes(per_token * most)}; lower --context or raise --kv-memory"
        )
    if options.kv_memory is not None:
        return context, most
    # Each stream may leave its last page part empty.
    for_all_streams = options.max_streams * -(-context // PAGE_SIZE) * PAGE_SIZE
    return context, min(for_all_streams, max(context, memory_bytes // KV_SHARE // per_token))


def kv_bytes_per_token(config: ModelConfig, dtype: KVDtype) -> int:
    """Bytes of the keys and values of one token in all layers."""
    row = kv_row_elements(config.head_dim, dtype)
    return 2 * config.num_layers * config.num_kv_heads * row * KV_ITEM_BYTES[dtype]


def _count(number: int) -> str:
    """A large number for people: 135M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
