"""What a step's last kernel tells whoever waits for the step."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.products import kernels
from tests.kernels.step_calls import call, pack, step_attributes
from tests.ops.ragged import batch_of
from tests.ops.sampling_oracle import samples_of
from twinjet.core.types import SamplingParams
from twinjet.ops.batch import StepLayout
from twinjet.ops.cpu import CpuOps

LAYOUT = StepLayout(4, 4, 8)


def run_step(tag: int, token: int) -> np.ndarray:
    """One row that samples `token`, greedily; what XLA returns."""
    logits = np.zeros((4, 32), np.float32)
    logits[:, token] = 5.0
    batch = dataclasses.replace(
        batch_of(LAYOUT, [], np.zeros((4, 8), np.int32)), samples=samples_of([(SamplingParams(temperature=0.0), 3)], 4)
    )
    arrays = [logits, pack(LAYOUT, batch, tag), np.zeros(4, np.int32)]
    shapes = [jax.ShapeDtypeStruct((4, 10), np.int32), jax.ShapeDtypeStruct((4,), np.int32)]
    result, _ = call("twinjet_sample", shapes, arrays, {2: 1}, **step_attributes(LAYOUT))
    return np.asarray(result)


def test_each_step_is_told_of_once_by_its_tag() -> None:
    library = kernels()
    before_s = time.monotonic()
    first, second = run_step(1001, 7), run_step(1002, 9)
    for tag, result, token in ((1002, second, 9), (1001, first, 7)):
        ended = library.wait_step(tag, 0.0, result.size)
        assert ended is not None
        table, clock = ended
        assert table.tolist() == result[0].tolist()
        assert table[0] == token
        assert before_s <= clock.started_s <= clock.ended_s <= time.monotonic()
        assert clock.busy_s is not None
        assert 0 <= clock.busy_s <= clock.ended_s - clock.started_s + 1e-9
        assert library.wait_step(tag, 0.0, result.size) is None
    assert library.wait_step(4711, 0.01, 8) is None


def test_no_more_is_copied_than_there_is_room_for() -> None:
    run_step(1003, 5)
    ended = kernels().wait_step(1003, 0.0, 2)
    assert ended is not None
    assert len(ended[0]) == 2
    assert ended[0][0] == 5


def test_who_waits_is_woken() -> None:
    seen: list[int] = []

    def wait() -> None:
        ended = kernels().wait_step(1004, 20.0, 10)
        seen.append(-1 if ended is None else int(ended[0][0]))

    waiter = threading.Thread(target=wait)
    waiter.start()
    run_step(1004, 11)
    waiter.join(10.0)
    assert seen == [11]


def test_the_unread_are_forgotten_in_time() -> None:
    run_step(2000, 3)
    for tag in range(2001, 2300):
        run_step(tag, 4)
    assert kernels().wait_step(2000, 0.0, 10) is None
    assert kernels().wait_step(2299, 0.0, 10) is not None


def test_a_program_that_ended_without_its_last_kernel_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinjet.ops.cpu.LOOK_S", 0.001)
    with pytest.raises(RuntimeError, match="without its last kernel"):
        CpuOps(kernels(), 16).finish(999_999, jnp.zeros((4, 10), jnp.int32))
