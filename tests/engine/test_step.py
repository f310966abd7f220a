"""Rows of a step: chunks, company, page grants and slots, against a forward pass without any of them."""

import time

import numpy as np
import pytest

from tests.engine.drive import GREEDY, Sequenced, decode, export_kv, pages, prefill, step
from tests.models.naive import NaiveModel
from twinjet.core.plan import Plan
from twinjet.core.types import MAX_LOGPROBS, SamplingParams
from twinjet.engine.engine import Engine
from twinjet.engine.interface import run_plan

PAGE_SIZE, NUM_PAGES = 16, 192


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(3, 270, length).tolist()


def sequences(rng: np.random.Generator, *lengths: int, **settings) -> list[Sequenced]:
    """One in each slot, with pages for so many tokens."""
    placed = pages(rng, NUM_PAGES, PAGE_SIZE, *lengths)
    return [Sequenced(slot, page_ids, PAGE_SIZE, **settings) for slot, page_ids in enumerate(placed)]


@pytest.mark.parametrize("chunks", [[31], [1] * 31, [16, 15], [15, 16], [30, 1], [1, 30], [7, 9, 2, 13]], ids=str)
def test_chunks_of_any_size_give_what_the_naive_forward_gives(
    engine: Engine, naive: NaiveModel, rng: np.random.Generator, chunks: list[int]
) -> None:
    token_ids = prompt(rng, 31)
    (one,) = sequences(rng, 64, num_logprobs=MAX_LOGPROBS)
    output = prefill(engine, one, token_ids, chunks)
    decode(engine, [one], 4)
    assert one.tokens == naive.greedy(token_ids, 5)
    _check_logprobs(output, 0, naive.logits(token_ids)[-1])


def test_a_long_prompt_runs_over_many_pages_and_pieces(
    engine: Engine, naive: NaiveModel, rng: np.random.Generator
) -> None:
    token_ids = prompt(rng, 300)
    (one,) = sequences(rng, 320)
    prefill(engine, one, token_ids, [32] * 10)
    decode(engine, [one], 5)
    assert one.tokens == naive.greedy(token_ids, 6)


def test_chunks_and_decoding_rows_share_a_step(engine: Engine, naive: NaiveModel, rng: np.random.Generator) -> None:
    prompts = [prompt(rng, length) for length in (20, 33, 1, 31)]
    a, b, c, d = sequences(rng, 64, 64, 64, 64)
    step(engine, [(a, prompts[0], True)])
    step(engine, [(b, prompts[1][:21], False), (a, None, True), (c, prompts[2], True)])
    step(engine, [(c, None, True), (d, prompts[3][:17], False), (b, prompts[1][21:], True), (a, None, True)])
    step(engine, [(a, None, True), (b, None, True), (d, prompts[3][17:], True), (c, None, True)])
    decode(engine, [d, b, a, c], 3)
    for one, token_ids in zip((a, b, c, d), prompts, strict=True):
        assert one.tokens == naive.greedy(token_ids, len(one.tokens))


def test_a_token_may_come_from_the_host_instead(engine: Engine, naive: NaiveModel, rng: np.random.Generator) -> None:
    """As after a move between engines: the last token of the slot is not this sequence's."""
    token_ids = prompt(rng, 21)
    other, one = sequences(rng, 64, 64)
    prefill(engine, other, prompt(rng, 9), [9])
    prefill(engine, one, token_ids, [21])
    one.slot = other.slot
    one.num_granted = 0
    step(engine, [(one, one.tokens[-1:], True)])
    decode(engine, [one], 2)
    assert one.tokens == naive.greedy(token_ids, 4)


def test_a_slot_and_its_pages_serve_one_after_another(
    engine: Engine, naive: NaiveModel, rng: np.random.Generator
) -> None:
    (page_ids,) = pages(rng, NUM_PAGES, PAGE_SIZE, 80)
    for length in (70, 5, 33):
        token_ids = prompt(rng, length)
        one = Sequenced(2, tuple(rng.permutation(page_ids).tolist()), PAGE_SIZE)
        prefill(engine, one, token_ids, [32] * -(-length // 32))
        decode(engine, [one], 2)
        assert one.tokens == naive.greedy(token_ids, 3)


def test_a_chunk_that_does_not_sample_leaves_the_last_token_of_its_slot(
    engine: Engine, naive: NaiveModel, rng: np.random.Generator
) -> None:
    token_ids = prompt(rng, 12)
    one, other = sequences(rng, 64, 64)
    prefill(engine, one, token_ids, [12])
    intruder = Sequenced(one.slot, other.page_ids, PAGE_SIZE)
    step(engine, [(intruder, prompt(rng, 10), False)])
    one.num_granted = 0  # the slot's pages were the other's
    step(engine, [(one, None, True)])
    assert one.tokens == naive.greedy(token_ids, 2)


def test_each_sample_follows_its_own_parameters(engine: Engine, rng: np.random.Generator) -> None:
    """Replays repeat; a sample does not depend on who shares the step."""
    token_ids = prompt(rng, 10)
    kinds = [
        GREEDY,
        SamplingParams(1.5, seed=2**62 + 9),
        SamplingParams(1.5, seed=2**62 + 9, choice=1),
        SamplingParams(1.5, top_k=3, top_p=0.9, min_p=0.01, seed=4),
    ]

    def run(chosen: list[int]) -> dict[int, list[int]]:
        placed = sequences(rng, *[64] * len(chosen))
        for one, kind in zip(placed, chosen, strict=True):
            one.sampling = kinds[kind]
            prefill(engine, one, token_ids, [10])
        decode(engine, placed, 12)
        return {kind: one.tokens for one, kind in zip(placed, chosen, strict=True)}

    together = run([0, 1, 2, 3])
    assert len({tuple(tokens) for tokens in together.values()}) == 4
    for order in ([3, 0, 2, 1], [1], [2, 3]):
        for kind, tokens in run(order).items():
            assert tokens == together[kind]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1, seed=3),
        SamplingParams(min_p=1.0, seed=4),
        SamplingParams(top_p=1e-50, seed=5),
        SamplingParams(temperature=1.2e-38, seed=6),
        SamplingParams(temperature=1e-300, seed=7),
        SamplingParams(temperature=100.0, top_k=1, top_p=1e-6, min_p=1.0, seed=8),
    ],
    ids=lambda params: f"t{params.temperature} k{params.top_k} p{params.top_p} m{params.min_p}",
)
def test_the_narrowest_settings_are_greedy(
    engine: Engine, naive: NaiveModel, rng: np.random.Generator, params: SamplingParams
) -> None:
    token_ids = prompt(rng, 10)
    (one,) = sequences(rng, 64, sampling=params)
    prefill(engine, one, token_ids, [10])
    decode(engine, [one], 9)
    assert one.tokens == naive.greedy(token_ids, 10)


