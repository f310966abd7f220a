"""The operations that models are written in. A backend implements all of them, and may fuse inside one, never across.

Chunking, paging, batching and sharding are the backend's business: a model sees rows [T, D] and nothing else.
`ReferenceOps` is every backend's oracle.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from jaxtyping import Array, Float

from twinjet.ops.batch import Batch
from twinjet.ops.params import KVCache, Layer, Params, RawLayer, Sampled, WeightTensor
from twinjet.ops.specs import AttendSpec, EmbedSpec, HeadSpec, MLPSpec, ProjectSpec, QKVSpec

Block = Callable[[Layer, Any, KVCache], tuple[Any, KVCache]]
"""One transformer layer: (layer, x, cache) -> (x, cache)."""


class Ops(Protocol):
    """A backend."""

    @property
    def name(self) -> str: ...

    def pack_layers(self, layers: Iterable[RawLayer], num_layers: int) -> dict[str, Array]:
        """All layers' weights in this backend's own form; takes one layer at a time."""
        ...

    def pack_matrix(self, tensor: WeightTensor) -> Array:
        """The embedding or head matrix in this backend's own form."""
        ...

    def run_layers(
        self, block: Block, params: Params, x: Float[Array, "T D"], cache: KVCache
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Apply `block` to all layers in order."""
        ...

    def embed(self, params: Params, batch: Batch, spec: EmbedSpec) -> Float[Array, "T D"]: ...

    def qkv(
        self, layer: Layer, x: Float[Array, "T D"], cache: KVCache, batch: Batch, spec: QKVSpec
    ) -> tuple[Float[Array, "T N H"], KVCache]:
        """Queries of all rows; their keys and values are appended to the cache, which is consumed."""
        ...

    def attend(
        self, layer: Layer, q: Float[Array, "T N H"], cache: KVCache, batch: Batch, spec: AttendSpec
    ) -> Float[Array, "T N*H"]: ...

    def project_add(
        self, layer: Layer, attended: Float[Array, "T N*H"], x: Float[Array, "T D"], spec: ProjectSpec
    ) -> Float[Array, "T D"]: ...

    def mlp_add(self, layer: Layer, x: Float[Array, "T D"], spec: MLPSpec) -> Float[Array, "T D"]: ...

    def head(self, params: Params, x: Float[Array, "T D"], batch: Batch, spec: HeadSpec) -> Float[Array, "S V"]:
        """Logits of the rows that sample."""
        ...

    def sample(self, logits: Float[Array, "S V"], batch: Batch) -> Sampled: ...
