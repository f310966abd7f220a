"""Packed matrices for tests, and the products they stand for, in float64 from the same quantised activations."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from tests.tiny_models import random_blocks
from twinjet.kernels import KernelsUnavailable
from twinjet.ops.cpu_library import CpuLibrary, load_library
from twinjet.ops.cpu_pack import pack_model
from twinjet.ops.cpu_weights import FORMATS, CpuParams, MatrixPlace
from twinjet.ops.params import RawModel

FLOATS = ("F32", "F16", "BF16")
QUANTS = tuple(FORMATS)


@cache
def kernels() -> CpuLibrary:
    try:
        library = load_library()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    library.set_threads(2)
    return library


@dataclass(frozen=True)
class Tensor:
    """As a checkpoint has it."""

    name: str
    quant: str
    shape: tuple[int, ...]
    data: np.ndarray

    def dequantize(self) -> np.ndarray:
        return dequantize(self.data, GGMLQuantizationType[self.quant]).reshape(self.shape).astype(np.float32)


def random_tensor(rng: np.random.Generator, quant: str, columns: int, inputs: int) -> Tensor:
    return Tensor("w", quant, (columns, inputs), random_blocks(rng, quant, columns, inputs, inputs**-0.5))


def vector(values: np.ndarray) -> Tensor:
    return Tensor("v", "F32", values.shape, values.astype(np.float32))


def pack_head(tensor: Tensor) -> tuple[jax.Array, MatrixPlace]:
    """The tensor as a model's head, and the bytes that hold it."""
    raw = RawModel(tensor, [], vector(np.ones(1)), None)
    params = pack_model(kernels(), raw, lambda done, total: None)
    return params.blob, params.places.head


def pack_tensors(tensors: Sequence[Tensor]) -> tuple[jax.Array, MatrixPlace]:
    """The tensors side by side as one matrix, and the bytes that hold it."""
    raw = RawModel(tensors[0], [{"matrix": tensors}], vector(np.ones(1)), None)
    params: CpuParams = pack_model(kernels(), raw, lambda done, total: None)
    ((_, place),) = params.places.layers[0]
    assert isinstance(place, MatrixPlace)
    return params.blob, place


def product(x: np.ndarray, blob: jax.Array, place: MatrixPlace) -> np.ndarray:
    kernels()
    return np.asarray(_product(place, x, blob))


@partial(jax.jit, static_argnums=0)
def _product(place: MatrixPlace, x: jax.Array, blob: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct((x.shape[0], place.num_columns), jnp.float32)
    return jax.ffi.ffi_call("twinjet_matmul", result)(x, blob, weights=place.numbers)


def quantised(x: np.ndarray) -> np.ndarray:
    """float64: activations as kernels round them, to 127 steps of each 32's largest."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(x.shape[0], -1, 32)
    peak = np.abs(padded).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak >= 1e-30)
    whole = np.rint(padded * inverse).astype(np.float64)
    scaled = whole * (peak / np.float32(127)).astype(np.float64)
    return scaled.reshape(x.shape[0], -1)[:, : x.shape[1]]


def as_kernels_see(x: np.ndarray, quant: str) -> np.ndarray:
    return x.astype(np.float64) if quant in FLOATS else quantised(x)
