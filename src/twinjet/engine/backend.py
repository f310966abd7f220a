"""Which backend an engine computes with. Knows nothing of steps."""

import sys

from twinjet.core.config import EngineConfig
from twinjet.core.errors import ConfigError
from twinjet.kernels import KernelsUnavailable
from twinjet.models.config import ModelConfig
from twinjet.ops.cpu import KV_TOKENS, CpuOps
from twinjet.ops.cpu_library import load_library
from twinjet.ops.cpu_pack import BlobStore
from twinjet.ops.ops import Ops
from twinjet.ops.reference import ReferenceOps


def choose_ops(config: EngineConfig, model: ModelConfig, store: BlobStore | None = None) -> Ops:
    """The CPU kernels, if they run here and fit the model; else the reference ops, and a warning on stderr.

    `store` is where the kernels keep packed weights.

    Raises: ConfigError, where the KV pool is of a type that only the kernels know.
    """
    page_size = config.cache.page_size
    if config.exact:
        return ReferenceOps(page_size)
    try:
        if page_size % KV_TOKENS or model.head_dim % KV_TOKENS:
            raise KernelsUnavailable(
                f"the CPU kernels need pages and heads of whole {KV_TOKENS}s, "
                f"this model has heads of {model.head_dim} and pages of {page_size}"
            )
        library = load_library()
    except KernelsUnavailable as reason:
        if config.cache.dtype == "int8":
            raise ConfigError(f"--kv-dtype int8 needs the CPU kernels, and they cannot be used: {reason}") from reason
        warn(f"running on the reference ops, many times slower than the CPU kernels: {reason}")
        return ReferenceOps(page_size)
    library.set_threads(config.threads)
    return CpuOps(library, page_size, store)


def warn(text: str) -> None:
    """Tell whoever runs this process what costs them speed."""
    print(f"twinjet: WARNING: {text}", file=sys.stderr, flush=True)
