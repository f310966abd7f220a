"""The kernels' threads: asleep when there is nothing to do, and no guests in others' floating-point settings."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.kernels.products import kernels, pack_tensors, product, random_tensor


def test_they_sleep_when_idle() -> None:
    packed = pack_tensors([random_tensor(np.random.default_rng(0), "Q4_1", 640, 256)])
    x = np.ones((4, 256), np.float32)
    product(x, *packed)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.02


def test_they_wake_again_however_long_the_pause() -> None:
    packed = pack_tensors([random_tensor(np.random.default_rng(1), "Q4_1", 640, 256)])
    x = np.random.default_rng(2).normal(0, 1, (7, 256)).astype(np.float32)
    expected = product(x, *packed)
    for pause_s in (0.0, 1e-5, 4e-5, 1e-4, 1e-3, 0.0) * 20:
        time.sleep(pause_s)
        np.testing.assert_array_equal(product(x, *packed), expected)


def test_denormal_numbers_survive_outside_the_kernels() -> None:
    packed = pack_tensors([random_tensor(np.random.default_rng(3), "Q8_0", 64, 32)])
    product(np.ones((1, 32), np.float32), *packed)
    tiny = np.full(8, 1e-40, np.float32)
    assert (tiny * np.float32(1.0) != 0.0).all()


def test_calls_from_several_threads_take_turns() -> None:
    packed = pack_tensors([random_tensor(np.random.default_rng(4), "Q4_0", 320, 256)])
    rows = np.random.default_rng(5).normal(0, 1, (8, 3, 256)).astype(np.float32)
    expected = [product(x, *packed) for x in rows]
    with ThreadPoolExecutor(4) as pool:
        for index, got in enumerate(pool.map(lambda x: product(x, *packed), [*rows] * 25)):
            np.testing.assert_array_equal(got, expected[index % 8])


def test_the_number_of_threads_changes_between_calls() -> None:
    packed = pack_tensors([random_tensor(np.random.default_rng(6), "Q4_1", 320, 256)])
    x = np.random.default_rng(7).normal(0, 1, (13, 256)).astype(np.float32)
    expected = product(x, *packed)
    try:
        for threads in (1, 4, 2, 7, 3) * 4:
            kernels().set_threads(threads)
            np.testing.assert_array_equal(product(x, *packed), expected)
    finally:
        kernels().set_threads(2)