def test_shapes_of_what_comes_back(engine: Engine, rng: np.random.Generator) -> None:
    a, b, c = sequences(rng, 64, 64, 64)
    b.num_logprobs = 0
    quiet = step(engine, [(a, prompt(rng, 3), True), (c, prompt(rng, 2), False)])
    assert (quiet.step_id, quiet.num_padding_rows) == (7, 3)
    assert quiet.token_ids.shape == (1,)
    assert quiet.token_ids.dtype == np.int32
    assert (quiet.logprobs, quiet.top_ids, quiet.top_logprobs) == (None, None, None)
    assert 0 < quiet.started_s <= quiet.ended_s

    asked = step(engine, [(a, None, True), (b, prompt(rng, 20), True), (c, prompt(rng, 2), False)])
    assert asked.num_padding_rows == 32 - 23
    assert asked.logprobs is not None
    assert asked.top_ids is not None
    assert asked.top_logprobs is not None
    assert asked.token_ids.shape == asked.logprobs.shape == (2,)
    assert asked.top_ids.shape == asked.top_logprobs.shape == (2, MAX_LOGPROBS)
    assert (asked.top_ids.dtype, asked.logprobs.dtype, asked.top_logprobs.dtype) == (np.int32, np.float32, np.float32)
    assert asked.token_ids.tolist() == asked.top_ids[:, 0].tolist()

    c.num_logprobs = 5
    silent = step(engine, [(c, prompt(rng, 2), False)])
    assert silent.token_ids.shape == (0,)
    assert silent.logprobs is None


def test_a_plan_without_rows_changes_nothing(engine: Engine, naive: NaiveModel, rng: np.random.Generator) -> None:
    token_ids = prompt(rng, 8)
    (one,) = sequences(rng, 64)
    prefill(engine, one, token_ids, [8])
    output = run_plan(engine, Plan(3, grants=one.grant(40)))
    assert (output.step_id, output.token_ids.shape, output.num_padding_rows, output.exports) == (3, (0,), 0, ())
    decode(engine, [one], 12)
    assert one.tokens == naive.greedy(token_ids, 13)


def test_a_step_tells_when_the_device_began_and_ended_and_how_long_its_kernels_ran(
    engine: Engine, backend: str, rng: np.random.Generator
) -> None:
    (one,) = sequences(rng, 64)
    before_s = time.monotonic()
    output = prefill(engine, one, prompt(rng, 31), [31])
    between_s = time.monotonic()
    assert before_s <= output.started_s < output.ended_s <= between_s
    if backend == "reference":
        assert output.kernel_s is None
        return
    # Kernels run one after another, all of them between the two.
    assert output.kernel_s is not None
    assert 0 < output.kernel_s <= output.ended_s - output.started_s + 1e-9
    later = run_plan(engine, Plan(step_id=7))
    assert later.kernel_s is None
    assert later.started_s >= between_s


def test_padding_writes_nowhere(engine: Engine, rng: np.random.Generator) -> None:
    """Page 0 is what an empty page table points to."""
    before = export_kv(engine, (0,), 0, PAGE_SIZE)
    one = Sequenced(1, tuple(range(1, 5)), PAGE_SIZE)
    prefill(engine, one, prompt(rng, 41), [23, 18])
    decode(engine, [one], 3)
    np.testing.assert_array_equal(export_kv(engine, (0,), 0, PAGE_SIZE), before)


def _check_logprobs(output, row: int, logits: np.ndarray) -> None:
    logp = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    order = np.argsort(-logp)[:MAX_LOGPROBS]
    assert output.top_ids[row].tolist() == order.tolist()
    np.testing.assert_allclose(output.top_logprobs[row], logp[order], atol=1e-4)
    np.testing.assert_allclose(output.logprobs[row], logp[output.token_ids[row]], atol=1e-4)
