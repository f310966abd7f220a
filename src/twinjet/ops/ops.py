"""The operations that models are written in. A backend implements all of them, and may fuse inside one, never across.

Chunking, paging, batching and sharding are the backend's business: a model sees rows [T, D] and nothing else.
Weights, KV pool and batch are of the backend's own types, which only pass through models and the engine.
`ReferenceOps` is every backend's oracle.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Array, Float, Int

from twinjet.ops.batch import StepLayout
from twinjet.ops.params import PoolShape, RawModel
from twinjet.ops.specs import AttendSpec, EmbedSpec, HeadSpec, MLPSpec, ProjectSpec, QKVSpec

Block = Callable[[Any, Any, Any], tuple[Any, Any]]
"""One transformer layer: (layer, x, cache) -> (x, cache)."""


@dataclass(frozen=True, slots=True)
class StepClock:
    """A device's own clock, read inside its first and its last kernel, in seconds of the host's monotonic clock."""

    started_s: float
    ended_s: float
    busy_s: float | None
    """In kernels, between the two; None: not known."""


class Ops(Protocol):
    """A backend."""

    @property
    def name(self) -> str: ...

    def pack(self, raw: RawModel, on_progress: Callable[[str, int, int], None]) -> Any:
        """All weights in this backend's own form.

        `on_progress(stage, done, total)` counts layers and the two matrices in the stage "load", bytes in others.
        """
        ...

    def finish(self, tag: int, result: Array) -> tuple[np.ndarray, StepClock | None]:
        """Wait for the step of that tag, whose `sample` gives `result`.

        Returns it on the host, as [samples, 2+2n] or with padding after, and the device's clock; None: it has none.
        """
        ...

    def create_cache(self, shape: PoolShape) -> Any:
        """A KV pool that holds nothing but finite numbers."""
        ...

    def gather(self, cache: Any, rows: Int[Array, " M"]) -> Float[Array, "L 2 M K H"]:
        """Canonical pages of some pool rows (page * G + token), bit for bit; any numbers for rows out of range."""
        ...

    def scatter(self, cache: Any, rows: Int[Array, " M"], kv: Float[Array, "L 2 M K H"]) -> Any:
        """The pool, which is consumed, with canonical pages written to some rows; those out of range are dropped."""
        ...

    def read_batch(self, layout: StepLayout, packed: Int[Array, " X"], last_token: Int[Array, " B"]) -> Any:
        """The step as this backend's ops take it."""
        ...

    def run_layers(
        self, block: Block, params: Any, x: Float[Array, "T D"], cache: Any
    ) -> tuple[Float[Array, "T D"], Any]:
        """Apply `block` to all layers in order."""
        ...

    def embed(self, params: Any, batch: Any, spec: EmbedSpec) -> Float[Array, "T D"]: ...

    def qkv(
        self, layer: Any, x: Float[Array, "T D"], cache: Any, batch: Any, spec: QKVSpec
    ) -> tuple[Float[Array, "T N H"], Any]:
        """Queries of all rows; their keys and values are appended to the cache, which is consumed."""
        ...

    def attend(
        self, layer: Any, q: Float[Array, "T N H"], cache: Any, batch: Any, spec: AttendSpec
    ) -> Float[Array, "T N*H"]: ...

    def project_add(
        self, layer: Any, attended: Float[Array, "T N*H"], x: Float[Array, "T D"], batch: Any, spec: ProjectSpec
    ) -> Float[Array, "T D"]: ...

    def mlp_add(self, layer: Any, x: Float[Array, "T D"], batch: Any, spec: MLPSpec) -> Float[Array, "T D"]: ...

    def head(self, params: Any, x: Float[Array, "T D"], batch: Any, spec: HeadSpec) -> Float[Array, "S V"]:
        """Logits of the rows that sample."""
        ...

    def sample(
        self, logits: Float[Array, "S V"], batch: Any, last_token: Int[Array, " B"]
    ) -> tuple[Int[Array, "S 2+2n"], Int[Array, " B"]]:
        """What was chosen, and the slots' last tokens, which are consumed, with it.

        Packs, for each sample, the token, its log-probability and the most likely ids and theirs, floats as their bits.
        """
        ...
