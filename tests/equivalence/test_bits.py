"""On the CPU kernels a row's results are the same bits, however its sequence is computed and in whatever company.

Compares log-probabilities as integers, over random plans: chunks of random sizes beside strangers, on other pages, in
other slots, on other numbers of threads.
"""

import random
from pathlib import Path

import numpy as np
import pytest

from tests.equivalence.drive import GREEDY, build_engine
from tests.kernels.products import kernels
from tests.tiny_models import write_tiny_gemma3, write_tiny_llama
from twinjet.core.plan import PageGrant, Plan, SequenceWork
from twinjet.engine.engine import Engine
from twinjet.engine.interface import run_plan

CONTEXT, NUM_PAGES, LENGTH = 512, 256, 190
PAGES = CONTEXT // 16
MODELS = {
    "llama-Q4_1": (write_tiny_llama, "Q4_1", "float16"),
    "llama-Q8_0": (write_tiny_llama, "Q8_0", "float16"),
    "llama-Q4_0-int8": (write_tiny_llama, "Q4_0", "int8"),
    "gemma3-Q5_1": (write_tiny_gemma3, "Q5_1", "float16"),
    "gemma3-F16": (write_tiny_gemma3, "F16", "float32"),
}


@pytest.fixture(scope="module", params=list(MODELS))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    kernels()
    write, quant, kv_dtype = MODELS[request.param]
    path: Path = tmp_path_factory.mktemp("bits") / "tiny.gguf"
    write(path, quant=quant)
    return build_engine(str(path), context=CONTEXT, num_pages=NUM_PAGES, exact=False, kv_dtype=kv_dtype)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 250) for _ in range(length))


def bits_of_chunks(engine: Engine, cuts: list[int], seed: int, num_strangers: int) -> dict[int, np.ndarray]:
    """Position of each chunk's last row -> the bits of its log-probabilities."""
    rng = random.Random(seed)
    slots = rng.sample(range(16), num_strangers + 1)
    pages = rng.sample(range(NUM_PAGES), PAGES * 8)
    grants = [PageGrant(slots[0], 0, tuple(pages[:PAGES]))]
    grants += [PageGrant(slot, 0, tuple(pages[PAGES * (i + 1) :][:PAGES])) for i, slot in enumerate(slots[1:])]
    tokens, start, found = prompt(1, LENGTH), 0, {}
    starts = dict.fromkeys(slots[1:], 0)
    for stop in [*cuts, LENGTH]:
        mine = SequenceWork(0, slots[0], start, stop - start, tokens[start:stop], True, GREEDY, num_logprobs=20)
        work = [mine]
        for slot in slots[1:]:
            size = rng.choice((1, 1, 3, 17, 40))
            chunk = prompt(slot, CONTEXT)[starts[slot] : starts[slot] + size]
            if chunk:
                work.insert(
                    rng.randrange(len(work) + 1),
                    SequenceWork(slot + 1, slot, starts[slot], len(chunk), chunk, True, GREEDY),
                )
            starts[slot] += len(chunk)
        output = run_plan(engine, Plan(0, tuple(work), tuple(grants)))
        grants = []
        row = work.index(mine)
        assert output.top_logprobs is not None
        assert output.top_ids is not None
        found[stop - 1] = np.concatenate([output.top_ids[row], output.top_logprobs[row].view(np.int32)])
        start = stop
    return found


def bits_on_shared_pages(engine: Engine, cut: int, seed: int, num_strangers: int, same_step: bool) -> np.ndarray:
    """The last row's bits of a sequence that reads its first `cut` positions from another's pages."""
    rng = random.Random(seed)
    slots = rng.sample(range(16), num_strangers + 2)
    pages = rng.sample(range(NUM_PAGES), PAGES * 8)
    tokens, shared = prompt(1, LENGTH), pages[: cut // 16]
    owner = SequenceWork(1, slots[0], 0, cut, tokens[:cut], True, GREEDY)
    mine = SequenceWork(0, slots[1], cut, LENGTH - cut, tokens[cut:], True, GREEDY, num_logprobs=20)
    grants = [
        PageGrant(slots[0], 0, tuple(pages[:PAGES])),
        PageGrant(slots[1], 0, (*shared, *pages[PAGES : 2 * PAGES - len(shared)])),
    ]
    others: list[SequenceWork] = []
    for i, slot in enumerate(slots[2:], 2):
        grants.append(PageGrant(slot, 0, tuple(pages[PAGES * i :][:PAGES])))
        size = rng.choice((1, 3, 17, 40))
        others.append(SequenceWork(slot + 2, slot, 0, size, prompt(slot, size), True, GREEDY))
    if same_step:
        output = run_plan(engine, Plan(0, (owner, *others, mine), tuple(grants)))
    else:
        run_plan(engine, Plan(0, (owner,), tuple(grants)))
        output = run_plan(engine, Plan(1, (*others, mine)))
    assert output.top_logprobs is not None
    assert output.top_ids is not None
    return np.concatenate([output.top_ids[-1], output.top_logprobs[-1].view(np.int32)])


def test_pages_of_another_sequence(engine: Engine) -> None:
    """A prefix hit: pages that another filled, in an earlier step or in this one."""
    expected = bits_of_chunks(engine, [], seed=0, num_strangers=0)[LENGTH - 1]
    for trial in range(8):
        row = bits_on_shared_pages(engine, 16 * (1 + trial), trial, trial % 5, same_step=trial % 2 == 0)
        np.testing.assert_array_equal(row, expected)


def test_random_plans(engine: Engine) -> None:
    expected = bits_of_chunks(engine, list(range(1, LENGTH)), seed=0, num_strangers=0)
    assert len({row.tobytes() for row in expected.values()}) > LENGTH // 2
    rng = random.Random(2)
    try:
        for trial in range(8):
            kernels().set_threads(1 + trial % 3)
            cuts = sorted(rng.sample(range(1, LENGTH), rng.choice((0, 1, 5, 12))))
            for position, row in bits_of_chunks(engine, cuts, seed=trial, num_strangers=rng.randrange(8)).items():
                np.testing.assert_array_equal(row, expected[position])
    finally:
        kernels().set_threads(2)
