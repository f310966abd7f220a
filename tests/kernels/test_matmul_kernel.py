"""Products with packed weights: exact weights, the arithmetic they promise, and a row's bits in any company."""

import numpy as np
import pytest

from tests.kernels.products import (
    FLOATS,
    QUANTS,
    Tensor,
    as_kernels_see,
    kernels,
    pack_head,
    pack_tensors,
    product,
    random_tensor,
)
from twinjet.core.errors import CheckpointError
from twinjet.ops.cpu_library import INSTRUCTIONS
from twinjet.ops.cpu_weights import MatrixPlace

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")


def sizes(quant: str) -> list[tuple[int, int]]:
    """(columns, inputs): less than a panel, a panel and a bit, many; inputs in whole blocks, or any for floats."""
    if quant in K_QUANTS:
        return [(5, 256), (33, 512)]
    return [(5, 45), (16, 96), (49, 37)] if quant in FLOATS else [(5, 32), (49, 96), (64, 224)]


@pytest.mark.parametrize("quant", QUANTS)
def test_products_are_those_of_the_file_s_weights(quant: str) -> None:
    rng = np.random.default_rng(QUANTS.index(quant))
    for columns, inputs in sizes(quant):
        tensor = random_tensor(rng, quant, columns, inputs)
        packed = pack_tensors([tensor])
        weights = tensor.dequantize().astype(np.float64)
        for rows in (1, 2, 3, 5, 6, 7, 13):
            x = rng.normal(0, 1, (rows, inputs)).astype(np.float32)
            x[0, : inputs // 2] = 0.0
            seen = as_kernels_see(x, quant)
            expected, bound = seen @ weights.T, np.abs(seen) @ np.abs(weights).T
            # Rounding of one chain of additions, nothing more. Where there is a minimum, parts cancel.
            slack = 8.0 if quant in ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K") else 1.0
            error = np.abs(product(x, *packed) - expected)
            assert (error <= 1e-6 * slack * bound + 1e-7).all(), (columns, inputs, rows, (error / bound).max())


@pytest.mark.parametrize("quant", QUANTS)
def test_eight_bits_of_activation_lose_little_and_floats_nothing_that_matters(quant: str) -> None:
    rng = np.random.default_rng(5)
    tensor = random_tensor(rng, quant, 64, 256)
    x = rng.normal(0, 1, (8, 256)).astype(np.float32)
    exact = x.astype(np.float64) @ tensor.dequantize().astype(np.float64).T
    error = np.sqrt(np.mean((product(x, *pack_tensors([tensor])) - exact) ** 2) / np.mean(exact**2))
    assert error < (5e-5 if quant in FLOATS else 8e-3)


@pytest.mark.parametrize("quant", QUANTS)
def test_a_row_s_bits_depend_on_nothing_but_the_row(quant: str) -> None:
    rng = np.random.default_rng(6)
    packed = pack_tensors([random_tensor(rng, quant, 83, 256)])
    rows = rng.normal(0, 1, (9, 256)).astype(np.float32)
    alone = np.concatenate([product(row[None], *packed) for row in rows])
    try:
        for threads in (1, 2, 3):
            kernels().set_threads(threads)
            for count in (2, 3, 5, 6, 7, 8, 13, 37, 128, 300):
                chosen = rng.integers(0, len(rows), count)
                together = product(rows[chosen], *packed)
                np.testing.assert_array_equal(together.view(np.int32), alone[chosen].view(np.int32))
    finally:
        kernels().set_threads(2)


def test_tensors_of_several_types_lie_side_by_side() -> None:
    rng = np.random.default_rng(7)
    tensors = [random_tensor(rng, quant, columns, 256) for quant, columns in (("Q4_1", 40), ("Q6_K", 7), ("F16", 18))]
    x = rng.normal(0, 1, (7, 256)).astype(np.float32)
    together = product(x, *pack_tensors(tensors))
    apart = [product(x, *pack_tensors([tensor])) for tensor in tensors]
    np.testing.assert_array_equal(together, np.concatenate(apart, axis=1))


@pytest.mark.parametrize("quant", ["Q4_1", "Q8_0"])
def test_the_largest_numbers_do_not_overflow(quant: str) -> None:
    """All weights and activations at their extremes, alike and opposed in sign."""
    rng = np.random.default_rng(8)
    tensor = random_tensor(rng, quant, 16, 512)
    data = tensor.data.copy().reshape(16, 16, -1)
    data[:, :, -16 if quant == "Q4_1" else -32 :] = 0xFF if quant == "Q4_1" else 0x80  # 15, and -128
    tensor = Tensor("w", quant, tensor.shape, data.reshape(16, -1))
    x = np.full((6, 512), 3.0, np.float32)
    x[1::2] = -3.0
    x[2, ::2] *= -1.0
    expected = as_kernels_see(x, quant) @ tensor.dequantize().astype(np.float64).T
    np.testing.assert_allclose(product(x, *pack_tensors([tensor])), expected, rtol=1e-5, atol=1e-3)


def test_vanishing_and_vast_activations() -> None:
    rng = np.random.default_rng(9)
    tensor = random_tensor(rng, "Q4_1", 16, 64)
    packed = pack_tensors([tensor])
    x = rng.normal(0, 1, (3, 64)).astype(np.float32)
    np.testing.assert_array_equal(product(x * np.float32(1e-38), *packed), 0.0)
    vast = product(x * np.float32(1e30), *packed)
    assert np.isfinite(vast).all()
    np.testing.assert_allclose(vast, product(x, *packed) * np.float32(1e30), rtol=1e-4, atol=1e25)


@pytest.mark.parametrize("quant", ["Q4_1", "Q6_K", "F16"])
def test_a_damaged_scale_is_refused(quant: str) -> None:
    tensor = random_tensor(np.random.default_rng(10), quant, 16, 256)
    data = tensor.data.copy()
    raw = data.view(np.uint8).reshape(16, -1)
    raw[3, 208 if quant == "Q6_K" else 0 :][:2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    with pytest.raises(CheckpointError, match="not finite"):
        pack_tensors([Tensor("w", quant, (16, 256), data)])


def test_places_outside_the_weights_are_refused() -> None:
    blob, place = pack_tensors([random_tensor(np.random.default_rng(11), "Q4_1", 16, 64)])
    ((number, columns, offset),) = place.segments
    beyond = MatrixPlace(64, ((number, columns, offset + (1 << 20)),))
    with pytest.raises(Exception, match="outside the weights"):
        product(np.ones((1, 64), np.float32), blob, beyond)


def test_a_head_of_eight_bits_takes_inputs_of_sixteen() -> None:
    rng = np.random.default_rng(9)
    for columns, inputs in sizes("Q8_0"):
        tensor = random_tensor(rng, "Q8_0", columns, inputs)
        packed = pack_head(tensor)
        x = rng.normal(0, 1, (13, inputs)).astype(np.float32)
        exact = x.astype(np.float64) @ tensor.dequantize().astype(np.float64).T
        together = product(x, *packed)
        assert np.sqrt(np.mean((together - exact) ** 2) / np.mean(exact**2)) < 5e-5
        for row in range(13):
            alone = product(x[row : row + 1], *packed)
            np.testing.assert_array_equal(alone.view(np.int32), together[row : row + 1].view(np.int32))


@pytest.mark.parametrize("quant", [*(quant for quant in QUANTS if quant not in FLOATS), "head"])
def test_every_instruction_set_gives_the_same_bits(quant: str) -> None:
    library = kernels()
    best = library.instructions
    if best == INSTRUCTIONS[0]:
        pytest.skip(f"this processor has none but {best}")
    rng = np.random.default_rng(8)
    try:
        for columns, inputs in [*sizes("Q8_0" if quant == "head" else quant), (80, 1024)]:
            if quant == "head":
                packed = pack_head(random_tensor(rng, "Q8_0", columns, inputs))
            else:
                packed = pack_tensors([random_tensor(rng, quant, columns, inputs)])
            for rows in (1, 2, 3, 4, 5, 6, 13):
                x = rng.normal(0, 1, (rows, inputs)).astype(np.float32)
                x[0, :32] = 127.0 * rng.choice([-1, 1], 32)  # the largest sums
                results = []
                for name in INSTRUCTIONS:
                    assert library.use_instructions(name)
                    results.append(product(x, *packed).view(np.int32))
                np.testing.assert_array_equal(*results)
    finally:
        library.use_instructions(best)
